"""Tree settings that fit the machine: what a step costs here, and what each tree would have been worth, decide.

Every candidate of a wide and deep tree is verified once on some prompts. As EAGLE-2 keeps the best candidates by score,
that one record tells for every smaller tree which of its nodes would have been accepted: no tree has to be run by itself.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tqdm import tqdm

from decoding.embedded import cache_dir
from decoding.engine import Generation, environment
from decoding.head import DraftHead
from decoding.prompts import Prompt
from decoding.records import Settings, Step, TreeShape
from decoding.reports import save
from decoding.target import Target

DEEPEST, WIDEST = 7, 8  # of the trees that are compared; all their candidates are verified once
WIDTHS = (1, 2, 3, 4, 5, 6, 8)
ROWS = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32, 36, 40, 48, 56, 64)


@dataclass
class Tuned:
    """The choice for one head on one machine, and the figures behind it."""

    depth: int
    top_k: int
    nodes: int
    ms_per_token: float  # as expected for this tree
    plain_ms: float  # one plain token, measured beside it
    tau: float
    verify_ms: dict[int, float]  # by rows
    draft_ms: dict[str, float]  # by "depth/top_k"
    curve: list[dict[str, float]] = field(default_factory=list)  # the best tree of each number of nodes
    measured: str = ""

    @property
    def tree(self) -> TreeShape:
        return TreeShape(self.depth, self.top_k, self.nodes)


def reaches(step: Step, width: int, depth: int, order: Sequence[Sequence[int]] | None) -> list[int]:
    """For each accepted node of a step in turn: how many nodes a tree of this width and depth must keep to have it.

    The list ends where such a tree, whatever it keeps, would not have drafted the node.

    Args:
        order: a static tree's paths, most useful first; None = EAGLE-2's choice by score.
    """
    ranks, seen = [], {}
    for parent in step.parents:
        ranks.append(seen.get(parent, 0))
        seen[parent] = ranks[-1] + 1
    if order is not None:
        paths: list[tuple[int, ...]] = []
        for node, parent in enumerate(step.parents):
            paths.append((*(paths[parent] if parent >= 0 else ()), ranks[node]))
        fitting = [tuple(path) for path in order if len(path) <= depth and max(path) < width]
        place = {path: index for index, path in enumerate(fitting)}
        found = [place.get(paths[node]) for node in step.accepted]
    else:
        pool, beam = [], {-1}
        for level in range(1, depth + 1):
            own = [n for n, d in enumerate(step.depths) if d == level and ranks[n] < width and step.parents[n] in beam]
            pool += own
            beam = set(sorted(own, key=lambda n: (-step.scores[n], n))[:width])
        place = {node: index for index, node in enumerate(sorted(pool, key=lambda n: (-step.scores[n], n)))}
        found = [place.get(node) for node in step.accepted]
    return [rank + 1 for rank in found[: found.index(None) if None in found else len(found)]]


def line(known: dict[int, float], at: int) -> float:
    """A cost between two measured ones."""
    if at in known:
        return known[at]
    below, above = max(x for x in known if x < at), min(x for x in known if x > at)
    return known[below] + (known[above] - known[below]) * (at - below) / (above - below)


def choose(
    steps: Sequence[Step],
    verify_ms: dict[int, float],
    draft_ms: dict[tuple[int, int], float],
    order: Sequence[Sequence[int]] | None = None,
) -> tuple[dict[str, float], list[dict[str, float]]]:
    """The tree with the least time per token, and the best one of each number of nodes.

    Args:
        steps: of runs whose trees hold every candidate of the widest and deepest tree.
        verify_ms: by rows, root included.
        draft_ms: by (depth, top_k).
    """
    most = max(verify_ms) - 1
    best: dict[int, dict[str, float]] = {}
    for (depth, width), drafted in draft_ms.items():
        needed = sorted(rank for step in steps for rank in reaches(step, width, depth, order))
        accepted = 0
        for nodes in range(1, min(most, TreeShape(depth, width).pool) + 1):
            while accepted < len(needed) and needed[accepted] <= nodes:
                accepted += 1
            tau = 1 + accepted / len(steps)
            cost = (drafted + line(verify_ms, nodes + 1)) / tau
            if nodes not in best or cost < best[nodes]["ms_per_token"]:
                best[nodes] = {"depth": depth, "top_k": width, "nodes": nodes, "tau": tau, "ms_per_token": cost}
    curve = [best[nodes] for nodes in sorted(best)]
    return min(curve, key=lambda point: point["ms_per_token"]), curve


def tune(target: Target, head: DraftHead, prompts: Sequence[Prompt], max_new_tokens: int = 48) -> Tuned:
    """Measure costs and acceptance, choose, and remember the choice for this machine."""
    from decoding.costs import drafting, verification

    order = getattr(head, "choices", None)
    deepest = max(map(len, order)) if order else DEEPEST
    widest = max(max(path) for path in order) + 1 if order else WIDEST
    pool = len(order) if order else TreeShape(deepest, widest).pool
    wide = Settings(max_new_tokens=max_new_tokens, tree_depth=deepest, tree_top_k=widest, tree_nodes=pool)
    steps: list[Step] = []
    for prompt in tqdm(prompts, unit="prompt", desc=f"tune {head.name}", file=sys.stderr):
        steps += [step for step in Generation(target, head, prompt.text, wide) if step.node_ids]
    verified = {rows: ms for (_, rows), ms in verification(target, ROWS, [200]).items()}
    shapes = {}
    for depth in range(1, deepest + 1):
        for width in (widest,) if order else WIDTHS:
            if depth in (1, 2, deepest):  # a level costs what the level before it cost: the others lie between
                shape = TreeShape(depth, width)
                shapes[depth, width] = shape._replace(nodes=min(shape.pool, len(order) if order else 16))
    measured = drafting(target, head, list(shapes.values()))
    drafted = {}
    for width in {width for _, width in shapes}:
        known = {depth: measured[shape] for (depth, own), shape in shapes.items() if own == width}
        drafted |= {(depth, width): line(known, depth) for depth in range(1, deepest + 1)}
    point, curve = choose(steps, verified, drafted, order)
    tuned = Tuned(
        **point,
        plain_ms=verified[1],
        verify_ms=verified,
        draft_ms={f"{depth}/{width}": ms for (depth, width), ms in drafted.items()},
        curve=curve,
        measured=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
    remember(target, head, tuned)
    return tuned


def _file() -> Path:
    return cache_dir() / "tuned.json"


def _key(target: Target, head: DraftHead) -> str:
    """The machine, and everything about target and head that changes cost or acceptance."""
    where = environment(target)
    told = (where.machine, where.device, where.dtype, where.threads, target.name, *target.notes, head.name)
    return " | ".join(map(str, (*told, *head.info.model_dump().values())))


def remember(target: Target, head: DraftHead, tuned: Tuned) -> None:
    """Keep a choice in the user's cache folder."""
    known = _known()
    known[_key(target, head)] = asdict(tuned)
    save(known, _file())


def recall(target: Target, head: DraftHead) -> Tuned | None:
    """What was chosen for this head on this machine; None where it was never tuned."""
    try:
        return Tuned(**{**(found := _known()[_key(target, head)]), "verify_ms": {int(n): ms for n, ms in found["verify_ms"].items()}})
    except (KeyError, TypeError, ValueError, AttributeError):
        return None  # never tuned, or by another version


def _known() -> dict[str, Any]:
    try:
        known = json.loads(_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def told(head: DraftHead, tuned: Tuned) -> str:
    """The choice and its curve as text."""
    lines = [
        f"{head.name}: tree_depth {tuned.depth}, tree_top_k {tuned.top_k}, tree_nodes {tuned.nodes}: {tuned.ms_per_token:.1f} ms a token, "
        f"tau {tuned.tau:.2f}; a plain token {tuned.plain_ms:.1f} ms, so {tuned.plain_ms / tuned.ms_per_token:.2f}x is expected",
        "verification, ms by rows: " + ", ".join(f"{rows}: {ms:.1f}" for rows, ms in tuned.verify_ms.items()),
        "nodes  depth  top_k   tau  ms a token",
    ]
    shown = [point for point in tuned.curve if point["nodes"] + 1 in tuned.verify_ms or point["nodes"] == tuned.nodes]
    for point in shown:
        mark = "  <- chosen" if point["nodes"] == tuned.nodes else ""
        lines.append("{nodes:>5}  {depth:>5}  {top_k:>5}  {tau:>4.2f}  {ms_per_token:>6.1f}".format(**point) + mark)
    return "\n".join(lines)
