"""Draft trees as tensors: EAGLE-2's choice of nodes, ancestor masks, and what a target needs to verify them."""

import torch
from torch.nn import functional

from decoding.records import TreeShape


class TreePool:
    """The candidates of one draft and EAGLE-2's two selections (arXiv 2406.16858, sections 4.1 and 4.2).

    Candidates are numbered level by level, then by rank of the parent in its beam, then by rank among siblings. Scores
    are float32 cumulative log-probabilities, so a child never beats its parent; on ties the lower number wins, so a
    kept node's parent is always kept.
    """

    def __init__(self, shape: TreeShape) -> None:
        self.shape = shape
        self.tokens: list[torch.Tensor] = []  # per level [beam, top_k]
        self.logprobs: list[torch.Tensor] = []
        self.scores: list[torch.Tensor] = []
        self.parents: list[torch.Tensor] = []  # per level [beam], candidate number of the parent, -1 = root
        self.size = 0

    def add_level(self, logits: torch.Tensor, parents: torch.Tensor, parent_scores: torch.Tensor) -> None:
        """Add the top_k children of each beam node.

        Args:
            logits: [beam, vocab] of the draft at the beam nodes.
            parents: [beam] their candidate numbers (-1 = root).
            parent_scores: [beam] float32.
        """
        top = functional.log_softmax(logits, dim=-1, dtype=torch.float32).topk(min(self.shape.top_k, logits.shape[-1]), dim=-1)
        logprobs = top.values
        self.tokens.append(top.indices)
        self.logprobs.append(logprobs)
        self.scores.append(parent_scores[:, None] + logprobs)
        self.parents.append(parents)
        self.size += logprobs.numel()

    def next_beam(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Expansion: the best top_k candidates of the newest level, best first.

        Returns:
            [beam] tokens, candidate numbers, scores, and rows (which beam node of this level is their parent).
        """
        level = self.scores[-1]
        flat = level.flatten()
        chosen = _best(flat, min(self.shape.top_k, flat.numel()))
        numbers = chosen + (self.size - flat.numel())
        return self.tokens[-1].flatten()[chosen], numbers, flat[chosen], chosen // level.shape[1]

    def keep(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Reranking: the best `nodes` candidates of all levels, in the order of their numbers.

        Returns:
            [nodes] token ids, parents (index of the kept parent, -1 = root), depths, logprobs, scores, and the
            [pool + 1] place of each candidate among the kept nodes (-1 = dropped; the last entry stands for the root).
        """
        scores = torch.cat([level.flatten() for level in self.scores])
        kept = _best(scores, min(self.shape.nodes, scores.numel())).sort().values
        place = torch.full((self.size + 1,), -1, dtype=torch.long, device=scores.device)
        place[kept] = torch.arange(len(kept), device=scores.device)
        parents = torch.cat([p.repeat_interleave(t.shape[1]) for p, t in zip(self.parents, self.tokens, strict=True)])
        depths = torch.cat([torch.full((t.numel(),), depth, device=scores.device) for depth, t in enumerate(self.tokens, 1)])
        tokens = torch.cat([level.flatten() for level in self.tokens])
        logprobs = torch.cat([level.flatten() for level in self.logprobs])
        return tokens[kept], place[parents[kept]], depths[kept], logprobs[kept], scores[kept], place


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the best scores, best first; equal ones in their own order."""
    return scores.sort(descending=True, stable=True).indices[:count]


def ancestor_mask(parents: torch.Tensor, depth: int) -> torch.Tensor:
    """[nodes] parents (-1 = root) -> [nodes + 1, nodes + 1] bool: row 0 is the root, a row sees itself and its ancestors."""
    nodes = len(parents)
    mask = torch.eye(nodes + 1, dtype=torch.bool, device=parents.device)
    mask[:, 0] = True
    rows = parents + 1
    for _ in range(depth - 1):  # each round, a node takes over what its parent sees
        mask[1:] |= mask[rows]
    return mask
