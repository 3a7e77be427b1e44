"""What the parts of a step cost on this machine: a verification against its rows and its context, a draft against its tree."""

import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from typing import TypeVar

import torch

from decoding.errors import UsageError
from decoding.head import DraftHead
from decoding.records import TreeShape
from decoding.target import Target
from decoding.tree import ancestor_mask

Key = TypeVar("Key", bound=Hashable)


def interleaved(works: dict[Key, Callable[[], object]], repeats: int, device: torch.device) -> dict[Key, float]:
    """Median milliseconds of each piece of work, all of them in turn (a machine that slows down slows all), one warm-up."""
    taken: dict[Key, list[float]] = {key: [] for key in works}
    for turn in range(repeats + 1):
        for key, work in works.items():
            synchronize(device)
            started = time.perf_counter()
            work()
            synchronize(device)
            if turn:
                taken[key].append(1000 * (time.perf_counter() - started))
    return {key: statistics.median(times) for key, times in taken.items()}


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.inference_mode()
def verification(target: Target, rows: Sequence[int], contexts: Sequence[int], repeats: int = 7) -> dict[tuple[int, int], float]:
    """Milliseconds of a target forward with logits, by (context, rows); 1 row is a step of plain decoding.

    Raises:
        UsageError: a context that the target can't hold.
    """
    works = {}
    for context in contexts:
        if context + max(rows) > target.context_length:
            raise UsageError(f"context {context} and {max(rows)} rows are more than the {target.context_length} tokens of {target.name}")
        cache = target.new_cache(context + max(rows), rows)
        fill(target, cache, context)
        for count in rows:
            works[context, count] = _verify(target, cache, context, count)
    return interleaved(works, repeats, target.device)


def fill(target: Target, cache, tokens: int) -> torch.Tensor:
    """Put any `tokens` tokens into an empty cache; returns their features."""
    ids = torch.arange(tokens, device=target.device) * 7919 % target.vocab_size
    return target.forward(ids, torch.arange(tokens, device=target.device), None, cache)


def _verify(target: Target, cache, context: int, rows: int) -> Callable[[], None]:
    ids = torch.arange(rows, device=target.device) * 7907 % target.vocab_size
    parents = (torch.arange(rows - 1, device=target.device) - 4) // 4  # four children each
    depth = next(depth for depth in range(1, 64) if sum(4**level for level in range(depth + 1)) >= rows)
    tail = ancestor_mask(parents.clamp(min=-1), depth) if rows > 1 else None
    positions = context + (tail.sum(1) - 1 if tail is not None else torch.zeros(1, dtype=torch.long, device=target.device))

    def work() -> None:
        target.logits(target.forward(ids, positions, tail, cache))
        cache.commit(context, None, 0)

    return work


@torch.inference_mode()
def drafting(target: Target, head: DraftHead, shapes: Sequence[TreeShape], context: int = 200, repeats: int = 7) -> dict[TreeShape, float]:
    """Milliseconds of one draft (two new tokens, then the tree), by tree."""
    features = fill(target, target.new_cache(context), context)
    ids = torch.arange(1, context + 1, device=target.device)
    works = {}
    for shape in shapes:
        session = head.start(context + 2 * (repeats + 2), shape)
        session.propose(features, ids)
        works[shape] = lambda session=session: session.propose(features[-2:], ids[-2:])
    return interleaved(works, repeats, target.device)
