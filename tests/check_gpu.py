"""What needs a GPU, in one run of a few minutes: `python -m tests.check_gpu [--size 7b|tiny] [--device cuda|cpu]`.

The embedded target with a shipped head; a random-weight target (7B: LLaMA-2 7B's shape) with a random head in the HASS
layout; float32, greedy, equal to plain decoding; changed and freed without growth of device memory. `--size tiny --device cpu`
runs the same steps on a machine without one.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import psutil
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from app.models import Models
from decoding import Settings, generate
from decoding.memory import gigabytes

SHAPES = {
    "7b": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000},
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 500},
}


def write_target(folder: Path, shape: dict[str, int]) -> Path:
    """A Llama of random weights, in half precision on the disk."""
    torch.manual_seed(0)
    config = LlamaConfig(**shape, max_position_embeddings=4096, eos_token_id=None, bos_token_id=None, dtype=torch.float16)
    LlamaForCausalLM(config).half().save_pretrained(folder)
    return folder


def write_hass_head(folder: Path, shape: dict[str, int]) -> Path:
    """Random weights in the layout of the released HASS heads for LLaMA-2."""
    hidden, inner, vocab = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
    sizes = {"embed_tokens.weight": (vocab, hidden), "fc.weight": (hidden, 2 * hidden), "fc.bias": (hidden,)}
    sizes |= {f"layers.0.self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"}
    sizes |= {f"layers.0.mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
    sizes |= {"layers.0.mlp.down_proj.weight": (hidden, inner), "layers.0.post_attention_layernorm.weight": (hidden,)}
    folder.mkdir()
    save_file({name: torch.randn(size).mul_(0.02).half() for name, size in sizes.items()}, folder / "model.safetensors")
    config = {
        **shape,
        "num_hidden_layers": 1,
        "num_key_value_heads": shape["num_attention_heads"],
        "model_type": "llama",
        "rms_norm_eps": 1e-6,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def held(device: str) -> int:
    """Bytes held on the device (of a CPU: by this process)."""
    return torch.cuda.memory_allocated() if device.startswith("cuda") else psutil.Process().memory_info().rss


def decode(models: Models, source: str, head_source: str, tokens: int) -> str:
    """Load, decode with and without the head, compare; what was measured."""
    begun = time.perf_counter()
    target = models.target(source)
    head = models.head(head_source, target)
    loaded = time.perf_counter() - begun
    prompt = [token % target.vocab_size for token in range(5, 37)]
    settings = Settings(max_new_tokens=tokens, stop_token_ids=())
    runs = [generate(target, one, prompt, settings) for one in (None, head)]
    assert runs[0].output_ids == runs[1].output_ids, f"{source}: the head's output is not plain decoding's"
    assert head is not None and head.tree.nodes > 0
    peak = f", at most {gigabytes(torch.cuda.max_memory_allocated())} on the device" if target.device.type == "cuda" else ""
    told = f"loaded in {loaded:.1f} s, {tokens} tokens equal, {len(runs[1].steps)} steps{peak}"
    return f"{target.name} on {target.device}, {target.dtype}: {told}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.check_gpu", description="Load, decode, compare, change and free targets.")
    parser.add_argument("--size", choices=SHAPES, default="7b", help="of the random target (default: 7b; 27 GB in float32)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--changes", type=int, default=3, help="times the target is changed (default: %(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        random = str(write_target(Path(folder) / "random", SHAPES[options.size]))
        hass = str(write_hass_head(Path(folder) / "random-hass", SHAPES[options.size]))
        models = Models("embedded", options.device, "float32")
        after: list[int] = []
        for _ in range(options.changes):
            print(decode(models, "embedded", "hass", 64), flush=True)
            after.append(held(options.device))
            print(decode(models, random, hass, 64), flush=True)
        models.target("embedded")
        grown = held(options.device) - after[0]
        print(f"after {2 * options.changes} changes: {gigabytes(max(0, grown))} more than after the first load", flush=True)
        # on a CPU the allocator keeps what was freed: only a GPU's count is exact
        assert not options.device.startswith("cuda") or grown < 50_000_000, "device memory grew"
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
