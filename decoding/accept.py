"""Acceptance: which drafted nodes the target agrees with, and the bonus token. Lossless for every tree."""

import random
from dataclasses import dataclass

import torch

from decoding.errors import DraftscopeError
from decoding.head import DraftTree
from decoding.records import Settings

OVERFLOW = "the target's logits are not numbers (overflow): use --dtype bfloat16 or float32"


class Draws:
    """The uniform draws of one request, in order, from one seeded generator."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def uniform(self) -> float:
        """The next number in [0, 1)."""
        return self._random.random()

    def choose(self, weights: torch.Tensor) -> int:
        """An index drawn in proportion to `weights` [vocab] (not negative, not all zero), by inverting their sums."""
        sums = weights.double().cumsum(0)
        index = int(torch.searchsorted(sums, sums.new_tensor([self.uniform()]) * sums[-1], right=True))
        return min(index, int(weights.nonzero()[-1])) if index >= len(weights) or weights[index] == 0 else index


@dataclass
class Accepted:
    """What a step keeps: the accepted nodes in order, the bonus token, and the draw that decided each tested node."""

    nodes: list[int]
    bonus_id: int
    draws: dict[int, float]


def target_probabilities(logits: torch.Tensor, settings: Settings) -> torch.Tensor:
    """[rows, vocab] logits -> float32 distribution after temperature, then top-k, then top-p (temperature 0: as at 1)."""
    logits = logits.float()
    if settings.temperature == 0:
        return torch.softmax(logits, dim=-1)
    logits = logits / settings.temperature
    if 0 < settings.top_k < logits.shape[-1]:
        top = logits.topk(settings.top_k, dim=-1)
        logits = torch.full_like(logits, -torch.inf).scatter_(-1, top.indices, top.values)
    probabilities = torch.softmax(logits, dim=-1)
    return _nucleus(probabilities, settings.top_p) if settings.top_p < 1 else probabilities


def _nucleus(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the most probable tokens until their sum reaches top_p (at least one), renormalised."""
    vocab = probabilities.shape[-1]
    for width in (min(512, vocab), vocab):  # the nucleus nearly always lies in the first few hundred tokens
        top = probabilities.topk(width, dim=-1)
        sums = top.values.cumsum(-1)
        if width == vocab or bool((sums[:, -1] >= top_p).all()):
            break
    kept = torch.where(sums - top.values < top_p, top.values, 0.0)  # what stands before a token is still below top_p
    kept = kept / kept.sum(-1, keepdim=True)
    return torch.zeros_like(probabilities).scatter_(-1, top.indices, kept)


def accept(logits: torch.Tensor, tree: DraftTree, settings: Settings, draws: Draws) -> Accepted:
    """Walk down the tree as far as the target agrees.

    Args:
        logits: [nodes + 1, vocab] of the target, row 0 = root, row i + 1 = node i.
    """
    return _accept_greedy(logits, tree) if settings.temperature == 0 else _accept_sampled(logits, tree, settings, draws)


def _accept_greedy(logits: torch.Tensor, tree: DraftTree) -> Accepted:
    if logits.device.type == "cpu":  # only the rows of the path are searched for their best token

        def choose(row: int) -> int:
            best = logits[row].max(dim=-1)
            _check(best.values)
            return int(best.indices)

        token_ids, parents = tree.token_ids.tolist(), tree.parents.tolist()
    else:  # one copy to the host: tokens and parents of the nodes, the target's choice in every row (-1 = not a number)
        best = logits.max(dim=-1)
        choices = torch.where(torch.isfinite(best.values), best.indices, -1)
        packed, nodes = torch.cat((tree.token_ids, tree.parents, choices)).tolist(), len(tree)
        token_ids, parents = packed[:nodes], packed[nodes : 2 * nodes]

        def choose(row: int) -> int:
            if packed[2 * nodes + row] < 0:
                raise DraftscopeError(OVERFLOW)
            return packed[2 * nodes + row]

    path, choice = [], choose(0)
    # a node follows its parent, and siblings are different tokens: one pass finds the accepted path
    for node, (token_id, parent) in enumerate(zip(token_ids, parents, strict=True)):
        if token_id == choice and parent == (path[-1] if path else -1):
            path.append(node)
            choice = choose(node + 1)
    return Accepted(path, choice, {})


def _accept_sampled(logits: torch.Tensor, tree: DraftTree, settings: Settings, draws: Draws) -> Accepted:
    """EAGLE-2's rule for deterministic candidates (proposal = 1): accept child x with probability p(x), else remove x
    from p and renormalise; when no child is left, the bonus token comes from what remains of p."""
    token_ids, parents = tree.token_ids.tolist(), tree.parents.tolist()
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    path: list[int] = []
    used: dict[int, float] = {}
    while True:
        here = path[-1] if path else -1
        row = target_probabilities(logits[here + 1 : here + 2], settings)[0]
        candidates = children.get(here, [])
        shares = row[[token_ids[node] for node in candidates]].tolist() if candidates else []
        rest = 1.0  # mass of p that is not yet rejected
        for node, share in zip(candidates, shares, strict=True):
            used[node] = draws.uniform()
            if used[node] * rest <= share and share > 0:
                path.append(node)
                break
            rest -= share
        else:
            remaining = row.clone()
            remaining[[token_ids[node] for node in candidates]] = 0
            if not bool(remaining.sum() > 0):  # all mass was rejected by rounding: the target has no other token
                remaining = row
            _check(row.max())
            return Accepted(path, draws.choose(remaining), used)


def _check(values: torch.Tensor) -> None:
    if not bool(torch.isfinite(values).all()):
        raise DraftscopeError(OVERFLOW)
