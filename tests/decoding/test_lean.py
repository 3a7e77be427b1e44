"""The fast loop: used where it does what the model does, left alone where it does not; weights are held once."""

from collections.abc import Callable

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from decoding import lean, load_target
from decoding.engine import environment
from decoding.target import Target
from tests.decoding.test_lossless import ARCHITECTURES, SIZES, tiny_target

TAIL = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)


def answers(target: Target, forward, cache) -> torch.Tensor:
    """Features of a prompt longer than the sliding windows, of one more token, and of a tree behind it."""
    ids = torch.arange(40) * 17 % target.vocab_size
    first = forward(ids[:35], torch.arange(35), None, cache)
    one = forward(ids[35:36], torch.tensor([35]), None, cache)
    return torch.cat((first, one, forward(ids[36:], torch.tensor([36, 37, 37, 38]), TAIL, cache)))


@pytest.mark.parametrize("name", ARCHITECTURES)
@torch.inference_mode()
def test_every_family_is_run_by_the_loop(name: str) -> None:
    target = tiny_target(name)
    wanted = answers(target, target._own_forward, target._own_cache(40))
    assert target.lean is not None
    torch.testing.assert_close(answers(target, target.forward, target.new_cache(40)), wanted, rtol=1e-4, atol=1e-4)
    # the model's own modules live from the fused matrices and still work
    torch.testing.assert_close(answers(target, target._own_forward, target._own_cache(40)), wanted, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_packed_matrices_in_bfloat16(tiny_target) -> None:
    target = load_target("tests/golden/tiny_base", device="cpu", dtype="bfloat16")
    wanted = answers(target, target._own_forward, target._own_cache(40))
    found = answers(target, target.forward, target.new_cache(40))
    exact = answers(tiny_target, tiny_target.forward, tiny_target.new_cache(40))
    assert target.lean is not None
    # bfloat16 is as far from float32 with the loop as without it
    assert (found - exact).norm() < 1.5 * (wanted - exact).norm()
    again = answers(target, target._own_forward, target._own_cache(40))
    assert (again - wanted).norm() < 0.01 * wanted.norm()
    if target.lean.layers[0].qkv.packed is not None:
        assert target.model.model.layers[0].self_attn.q_proj.weight is None, "the weights would be held twice"


@torch.inference_mode()
def test_fused_matrices_are_multiplied_once_for_all_that_live_from_them(monkeypatch: pytest.MonkeyPatch) -> None:
    target = load_target("tests/golden/tiny_base", device="cpu", dtype="bfloat16")
    product = target.lean.layers[0].qkv
    if product.packed is None:
        pytest.skip("this CPU packs nothing")
    calls = []
    made = lean.Product.__call__
    monkeypatch.setattr(lean.Product, "__call__", lambda self, x: calls.append(self) or made(self, x))
    for _ in range(2):
        target._own_forward(torch.arange(5), torch.arange(5), None, target._own_cache(8))
    assert calls.count(product) == 2


@pytest.mark.parametrize("pack", [lean._mkl, lean._onednn])
@pytest.mark.parametrize("bias", [None, torch.linspace(-1, 1, 24)])
def test_a_product_is_the_same_for_any_number_of_rows(bias: torch.Tensor | None, pack: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(lean.PACKED, torch.float32, pack)  # either may be another processor's
    weight = torch.linspace(-1, 1, 24 * 16).view(24, 16)
    product = lean.Product(weight, bias)
    for rows in (0, 1, 4, 16, 64, 200):
        x = torch.linspace(-2, 2, rows * 16).view(rows, 16)
        found = product(x)
        torch.testing.assert_close(found, torch.nn.functional.linear(x, weight, bias))
        assert found.is_contiguous(), "the loop writes into it"
        torch.testing.assert_close(product(x[:, None]), found[:, None])


def test_what_a_cpu_can_not_pack_is_multiplied_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(weight: torch.Tensor) -> lean.Packed:
        raise RuntimeError("compiled without it")

    def wrong(weight: torch.Tensor) -> lean.Packed:
        return lambda x, bias: x @ weight.T + (len(x) > 64)

    weight = torch.linspace(-1, 1, 24 * 16).view(24, 16)
    for pack in (broken, wrong):
        monkeypatch.setitem(lean.PACKED, torch.float32, pack)
        product = lean.Product(weight)
        assert product.packed is None and torch.equal(product(weight), weight @ weight.T)


def test_weights_are_held_once(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = tiny_target("qwen2")
    if packed.lean.layers[0].qkv.packed is not None:
        assert packed.model.model.layers[0].self_attn.q_proj.weight is None
    monkeypatch.setattr(lean, "PACKED", {})
    target = tiny_target("qwen2")
    attention = target.model.model.layers[0].self_attn
    fused = target.lean.layers[0].qkv.weight
    assert attention.k_proj.weight.untyped_storage().data_ptr() == fused.untyped_storage().data_ptr()
    assert torch.equal(attention.v_proj.weight, fused[-attention.v_proj.out_features :])


def test_what_the_loop_can_not_do_keeps_the_models_own_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    def model(**changes) -> Target:
        config = LlamaConfig(**{**SIZES, **changes})
        return Target("", AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval(), None, frozenset())

    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert model(rope_parameters=rope).lean is None
    other = model()
    other.model.config.model_type = "somebody's"
    assert other.lean is None and "own forward" in environment(other).notes[0]
    spread = model()
    spread.model.model.layers[1].to("meta")
    assert spread.lean is None
    # an architecture that computes something else under a known name is found out by comparing
    wrong = model()
    original = wrong.model.model.layers[0].mlp.forward
    monkeypatch.setattr(wrong.model.model.layers[0].mlp, "forward", lambda x: 2 * original(x))
    assert wrong.lean is None
    ids = torch.arange(5)
    wanted = wrong.model.model(ids[None]).last_hidden_state[0]
    torch.testing.assert_close(wrong.forward(ids, ids, None, wrong.new_cache(8)), wanted)
    quantised = model()
    quantised.model.model.layers[1].mlp.up_proj = torch.nn.Linear(32, 64, bias=False)
    quantised.model.model.layers[1].mlp.up_proj.__class__ = type("Linear4bit", (torch.nn.Linear,), {})
    assert quantised.lean is None


def test_rotary_table_grows() -> None:
    angle = torch.arange(4.0)[None, None] * 0.1

    def module(x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        angles = positions[..., None] * angle
        return angles.cos(), angles.sin()

    rotary = lean.Rotary(module)
    rotary.reserve(10, torch.device("cpu"))
    before = rotary.at(torch.tensor([3]))[1]
    rotary.reserve(1000, torch.device("cpu"))
    assert torch.equal(rotary.at(torch.tensor([3]))[1], before) and len(rotary.table) == 1000
    assert torch.allclose(before[0, 0, :2], -(3 * angle[0, 0, :2]).sin())
