"""Greedy output equals transformers' own greedy generate, token for token in float32, for every head and architecture."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from decoding import Generation, Settings, generate, load_target
from decoding.metrics import lossless
from decoding.records import TreeShape
from decoding.target import Target
from heads import checkpoint, load_head
from tests.stubs import untrained_head

GOLDEN = Path(__file__).parent.parent / "golden"
SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 160, "initializer_range": 0.3, "eos_token_id": None, "bos_token_id": None,
}  # fmt: skip
ARCHITECTURES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama, tied, llama3 rope": LlamaConfig(
        **SIZES,
        tie_word_embeddings=True,
        rope_parameters={
            "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "mistral, sliding": MistralConfig(**SIZES, sliding_window=24),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2, sliding": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=24, max_window_layers=2),
    "qwen3, own head_dim": Qwen3Config(**SIZES, head_dim=16),
}  # fmt: skip
SHAPES = [TreeShape(), TreeShape(1, 1, 1), TreeShape(4, 1, 4), TreeShape(3, 4, 12), TreeShape(2, 12, 100)]


def tiny_target(name: str, seed: int = 0) -> Target:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(ARCHITECTURES[name], attn_implementation="sdpa").eval()
    return Target(name, model, None, frozenset())


def reference(target: Target, prompt: list[int], tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = target.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_equals_transformers(name: str) -> None:
    target = tiny_target(name)
    prompt = [3, 14, 15, 9, 2, 6]
    wanted = reference(target, prompt, 60)
    assert generate(target, None, prompt, Settings(max_new_tokens=60)).output_ids == wanted
    for layers, shape in zip((1, 2, 3, 1, 2), SHAPES, strict=True):
        head = untrained_head(target, layers, seed=layers)
        settings = Settings(max_new_tokens=60, tree_depth=shape.depth, tree_top_k=shape.top_k, tree_nodes=shape.nodes)
        assert generate(target, head, prompt, settings).output_ids == wanted


@pytest.mark.parametrize("name", ["llama", "mistral, sliding", "qwen2, sliding"])
def test_up_to_the_end_of_the_context(name: str) -> None:
    target = tiny_target(name, seed=1)
    prompt = list(range(50))
    room = target.context_length - len(prompt)
    plain = generate(target, None, prompt, Settings(max_new_tokens=1000))
    run = generate(target, untrained_head(target), prompt, Settings(max_new_tokens=1000))
    assert len(plain.output_ids) == room and plain.finish_reason == "length"
    assert run.output_ids == plain.output_ids == reference(target, prompt, room)
    for step in run.steps:
        assert step.context_length + max(step.depths, default=0) < target.context_length


def test_a_draft_vocabulary_changes_no_token() -> None:
    target = tiny_target("llama")
    prompt = [5, 7, 11]
    head = untrained_head(target, draft_vocab=torch.arange(0, 61, 3))
    run = generate(target, head, prompt, Settings(max_new_tokens=40, tree_depth=3, tree_top_k=5, tree_nodes=20))
    assert run.output_ids == reference(target, prompt, 40)
    assert all(token % 3 == 0 for step in run.steps for token in step.node_ids)


@pytest.mark.parametrize("head", ["hass_tiny/head_mid", "hass_tiny/head_weak", "eagle2_tiny/head_bias", "medusa_tiny"])
def test_trained_heads_in_float32_and_bfloat16(head: str) -> None:
    target = load_target(str(GOLDEN / "tiny_base"), device="cpu", dtype="float32")
    prompt = [72, 101, 108, 108, 111]
    plain = generate(target, None, prompt, Settings(max_new_tokens=80))
    run = generate(target, load_head(str(GOLDEN / head), target), prompt, Settings(max_new_tokens=80))
    assert lossless(run, plain).equal
    half = load_target(str(GOLDEN / "tiny_base"), device="cpu", dtype="bfloat16")
    short = generate(half, load_head(str(GOLDEN / head), half), prompt, Settings(max_new_tokens=20))
    assert len(short.output_ids) == 20


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("name", ["hass_tiny/head_mid", "medusa_tiny"])
def test_a_half_precision_head_drafts_in_it_and_changes_no_token(name: str, native: bool, tiny_target, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(checkpoint, "native_bfloat16", lambda device: native)
    whole = load_head(str(GOLDEN / name), tiny_target)
    assert whole.info.dtype == "float32"  # what was trained in float32 and kept so, drafts in it
    folder = tmp_path / "half"
    shutil.copytree(GOLDEN / name, folder)
    tensors = {key: tensor.to(torch.bfloat16) for key, tensor in load_file(folder / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors")
    head = load_head(str(folder), tiny_target)
    assert head.info.dtype == ("bfloat16" if native else "float32")
    prompt, settings = [72, 101, 108, 108, 111], Settings(max_new_tokens=60, stop_token_ids=())
    run, plain = generate(tiny_target, head, prompt, settings), generate(tiny_target, None, prompt, settings)
    assert run.output_ids == plain.output_ids and run.head_info.dtype == head.info.dtype
    known = generate(tiny_target, whole, prompt, settings)
    assert len(run.steps) == pytest.approx(len(known.steps), abs=3)  # it drafts as well as before
    told = [step for step in Generation(tiny_target, head, prompt, settings, drift=True) if step.overlap]
    assert all(value is None or value > 0 for step in told for value in step.overlap) and bool(told) == name.startswith("hass")
    sampled = generate(tiny_target, head, prompt, Settings(max_new_tokens=20, temperature=1.0, seed=1, stop_token_ids=()))
    assert len(sampled.output_ids) == 20
    small = load_head(str(folder), tiny_target, draft_vocab=120) if name.startswith("hass") else head
    assert generate(tiny_target, small, prompt, settings).output_ids == plain.output_ids


def test_stop_token_at_every_place() -> None:
    target = tiny_target("llama")
    prompt = [3, 1, 4]
    full = reference(target, prompt, 30)
    head = untrained_head(target)
    for stop in set(full):
        cut = full[: full.index(stop) + 1]
        for used in (None, head):
            run = generate(target, used, prompt, Settings(max_new_tokens=30, stop_token_ids=(stop,)))
            assert run.output_ids == cut and run.finish_reason == "stop"
    for limit in range(1, 12):
        run = generate(target, head, prompt, Settings(max_new_tokens=limit))
        assert run.output_ids == full[:limit] and run.finish_reason == "length"
