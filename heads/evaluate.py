"""What heads are worth on prompts, side by side: acceptance, agreement and overlap by depth, and what drafting costs."""

import sys
from itertools import islice
from typing import Any

from tqdm import tqdm

from decoding.engine import Generation
from decoding.head import DraftHead
from decoding.metrics import measure
from decoding.prompts import Prompt
from decoding.records import Run, Settings, Step
from decoding.reports import heading, where
from decoding.resampling import interval, ratio
from decoding.target import Target

WARM_UP = 3  # steps that are not counted: the first ones of a process are slow


def evaluate(target: Target, heads: list[DraftHead], prompts: list[Prompt], settings: Settings) -> dict[str, Any]:
    """Run every head on every prompt.

    Returns:
        JSON-ready figures per head, in all and per prompt file; `tau_over` is tau's ratio to that of every head before it.
    """
    runs: dict[str, list[Run]] = {}
    with tqdm(total=len(heads) * len(prompts), unit="run", desc="evaluate", file=sys.stderr) as bar:
        for head in heads:
            for _ in islice(Generation(target, head, prompts[0].text, settings, drift=True), WARM_UP):
                pass
            runs[head.name] = []
            for prompt in prompts:
                generation = Generation(target, head, prompt.text, settings, drift=True)
                for _ in generation:
                    pass
                runs[head.name].append(generation.run)
                bar.update()
    sources = list(dict.fromkeys(prompt.source for prompt in prompts))
    parts = {
        source: {name: [run for run, prompt in zip(own, prompts, strict=True) if prompt.source == source] for name, own in runs.items()}
        for source in sources
    }
    return {
        **heading("evaluation", "heads", target, settings),
        "prompts": len(prompts),
        "heads": {
            head.name: {
                "head": head.info.model_dump(),
                "tree": runs[head.name][0].settings.tree._asdict(),
                **_beside(runs, head.name),
                "per_set": {source: _beside(part, head.name) for source, part in parts.items()},
            }
            for head in heads
        },
    }


def _beside(runs: dict[str, list[Run]], name: str) -> dict[str, Any]:
    """A head's figures, and its tau over that of every head before it."""
    before = list(runs)[: list(runs).index(name)]
    counted = {one: tokens_and_steps(runs[one]) for one in (*before, name)}
    return {
        **figures(runs[name]),
        "tokens_and_steps": counted[name],
        "tau_over": {one: ratio(counted[name], counted[one]) for one in before},
    }


def tokens_and_steps(runs: list[Run]) -> list[tuple[int, int]]:
    """What tau is made of, run by run (see `Metrics.mean_acceptance_length`)."""
    return [(total.steps + total.accepted, total.steps) for total in map(measure, runs)]


def figures(runs: list[Run]) -> dict[str, Any]:
    """tau, both kinds of acceptance, and what the head got right at each place where it drafted."""
    total = measure(runs)
    steps = [step for run in runs for step in run.steps if step.node_ids]
    ranks = [rank for step in steps for rank in _ranks(step)]
    by_depth = [[step.overlap[d] for step in steps if len(step.overlap) > d and step.overlap[d] is not None] for d in range(16)]
    cosines = [
        [step.drift_cosine[d] for step in steps if len(step.drift_cosine) > d and step.drift_cosine[d] is not None] for d in range(16)
    ]
    return {
        "mean_acceptance_length": total.mean_acceptance_length,
        "acceptance_by_depth": total.acceptance_by_depth,
        "conditional_acceptance": total.conditional_acceptance,
        "top1_agreement": _share(ranks, 1),
        "top4_agreement": _share(ranks, 4),
        "overlap_by_depth": [sum(values) / len(values) for values in by_depth if values],
        "feature_cosine_by_depth": [sum(values) / len(values) for values in cosines if values],
        "draft_ms_per_step": total.phase_ms["draft"] / max(total.steps, 1),
        "steps": total.steps,
    }


def _ranks(step: Step) -> list[int]:
    """At the root and each accepted node with children: the rank of the token that the target chose (large = not drafted)."""
    children: dict[int, list[int]] = {}
    for token_id, parent in zip(step.node_ids, step.parents, strict=True):
        children.setdefault(parent, []).append(token_id)
    chosen = [*(step.node_ids[node] for node in step.accepted), step.bonus_id]
    out = []
    for node, token_id in zip([-1, *step.accepted], chosen, strict=True):
        if node in children:
            out.append(children[node].index(token_id) if token_id in children[node] else 1 << 30)
    return out


def _share(ranks: list[int], best: int) -> float | None:
    return sum(rank < best for rank in ranks) / len(ranks) if ranks else None


def table(results: dict[str, Any]) -> str:
    """The result as text."""
    lines = [
        where(results),
        f"{'head':<16} {'tree':<9} {'tau':>5}  {'top-1':>5}  {'top-4':>5}  {'draft ms':>8}  given the depth before: 1, 2, ...",
    ]
    for name, entry in results["heads"].items():
        tree = "{depth}/{top_k}/{nodes}".format(**entry["tree"])
        given = " ".join("-" if value is None else f"{value:.2f}" for value in entry["conditional_acceptance"])
        cells = [entry["mean_acceptance_length"], entry["top1_agreement"], entry["top4_agreement"]]
        told = "  ".join(f"{'-':>5}" if value is None else f"{value:>5.2f}" for value in cells)
        lines.append(f"{name:<16} {tree:<9} {told}  {entry['draft_ms_per_step']:>8.1f}  {given}")
        sets = "; ".join(f"{source} {own['mean_acceptance_length']:.2f}" for source, own in entry["per_set"].items() if own["steps"])
        if over := entry["tau_over"]:
            told = ", ".join(f"{interval(found)} of {base}'s" for base, found in over.items())
            lines.append(f"{'':<16} tau is {told} [95 %; ~ = no difference was measured]")
        lines.append(f"{'':<16} tau by set: {sets}; overlap by depth: {' '.join(f'{v:.2f}' for v in entry['overlap_by_depth'])}")
    return "\n".join(lines)
