"""The long losslessness check: greedy float32 output of every head against transformers' own generate.

python -m tests.check_lossless --prompts a.jsonl b.jsonl --limit 8 --head eagle --head hass --untrained
"""

import argparse
import json
import sys
from pathlib import Path

import torch
from tqdm import tqdm

from decoding.chat import encode_prompt
from decoding.cli import prepare, run_command
from decoding.engine import generate
from decoding.prompts import read_prompts
from decoding.records import Settings
from heads import load_head
from tests.stubs import untrained_head

NEAR_TIE = 1e-4  # a difference counts as rounding only where transformers' two best logits are this close


def check(arguments: argparse.Namespace) -> None:
    prompts = read_prompts(arguments.prompts, arguments.limit)
    target = prepare(arguments)
    heads = {"plain decoding": None, **{name: load_head(name, target) for name in arguments.head}}
    if arguments.untrained:
        heads["untrained"] = untrained_head(target)
    wanted: dict[str, list[int]] = {}
    failures = []
    counts = {name: {"equal": 0, "near_tie": 0, "different": 0} for name in heads}
    with tqdm(total=len(prompts) * (1 + len(heads)), unit="run", file=sys.stderr) as bar:
        for prompt in prompts:
            ids = encode_prompt(target.tokenizer, prompt.text)
            given = torch.tensor([ids])
            with torch.inference_mode():
                out = target.model.generate(
                    given, attention_mask=torch.ones_like(given), max_new_tokens=arguments.tokens, do_sample=False, pad_token_id=0
                )
            wanted[prompt.id] = out[0, len(ids) :].tolist()
            bar.update()
            for name, head in heads.items():
                mine = generate(target, head, ids, Settings(max_new_tokens=arguments.tokens)).output_ids
                bar.update()
                if mine == wanted[prompt.id]:
                    counts[name]["equal"] += 1
                    continue
                place = next((i for i, (a, b) in enumerate(zip(mine, wanted[prompt.id], strict=False)) if a != b), None)
                gap = None
                if place is not None:
                    with torch.inference_mode():
                        logits = target.model(torch.tensor([ids + mine[:place]])).logits[0, -1]
                    gap = abs(float(logits[mine[place]] - logits[wanted[prompt.id][place]]))
                kind = "near_tie" if gap is not None and gap < NEAR_TIE else "different"
                counts[name][kind] += 1
                failures.append({"head": name, "prompt": prompt.id, "index": place, "gap": gap, "kind": kind})
    print(json.dumps({"prompts": len(prompts), "tokens": arguments.tokens, "counts": counts, "differences": failures}, indent=1))
    sys.exit(1 if any(entry["different"] for entry in counts.values()) else 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--prompts", type=Path, nargs="+", required=True)
    parser.add_argument("--limit", type=int)
    parser.add_argument("--head", action="append", default=[])
    parser.add_argument("--untrained", action="store_true")
    parser.add_argument("--tokens", type=int, default=128)
    arguments = parser.parse_args()
    return run_command(lambda: check(arguments))


if __name__ == "__main__":
    sys.exit(main())
