"""Loading: precision, memory, several devices, progress. What needs a GPU is refused here in words (tests/check_gpu.py runs it)."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from decoding import DraftscopeError, Settings, Target, UsageError, generate, load_target, loading, memory
from decoding.loading import spread_map, spread_notes
from decoding.memory import weights_bytes
from heads import load_head

GOLDEN = Path(__file__).parent.parent / "golden"
BASE = GOLDEN / "tiny_base"
PROMPT = [72, 101, 108, 108, 111]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "4bit"}, "4bit weights .* need an NVIDIA GPU: on a CPU use float32 or bfloat16"),
        ({"dtype": "8bit"}, "8bit weights .* need an NVIDIA GPU"),
        ({"dtype": "int3"}, "unknown dtype 'int3': possible are auto, float32, bfloat16, float16, and on a GPU 8bit and 4bit"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
    ],
)
def test_what_this_machine_can_not_do_is_refused(options: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_target(str(BASE), **{"device": "cpu", **options})


def test_quantisation_without_its_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "is_bitsandbytes_available", lambda: False)
    with pytest.raises(UsageError, match="need the package bitsandbytes: pip install bitsandbytes"):
        loading.pick_precision("4bit", "cuda:0")
    monkeypatch.setattr(loading, "is_bitsandbytes_available", lambda: True)
    assert loading.pick_precision("4bit", "cuda:0") == "4bit"
    told = loading._quantization("4bit", torch.bfloat16)
    assert told.load_in_4bit and told.bnb_4bit_compute_dtype == torch.bfloat16
    assert loading._quantization("8bit", torch.bfloat16).load_in_8bit


def test_the_size_of_the_weights_is_known_before_they_are_read() -> None:
    target = load_target(str(BASE), device="cpu", dtype="float32")
    real = sum(parameter.nbytes for parameter in target.model.parameters())
    assert weights_bytes(BASE, "float32") == pytest.approx(real, rel=0.05)
    assert weights_bytes(BASE, "bfloat16") == pytest.approx(real / 2, rel=0.05)
    assert weights_bytes(BASE, "4bit") < weights_bytes(BASE, "8bit") < weights_bytes(BASE, "bfloat16")


def test_a_target_that_memory_can_not_hold_is_refused_with_both_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "free_bytes", lambda device: 100_000)
    with pytest.raises(DraftscopeError, match=r"tiny_base needs about 1 MB for its weights, cpu has 0 MB free"):
        load_target(str(BASE), device="cpu", dtype="float32")


def test_a_container_s_limit_is_the_memory_there_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("3000000000\n")
    (tmp_path / "memory.current").write_text("1000000000\n")
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert memory.free_bytes("cpu") <= 2_000_000_000 and memory.cpu_bytes() <= 3_000_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.cpu_bytes() > 3_000_000_000
    monkeypatch.setenv("SPACE_ID", "someone/space")
    monkeypatch.setenv("MEMORY", "2Gi")
    assert memory.cpu_bytes() == 2 << 30


def test_progress_of_reading_is_told() -> None:
    told: list[tuple[str, float | None]] = []
    load_target(str(BASE), device="cpu", dtype="float32", progress=lambda text, share: told.append((text, share)))
    assert told[0] == ("Reading tiny_base", 0.0) and told[-1] == ("Reading tiny_base: 100%", 1.0)
    shares = [share for _, share in told]
    assert shares == sorted(shares) and len(shares) > 5


def test_devices_are_filled_in_order_and_the_ends_stay_on_the_first() -> None:
    config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4, vocab_size=100)
    size = 4 * sum(parameter.numel() for parameter in LlamaForCausalLM(config).parameters())
    ends = size - 6 * (layer := 4 * sum(p.numel() for p in LlamaForCausalLM(config).model.layers[0].parameters()))
    room = {0: int((ends + 3.5 * layer) / 0.9), 1: int(2.5 * layer / 0.9), "cpu": 100 * layer}
    found = spread_map(config, size, room, "six")
    assert [found[f"model.layers.{index}"] for index in range(6)] == [0, 0, 1, 1, "cpu", "cpu"], "one layer's room is kept on 0"
    assert {found[name] for name in ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")} == {0}
    with pytest.raises(DraftscopeError, match=r"six needs about .* free are .* on cuda:0 .* on cuda:1"):
        spread_map(config, size, {0: room[0], 1: room[1]}, "six")


def test_a_target_spread_over_devices_decodes_the_same(tmp_path: Path) -> None:
    """Layers kept elsewhere and copied in for each forward: "disk" is the one other place that a machine without a GPU has."""
    whole = load_target(str(BASE), device="cpu", dtype="float32")
    size = weights_bytes(BASE, "float32")
    where = spread_map(AutoConfig.from_pretrained(BASE), size, {"cpu": int(0.75 * size / 0.9), "disk": 10 * size}, "tiny")
    assert set(where.values()) == {"cpu", "disk"}
    model = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32, device_map=where, offload_folder=tmp_path)
    assert any(parameter.is_meta for parameter in model.parameters())
    spread = Target("spread", model.eval().requires_grad_(False), None, frozenset(), spread_notes(model))
    wanted = generate(whole, None, PROMPT, Settings(max_new_tokens=24, stop_token_ids=()))
    for head in (None, load_head(str(GOLDEN / "hass_tiny" / "head_mid"), spread)):
        run = generate(spread, head, PROMPT, Settings(max_new_tokens=24, stop_token_ids=()))
        assert run.output_ids == wanted.output_ids
        assert "on disk" in run.environment.notes[0]
