"""KOALA's two ingredients taken apart: K layers with and without the adversary, every head trained on the same tokens."""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from decoding.errors import UsageError
from decoding.prompts import Prompt
from decoding.records import Settings
from decoding.reports import heading, where
from decoding.resampling import NOTE, interval, ratio
from decoding.target import Target
from decoding.written import save
from heads.evaluate import evaluate
from heads.loading import load_head
from heads.training.recipe import Recipe, recipe_for
from heads.training.train import train

METHODS = {"eagle": "koala-eagle", "medusa": "koala-medusa"}  # with one layer and no adversary these are EAGLE and Medusa
RESULT = "ablation.json"


def ablate(
    target: Target,
    sources: Sequence[Path],
    out: Path,
    prompts: list[Prompt],
    settings: Settings,
    *,
    families: Sequence[str],
    layers: Sequence[int],
    adversaries: Sequence[float],
    **changes: Any,
) -> dict[str, Any]:
    """Train every combination into its own folder in `out`, measure all of them on the prompts, write `out`/ablation.json.

    A run that was cut short goes on: trainings resume from their checkpoints, finished ones are not repeated.

    Args:
        adversaries: lambdas, 0 among them for the supervised heads.
        changes: recipe fields that hold for all of them, `tokens` above all.

    Returns:
        What was written.

    Raises:
        UsageError: an unknown family, or settings that make no sense.
    """
    unknown = [family for family in families if family not in METHODS]
    if unknown:
        raise UsageError(f"unknown family {unknown[0]!r}: possible are {' and '.join(METHODS)}")
    plan = {
        (family, k, weight): recipe_for(METHODS[family], layers=k, adversary=weight, **changes)
        for family, k, weight in product(families, layers, adversaries)
    }
    folders = {key: out / "{}-k{}-adversary{:g}".format(*key) for key in plan}
    for number, (key, recipe) in enumerate(plan.items(), 1):
        if not _finished(folders[key], recipe):
            print(f"{number} of {len(plan)}: {folders[key].name}", file=sys.stderr, flush=True)
            train(target, recipe, sources, folders[key], command="python -m heads " + " ".join(sys.argv[1:]))
    measured = evaluate(target, [load_head(str(folder), target) for folder in folders.values()], prompts, settings)
    rows = []
    for (family, k, weight), folder in folders.items():
        told, found = _section(folder), measured["heads"][folder.name]
        rows.append(
            {
                "family": family,
                "layers": k,
                "adversary": weight,
                "tokens_seen": told["tokens_seen"],
                "minutes": told["training"]["minutes"],
                "held_out": told["results"]["held_out"],
                "tree": found["tree"],
                "tau": found["mean_acceptance_length"],
                "tokens_and_steps": found["tokens_and_steps"],
                "tau_per_set": {name: own["mean_acceptance_length"] for name, own in found["per_set"].items()},
                "draft_ms_per_step": found["draft_ms_per_step"],
            }
        )
    _share_parts(rows)
    result = {
        **heading("ablation", "heads", target, settings),
        "prompts": len(prompts),
        "rows": rows,
    }
    save(result, out / RESULT)
    return result


def _section(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))["draftscope"]


def _finished(folder: Path, recipe: Recipe) -> bool:
    """Whether the folder holds a head that this very recipe trained to its end."""
    if not (folder / "config.json").exists():
        return False
    told = _section(folder)
    same = all(told["training"].get(name) == value for name, value in asdict(recipe).items())
    return same and (recipe.tokens is None or told["tokens_seen"] >= recipe.tokens)


def _share_parts(rows: Sequence[dict[str, Any]]) -> None:
    """Add to every row the ratio of its tau that is due to its layers (against one layer, same lambda) and to its adversary
    (against none, same layers); None where there is nothing to compare it with."""
    found = {(row["family"], row["layers"], row["adversary"]): row for row in rows}

    def over(row: dict[str, Any], base: dict[str, Any] | None) -> dict[str, Any] | None:
        return None if base is None or base is row else ratio(row["tokens_and_steps"], base["tokens_and_steps"])

    for (family, k, weight), row in found.items():
        row["due_to_layers"], row["due_to_adversary"] = over(row, found.get((family, 1, weight))), over(row, found.get((family, k, 0.0)))


def table(result: dict[str, Any]) -> str:
    """The result as text: every row, and beside its tau what the layers and what the adversary changed."""
    lines = [
        where(result),
        f"{'family':<8} {'K':>2} {'lambda':>6} {'tokens':>10} {'top-1 by step':<32} {'tau':>5}  {'layers [95 %]':<20} adversary [95 %]",
    ]
    for row in result["rows"]:
        told = [interval(part) if part else "" for part in (row["due_to_layers"], row["due_to_adversary"])]
        top1 = " ".join(f"{value:.3f}" for value in row["held_out"]["top1"])
        start = "{family:<8} {layers:>2} {adversary:>6g} {tokens_seen:>10,}".format(**row)
        lines.append(f"{start} {top1:<32} {row['tau']:>5.2f}  {told[0]:<20} {told[1]}".rstrip())
    lines.append(f"Times tau without that part. {NOTE}.")
    return "\n".join(lines)
