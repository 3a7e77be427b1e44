"""Tree settings that fit the machine: what a step costs here, and what each tree would have been worth, decide.

Every candidate of a wide and deep tree is verified once on some prompts. As EAGLE-2 keeps the best candidates by score,
that one record tells for every smaller tree which of its nodes would have been accepted: no tree has to be run by itself.
The few that come out best are then run against each other and plain decoding, a few steps each in turn.

`fit` is the short way: what is accepted does not depend on the machine, so where another machine has measured it, only the cost of
a step with each of that machine's best trees is measured here.
"""

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from itertools import islice
from statistics import median

from tqdm import tqdm

from decoding.engine import Generation, environment, in_turns
from decoding.errors import UsageError
from decoding.head import DraftHead
from decoding.prompts import Prompt
from decoding.records import Settings, Step, TreeShape
from decoding.target import Target
from decoding.tuned import Tuned, foreign, key_of, own, recall, remember, tuned_elsewhere

DEEPEST, WIDEST = 7, 8  # of the trees that are compared; all their candidates are verified once
WIDTHS = (1, 2, 3, 4, 5, 6, 8)
ROWS = (2, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32, 36, 40, 48, 56, 64)
DRAFT_NODES = 16  # kept of a tree whose draft is timed
ROUNDS, STEPS_EACH = 4, 5  # every tree in every round, so that a machine that slows down slows all
FINALISTS = 4  # trees that are run against each other
NOISE = 0.05  # share of a measured time a token that says nothing
FIT_NODES = (2, 4, 6, 8, 11, 15, 19, 23, 31, 47, 63)  # trees that `fit` tries, the smallest first
FIT_ROUNDS, FIT_STEPS = 3, 3
FIT_PROMPT = 64  # tokens
HOPELESS = 1.4  # a token that takes so many times the least so far: larger trees are not tried


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


def costs(
    target: Target, head: DraftHead | None, prompt: str, shapes: Sequence[TreeShape]
) -> tuple[dict[TreeShape, float], dict[int, float]]:
    """Milliseconds of a draft by tree, and of all that follows it in a step by rows (1 = a plain step).

    Taken from steps of real runs: a verification repeated by itself finds the target's weights in the processor's cache,
    where in a run the draft before it has displaced them (28 rows: 43 ms alone, 55 ms in a run).
    """
    drafts, rest = defaultdict(list), defaultdict(list)
    for _ in tqdm(range(ROUNDS), unit="round", desc="tune: costs", file=sys.stderr):
        for shape in shapes:
            settings = Settings(max_new_tokens=STEPS_EACH * (shape.depth + 1) + 2, stop_token_ids=(), **_fields(shape))
            for step in islice(Generation(target, head, prompt, settings), 1, 1 + STEPS_EACH):
                drafts[shape].append(step.draft_ms)
                rest[1 + len(step.node_ids)].append(step.total_ms - step.draft_ms)
    return {shape: median(times) for shape, times in drafts.items()}, {rows: median(times) for rows, times in rest.items()}


def rising(measured: dict[int, float]) -> dict[int, float]:
    """Costs by rows without what cannot be: more rows never cost less, and what disturbs a measurement makes it longer."""
    return {rows: min(ms for more, ms in measured.items() if more >= rows) for rows in sorted(measured)}


def finalists(curve: Sequence[dict[str, float]]) -> list[TreeShape]:
    """The trees that are expected to be the fastest, no two of nearly the same size."""
    chosen: list[TreeShape] = []
    for point in sorted(curve, key=lambda point: point["ms_per_token"]):
        tree = TreeShape(*(int(point[name]) for name in ("depth", "top_k", "nodes")))
        if len(chosen) < FINALISTS and all(abs(tree.nodes - other.nodes) > max(tree.nodes, other.nodes) / 4 for other in chosen):
            chosen.append(tree)
    return chosen


def winner(finals: Sequence[dict[str, float]]) -> dict[str, float]:
    """The fastest tree; of those that are as fast as far as can be told, the one that catches most (of two: the larger)."""
    least = min(point["ms_per_token"] for point in finals)
    fast = (point for point in finals if point["ms_per_token"] <= (1 + NOISE) * least)
    return max(fast, key=lambda point: (point["tau"], point["nodes"]))


def run_off(
    target: Target, head: DraftHead, prompts: Sequence[str], trees: Sequence[TreeShape], max_new_tokens: int
) -> tuple[float, list[dict[str, float]]]:
    """Milliseconds of a plain token, and of a token with each tree together with its tau: measured, not expected."""
    taken: dict[TreeShape | None, list[Step]] = {tree: [] for tree in (None, *trees)}
    for prompt in tqdm(prompts, unit="prompt", desc=f"tune {head.name}: the best {len(trees)}", file=sys.stderr):
        runs = {}
        for tree in taken:
            settings = Settings(max_new_tokens=max_new_tokens, **({} if tree is None else _fields(tree)))
            runs[tree] = Generation(target, None if tree is None else head, prompt, settings)
        for tree, step in in_turns(runs):
            taken[tree].append(step)
    told = {}
    for tree, steps in taken.items():
        spent = sum(step.total_ms for step in steps)
        tokens = sum(len(step.token_ids) for step in steps)
        told[tree] = {"tau": tokens / len(steps), "ms_per_token": spent / tokens}
    return told[None]["ms_per_token"], [{**tree._asdict(), **told[tree]} for tree in trees]


def _fields(tree: TreeShape) -> dict[str, int]:
    return dict(zip(("tree_depth", "tree_top_k", "tree_nodes"), tree, strict=True))


def tune(target: Target, head: DraftHead, prompts: Sequence[Prompt], max_new_tokens: int = 48) -> Tuned:
    """Measure what a step costs and what is accepted, choose, and remember the choice for this machine."""
    order = getattr(head, "choices", None)
    deepest = max(map(len, order)) if order else DEEPEST
    widest = max(max(path) for path in order) + 1 if order else WIDEST
    pool = len(order) if order else TreeShape(deepest, widest).pool
    wide = Settings(max_new_tokens=max_new_tokens, tree_depth=deepest, tree_top_k=widest, tree_nodes=pool)
    steps: list[Step] = []
    for prompt in tqdm(prompts, unit="prompt", desc=f"tune {head.name}", file=sys.stderr):
        steps += [step for step in Generation(target, head, prompt.text, wide) if step.node_ids]
    by_rows = [TreeShape(deepest, widest, rows - 1) for rows in ROWS if rows - 1 <= pool]
    by_draft = {}
    for depth in {1, min(2, deepest), deepest}:  # a level costs what the level before it cost: the others lie between
        for width in (widest,) if order else WIDTHS:
            most = sum(len(path) <= depth for path in order) if order else TreeShape(depth, width).pool
            by_draft[depth, width] = TreeShape(depth, width, min(most, DRAFT_NODES))
    single = costs(target, None, prompts[0].text, [TreeShape()])[1]
    drafts, rest = costs(target, head, prompts[0].text, list(dict.fromkeys((*by_rows, *by_draft.values()))))
    verified = rising(rest | single)
    drafted = {}
    for width in {width for _, width in by_draft}:
        known = {depth: drafts[shape] for (depth, own), shape in by_draft.items() if own == width}
        drafted |= {(depth, width): line(known, depth) for depth in range(1, deepest + 1)}
    _, curve = choose(steps, verified, drafted, order)
    plain, finals = run_off(target, head, [prompt.text for prompt in prompts], finalists(curve), max_new_tokens)
    where = environment(target)
    tuned = Tuned(
        head=head.name,
        target=target.name,
        machine=where.machine,
        dtype=where.dtype,
        threads=where.threads,
        **winner(finals),
        plain_ms=plain,
        verify_ms=verified,
        draft_ms={f"{depth}/{width}": ms for (depth, width), ms in drafted.items()},
        curve=curve,
        finals=finals,
        measured=datetime.now(timezone.utc).isoformat(timespec="seconds"),
    )
    remember(_key(target, head), tuned)
    return tuned


def fit(target: Target, head: DraftHead) -> Tuned:
    """Choose among the best trees of another machine by what a step with each costs here, and remember the choice.

    Takes a fraction of `tune`'s time (no wide tree is verified, no text is written), which counts most where rows are dear.

    Raises:
        UsageError: nothing is known of what this head's trees catch, or a whole `tune` was done here already.
    """
    done = own(_key(target, head))
    if done is not None and not done.acceptance_from:
        raise UsageError(
            f"the trees of {head.name} were all run on this machine already: its choice stays (tune without --quick does it again)"
        )
    if tuned_elsewhere(_key(target, head)) is None:
        raise UsageError(f"what trees of {head.name} catch was measured nowhere yet: tune it without --quick")
    *_, tuned = tqdm(fitting(target, head), unit="step", desc=f"tune {head.name}: costs", file=sys.stderr)
    assert tuned is not None
    return tuned


def can_fit(target: Target, head: DraftHead) -> bool:
    """Whether the head's tree is another kind of machine's, and `fitting` can choose one for this machine."""
    key = _key(target, head)
    return foreign(key) and tuned_elsewhere(key) is not None


def fitting(target: Target, head: DraftHead) -> Iterator[Tuned | None]:
    """`fit`, one step at each `next` (None), so that it can give way at any time; the choice, remembered, comes last."""
    known = tuned_elsewhere(_key(target, head))
    assert known is not None
    points = sorted((point for point in known.curve if point["nodes"] in FIT_NODES), key=lambda point: point["nodes"])
    trees = [TreeShape(*(int(point[name]) for name in ("depth", "top_k", "nodes"))) for point in points]
    caught = {tree: point["tau"] for tree, point in zip(trees, points, strict=True)}
    runs: dict[TreeShape | None, Iterator[Step]] = {}
    taken: dict[TreeShape | None, list[float]] = defaultdict(list)
    cost: dict[TreeShape, float] = {}
    for _ in range(FIT_ROUNDS):
        for tree in (None, *(list(cost) or trees)):
            if tree not in runs:
                runs[tree] = _going(target, head, tree)
            for step in islice(runs[tree], FIT_STEPS):
                taken[tree].append(step.total_ms)
                yield None
            if tree is not None:
                cost[tree] = median(taken[tree]) / caught[tree]
                if len(taken[tree]) == FIT_STEPS and cost[tree] > HOPELESS * min(cost.values()):
                    break
    tried = [{**tree._asdict(), "tau": caught[tree], "ms_per_token": ms} for tree, ms in cost.items()]
    where = environment(target)
    told = {"head": head.name, "target": target.name, "machine": where.machine, "dtype": where.dtype, "threads": where.threads}
    told |= {"plain_ms": median(taken[None]), "verify_ms": {}, "draft_ms": {}, "curve": tried, "acceptance_from": known.machine}
    tuned = Tuned(**told, **winner(tried), measured=datetime.now(timezone.utc).isoformat(timespec="seconds"))
    remember(_key(target, head), tuned)
    yield tuned


def _going(target: Target, head: DraftHead | None, tree: TreeShape | None = None) -> Iterator[Step]:
    """A run whose first step is done: those that follow cost what a step costs. What it says does not matter."""
    prompt = [token % target.vocab_size for token in range(1, FIT_PROMPT + 1)]
    steps = 1 + FIT_ROUNDS * FIT_STEPS
    tokens = 2 + steps * (1 + (tree.depth if tree else 0))
    run = iter(Generation(target, head, prompt, Settings(max_new_tokens=tokens, stop_token_ids=(), **(_fields(tree) if tree else {}))))
    next(run)
    return run


def tuned_for(target: Target, head: DraftHead) -> Tuned | None:
    """What was chosen for this head on this machine, else on the one whose choices are shipped; None where it was never tuned."""
    return recall(_key(target, head))


def _key(target: Target, head: DraftHead) -> str:
    told = head.info.model_dump(exclude={"dtype"})  # settled by the target's, on one machine
    return key_of(environment(target), target.name, *target.notes, head.name, *told.values())
