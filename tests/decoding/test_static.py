"""Fixed shapes give what growing ones give; the GPU script's figures are computed; runs leave no memory behind."""

import gc

import pytest
import torch

from decoding import Settings, generate
from decoding.engine import Generation
from decoding.records import TreeShape
from heads import load_head
from tests.conftest import GOLDEN
from tests.decoding.test_lossless import tiny_target as made
from tests.measure_gpu import measure, random_target
from tests.stubs import untrained_head


@pytest.fixture
def fixed_shapes(monkeypatch) -> None:
    """Fixed shapes as on a GPU, run as they are where a graph would be replayed."""
    for module in ("decoding.static", "decoding.target", "heads.session"):
        monkeypatch.setattr(f"{module}.graphs_for", lambda device: True)
    monkeypatch.setattr("decoding.static.recorded", lambda fixed: not fixed.capture())


@pytest.mark.parametrize("name", ["llama", "qwen3, own head_dim"])
@torch.inference_mode()
def test_a_fixed_shape_gives_what_a_growing_one_gives(name: str, fixed_shapes) -> None:
    target = made(name)
    growing, fixed = target.lean.new_cache(40), target.new_cache(40, [6])
    assert fixed.capacity == 512 and list(fixed.fixed) == [6]
    tail = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool)
    for step in range(4):
        start = growing.length
        ids = torch.arange(4) * 5 + step
        positions = start + torch.tensor([0, 1, 1, 2])
        wanted = target.forward(ids, positions, tail, growing)
        torch.testing.assert_close(target.forward(ids, positions, tail, fixed), wanted, rtol=1e-4, atol=1e-5)
        for cache in (growing, fixed):  # the path root, 1, 3 is kept
            cache.commit(start, torch.tensor([0, 1, 3]), 3)


@pytest.mark.parametrize("shape", [TreeShape(4, 3, 9), TreeShape(2, 6, 12), TreeShape(1, 1, 1)])
def test_runs_in_fixed_shapes_are_the_same_runs(shape: TreeShape, fixed_shapes, monkeypatch) -> None:
    target = made("llama")
    settings = Settings(max_new_tokens=40, stop_token_ids=(), tree_depth=shape.depth, tree_top_k=shape.top_k, tree_nodes=shape.nodes)
    head = untrained_head(target)
    fixed = [generate(target, used, [3, 1, 4, 1, 5], settings) for used in (None, head, head)]
    stores = [store for shelf in (target.shelf, head.shelf) for store, _ in shelf._kept]
    assert len(stores) == 2 and all(store.fixed for store in stores), "runs take turns in one store each"
    target.shelf = head.shelf = None
    growing = [generate(target, used, [3, 1, 4, 1, 5], settings) for used in (None, head, head)]
    for ours, wanted in zip(fixed, growing, strict=True):
        assert ours.output_ids == wanted.output_ids
        assert [step.node_ids for step in ours.steps] == [step.node_ids for step in wanted.steps]
        assert [step.accepted for step in ours.steps] == [step.accepted for step in wanted.steps]


def test_two_runs_at_once_have_a_store_each(fixed_shapes) -> None:
    target = made("llama")
    head, settings = untrained_head(target), Settings(max_new_tokens=12, stop_token_ids=())
    alone = generate(target, head, [7, 8], settings).output_ids
    first, second = (Generation(target, head, prompt, settings) for prompt in ([7, 8], [9]))
    for _ in zip(first, second, strict=False):
        pass
    assert first.output_ids[: len(alone)] == alone[: len(first.output_ids)]
    del first, second
    generate(target, head, [7, 8], settings)
    assert len(target.shelf._kept) == 1, "what nobody uses is given up"


def test_where_nothing_can_be_recorded_shapes_grow(monkeypatch) -> None:
    monkeypatch.setattr("decoding.target.graphs_for", lambda device: True)
    target = made("llama")
    cache = target.new_cache(40, [4])
    assert target.shelf.refused and not cache.fixed and cache.capacity == 40


def test_the_gpu_script_measures() -> None:
    shape = {
        "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4,
        "max_position_embeddings": 256,
    }  # fmt: skip
    found = measure(random_target("cpu", 2, shape), context=20, repeats=1)
    assert found["graphs"] is False and all(value > 0 for name, value in found.items() if name.endswith("ms"))


def test_runs_leave_nothing_behind(tiny_target) -> None:
    head = load_head(str(GOLDEN / "hass_tiny" / "head_mid"), tiny_target)
    settings = Settings(max_new_tokens=12, stop_token_ids=())

    def held() -> int:
        gc.collect()
        return sum(one.nbytes for one in gc.get_objects() if type(one) is torch.Tensor)

    for used in (None, head):  # what is made once: fused matrices, rotary tables
        generate(tiny_target, used, [1, 2, 3], settings)
    before = held()
    for run in range(20):
        generate(tiny_target, head if run % 2 else None, [1, 2, 3], settings)
        assert held() == before
