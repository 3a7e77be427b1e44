"""python -m tests.measure_gpu: one step's parts on a GPU against that card's memory floor, with CUDA graphs and without.

A target in the shape of LLaMA-2-7B (or --layers of it) with random weights in bfloat16, and a HASS head of its size. What is
printed: reading all weights once at the bandwidth measured here (the floor), a plain step, a verification of 60 rows, a
whole draft (59 nodes, depth 6, top-k 10), and the step that they make. It has not run on a GPU yet: none was to be had.
"""

import argparse
import json
from itertools import product

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from decoding.costs import drafting, fill, interleaved
from decoding.records import TreeShape
from decoding.target import Target
from tests.stubs import untrained_head

ROWS = (1, 60)  # a step of plain decoding, a verification
SHAPE = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 32,
    "max_position_embeddings": 4096,
}  # fmt: skip


def random_target(device: str, layers: int, shape: dict) -> Target:
    """Weights are random: only their shape costs time."""
    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(LlamaConfig(**shape, num_hidden_layers=layers, attn_implementation="sdpa"))
    finally:
        torch.set_default_dtype(kept)
    return Target("random", model.eval().requires_grad_(False), None, frozenset())


def bandwidth(device: torch.device, repeats: int) -> float:
    """Bytes per second that a copy reads and writes."""
    big = torch.empty(1 << (30 if device.type == "cuda" else 24), dtype=torch.uint8, device=device)
    other = torch.empty_like(big)
    return 2000 * big.numel() / interleaved({0: lambda: other.copy_(big)}, repeats, device)[0]


@torch.inference_mode()
def measure(target: Target, context: int, repeats: int) -> dict:
    """All figures in ms."""
    device = target.device
    weights = sum(p.nbytes for p in target.model.parameters()) - target.embedding.weight.nbytes
    lean = target.lean
    assert lean is not None
    read = bandwidth(device, repeats)
    works, plain_head, head = {}, untrained_head(target), untrained_head(target)
    plain_head.shelf = None
    largest = context + max(ROWS)
    caches = {"": lean.new_cache(largest), ", graph": target.new_cache(largest, ROWS)}
    for (name, cache), rows in product(caches.items(), ROWS):
        fill(target, cache, context)
        cache.length = context
        ids = torch.arange(rows, device=device)
        tail = torch.ones(rows, rows, dtype=torch.bool, device=device).tril() if rows > 1 else None

        def work(ids=ids, tail=tail, cache=cache) -> None:
            target.logits(target.forward(ids, ids + context, tail, cache))
            cache.commit(context, None, 0)

        works[f"{rows} rows{name}"] = work
    found = interleaved(works, repeats, device)
    tree = TreeShape(6, 10, 59)
    for name, used in (("", plain_head), (", graph", head)):
        found[f"draft{name}"] = drafting(target, used, [tree], context, repeats)[tree]
    floor = 1000 * weights / read
    best = {name: min(found[name], found[f"{name}, graph"]) for name in ("1 rows", "60 rows", "draft")}
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "graphs": bool(caches[", graph"].fixed),
        "bandwidth_gb_s": read / 1e9,
        "floor_ms": floor,
        **{f"{name}, ms": value for name, value in found.items()},
        "plain step / floor (aim 1.3)": best["1 rows"] / floor,
        "60 rows / plain step (aim 1.15)": best["60 rows"] / best["1 rows"],
        "whole step / plain step (aim 1.6)": (best["60 rows"] + best["draft"]) / best["1 rows"],
    }


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--context", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=30)
    arguments = parser.parse_args()
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("torch sees no GPU here")
    target = random_target(arguments.device, arguments.layers, SHAPE)
    print(json.dumps(measure(target, arguments.context, arguments.repeats), indent=1))


if __name__ == "__main__":
    main()
