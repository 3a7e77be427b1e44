"""Fixed shapes give what growing ones give; the GPU script's figures are computed; runs leave no memory behind."""

import gc

import pytest
import torch

from decoding import Settings, generate
from decoding.static import StaticForward
from heads import load_head
from tests.conftest import GOLDEN
from tests.decoding.test_lossless import tiny_target as made
from tests.measure_gpu import measure, random_target


@pytest.mark.parametrize("name", ["llama", "qwen3, own head_dim"])
@torch.inference_mode()
def test_a_fixed_shape_gives_what_a_growing_one_gives(name: str) -> None:
    target = made(name)
    assert target.lean is not None
    growing, fixed = target.new_cache(40), StaticForward(target.lean, 40, 4, target.logits)
    assert not fixed.capture(), "a CPU has no graphs: the forward itself is used"
    tail = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]], dtype=torch.bool)
    for step in range(4):
        start = growing.length
        ids = torch.arange(4) * 5 + step
        positions = start + torch.tensor([0, 1, 1, 2])
        wanted = target.forward(ids, positions, tail, growing)
        features, logits = fixed(ids, positions, tail)
        torch.testing.assert_close(features, wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(logits, target.logits(wanted), rtol=1e-4, atol=1e-5)
        for cache in (growing, fixed.cache):  # the path root, 1, 3 is kept
            cache.commit(start, torch.tensor([0, 1, 3]), 3)


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
