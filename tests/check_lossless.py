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
from decoding.head import DraftHead
from decoding.prompts import read_prompts
from decoding.records import Settings
from decoding.target import Target
from heads import load_head
from tests.stubs import untrained_head

NEAR_TIE = 1e-4  # a difference counts as rounding only where transformers' two best logits are this close


def check(arguments: argparse.Namespace) -> None:
    prompts = read_prompts(arguments.prompts, arguments.limit)
    target = prepare(arguments)
    heads = {"plain decoding": None, **{name: load_head(name, target) for name in arguments.head}}
    if arguments.untrained:
        heads["untrained"] = untrained_head(target)
    done: dict[str, dict] = {}
    if arguments.log and arguments.log.exists():
        done = {entry["prompt"]: entry for entry in map(json.loads, arguments.log.read_text().splitlines())}
    with tqdm(total=len(prompts) * len(heads), unit="run", file=sys.stderr) as bar:
        for prompt in prompts:
            if set(done.get(prompt.id, {}).get("heads", ())) != set(heads):
                done[prompt.id] = {"prompt": prompt.id, "heads": _compare(target, heads, prompt.text, arguments.tokens, bar)}
                if arguments.log:
                    with arguments.log.open("a") as file:
                        file.write(json.dumps(done[prompt.id]) + "\n")
            else:
                bar.update(len(heads))
    counts = {name: {"equal": 0, "near_tie": 0, "different": 0} for name in heads}
    differences = []
    for prompt in prompts:
        for name, found in done[prompt.id]["heads"].items():
            counts[name][found["kind"]] += 1
            if found["kind"] != "equal":
                differences.append({"head": name, "prompt": prompt.id, **found})
    print(json.dumps({"prompts": len(prompts), "tokens": arguments.tokens, "counts": counts, "differences": differences}, indent=1))
    sys.exit(1 if any(entry["different"] for entry in counts.values()) else 0)


def _compare(target: Target, heads: dict[str, DraftHead | None], text: str, tokens: int, bar: tqdm) -> dict[str, dict]:
    """Each head's output against transformers' own: equal, or where they part and how far apart the two logits are there."""
    ids = encode_prompt(target.tokenizer, text)
    given = torch.tensor([ids])
    with torch.inference_mode():
        out = target.model.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    wanted, found = out[0, len(ids) :].tolist(), {}
    for name, head in heads.items():
        mine = generate(target, head, ids, Settings(max_new_tokens=tokens)).output_ids
        bar.update()
        if mine == wanted:
            found[name] = {"kind": "equal"}
            continue
        place = next((i for i, (a, b) in enumerate(zip(mine, wanted, strict=False)) if a != b), None)
        gap = None
        if place is not None:
            with torch.inference_mode():
                logits = target.model(torch.tensor([ids + mine[:place]])).logits[0, -1]
            gap = abs(float(logits[mine[place]] - logits[wanted[place]]))
        found[name] = {"kind": "near_tie" if gap is not None and gap < NEAR_TIE else "different", "index": place, "gap": gap}
    return found


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
    parser.add_argument("--log", type=Path, help="what is found, a line a prompt; a check that was cut short goes on from it")
    arguments = parser.parse_args()
    return run_command(lambda: check(arguments))


if __name__ == "__main__":
    sys.exit(main())
