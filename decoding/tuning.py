"""Tree settings that fit the machine: what a step costs here, and what each tree would have been worth, decide.

Every candidate of a wide and deep tree is verified once on some prompts. As EAGLE-2 keeps the best candidates by score,
that one record tells for every smaller tree which of its nodes would have been accepted: no tree has to be run by itself.
"""

import sys
from collections.abc import Sequence
from datetime import datetime, timezone

from tqdm import tqdm

from decoding.engine import Generation, environment
from decoding.head import DraftHead
from decoding.prompts import Prompt
from decoding.records import Settings, Step, TreeShape
from decoding.target import Target
from decoding.tuned import Tuned, recall, remember

DEEPEST, WIDEST = 7, 8  # of the trees that are compared; all their candidates are verified once
WIDTHS = (1, 2, 3, 4, 5, 6, 8)
ROWS = (1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32, 36, 40, 48, 56, 64)


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


def verify_costs(target: Target) -> dict[int, float]:
    """Milliseconds of a verification by rows (1 = a plain step), the same for every head.

    More rows never cost less, and what disturbs a measurement only makes it longer: a figure above that of more rows is
    replaced by it.
    """
    from decoding.costs import verification

    measured = {rows: ms for (_, rows), ms in verification(target, ROWS, [200]).items()}
    return {rows: min(ms for more, ms in measured.items() if more >= rows) for rows in measured}


def tune(target: Target, head: DraftHead, prompts: Sequence[Prompt], verified: dict[int, float], max_new_tokens: int = 48) -> Tuned:
    """Measure what drafting costs and what is accepted, choose, and remember the choice for this machine.

    Args:
        verified: from `verify_costs`.
    """
    from decoding.costs import drafting

    order = getattr(head, "choices", None)
    deepest = max(map(len, order)) if order else DEEPEST
    widest = max(max(path) for path in order) + 1 if order else WIDEST
    pool = len(order) if order else TreeShape(deepest, widest).pool
    wide = Settings(max_new_tokens=max_new_tokens, tree_depth=deepest, tree_top_k=widest, tree_nodes=pool)
    steps: list[Step] = []
    for prompt in tqdm(prompts, unit="prompt", desc=f"tune {head.name}", file=sys.stderr):
        steps += [step for step in Generation(target, head, prompt.text, wide) if step.node_ids]
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
    where = environment(target)
    tuned = Tuned(
        head=head.name,
        target=target.name,
        machine=where.machine,
        dtype=where.dtype,
        threads=where.threads,
        **point,
        plain_ms=verified[1],
        verify_ms=verified,
        draft_ms={f"{depth}/{width}": ms for (depth, width), ms in drafted.items()},
        curve=curve,
        measured=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
    remember(_key(target, head), tuned)
    return tuned


def tuned_for(target: Target, head: DraftHead) -> Tuned | None:
    """What was chosen for this head on this machine; None where it was never tuned."""
    return recall(_key(target, head))


def _key(target: Target, head: DraftHead) -> str:
    """The machine, and everything about target and head that changes cost or acceptance."""
    where = environment(target)
    told = (where.machine, where.device, where.dtype, where.threads, target.name, *target.notes, head.name)
    return " | ".join(map(str, (*told, *head.info.model_dump().values())))
