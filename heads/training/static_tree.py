"""A Medusa head's static tree, built from what the head was seen to guess right (Medusa, section 2.3.3)."""

import heapq
from collections import Counter

import torch

Path = tuple[int, ...]
TRUST = 50.0  # sightings at which a path's own count weighs as much as the product of its positions' accuracies


def build_choices(ranks: torch.Tensor, width: int = 10, count: int = 256) -> tuple[list[Path], list[float]]:
    """Paths of child ranks, best first, a parent always before its children.

    A path is worth the share of places where the text went exactly along it. Rare paths have few sightings, so the
    share is blended with the product of the positions' own accuracies (Medusa's estimate, which takes them as independent).

    Args:
        ranks: [places, positions] rank of the token that followed among a position's guesses; `width` or more = not among them.

    Returns:
        The paths and their worth: mean acceptance length of a tree = 1 + the sum over its nodes.
    """
    places, positions = ranks.shape
    seen: Counter[Path] = Counter()
    for row in ranks.tolist():
        for depth in range(positions):
            if row[depth] >= width:
                break
            seen[tuple(row[: depth + 1])] += 1
    single = torch.stack([(ranks == rank).float().mean(0) for rank in range(width)], dim=1).tolist()  # [positions][width]

    def worth(path: Path) -> float:
        product = 1.0
        for depth, rank in enumerate(path):
            product *= single[depth][rank]
        return (seen[path] + TRUST * product) / (places + TRUST)

    heap = [(-worth((rank,)), (rank,)) for rank in range(width)]
    heapq.heapify(heap)
    choices: list[Path] = []
    worths: list[float] = []
    while heap and len(choices) < count:
        value, path = heapq.heappop(heap)
        choices.append(path)
        worths.append(-value)
        if len(path) < positions:
            for rank in range(width):
                heapq.heappush(heap, (-worth((*path, rank)), (*path, rank)))
    return choices, worths
