"""Held-out agreement of a head in training with its target, by draft step."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from heads.training.batches import BatchLoader
from heads.training.features import length_batches
from heads.training.students import Student
from heads.training.workers import Workers

STEPS = 5  # draft steps at which a FeatureHead is measured, whatever it was trained with
WIDTH = 10  # guesses that are looked at


@dataclass
class HeldOut:
    """Figures over `tokens` held-out places.

    Step m is what the head does at tree depth m + 1, fed with its own estimates. Agreement is with the target's most
    probable token; one outside the draft vocabulary counts as missed.
    """

    tokens: int
    top1: list[float]
    top4: list[float]
    chain: float  # mean acceptance length of a chain of best guesses along the text, bonus token included
    by_kind: dict[str, float]  # top-1 at step 1, by kind of text
    ranks: torch.Tensor = field(repr=False)  # [places, steps] rank of the token that followed; WIDTH = not among the guesses

    def brief(self) -> dict[str, Any]:
        return {"tokens": self.tokens, "top1": self.top1, "top4": self.top4, "chain": self.chain}

    def to_json(self) -> dict[str, Any]:
        return {**self.brief(), "by_kind": self.by_kind}

    def __str__(self) -> str:
        told = " / ".join(f"{value:.3f}" for value in self.top1)
        return f"held-out top-1 by draft step {told}, top-4 {' / '.join(f'{v:.3f}' for v in self.top4)}, chain {self.chain:.3f}"


@torch.no_grad()
def measure(
    student: Student, loader: BatchLoader, dialogues: Sequence[int], steps: int, batch_tokens: int, full_vocab: bool, workers: Workers
) -> HeldOut:
    """Measure a head on some dialogues; every process takes a share.

    Args:
        full_vocab: whether the head may propose every token; else agreement is with the target's best of all tokens still.
    """
    store, device = loader.store, loader.target.device
    kinds = sorted({store.kinds[i] for i in dialogues})
    hits = torch.zeros(2, steps, dtype=torch.float64, device=device)
    by_kind = torch.zeros(len(kinds), 2, dtype=torch.float64, device=device)
    chains = []
    batches = length_batches([store.length(i) for i in dialogues], batch_tokens, random.Random(0))
    for members in batches[workers.rank :: workers.count]:
        chosen = [dialogues[i] for i in members]
        batch = loader.load(chosen)
        with torch.autocast(device.type, loader.dtype, enabled=loader.dtype != torch.float32):
            outputs = student.outputs(batch, batch.features, steps)
        best = _best(loader, batch.wanted, full_vocab)
        valid = batch.valid.bool()
        own = batch.rows[valid]
        pairs = batch.features.shape[1]
        grid = torch.full((steps, len(chosen) * pairs), -1, device=device)  # rank of what followed; -1 = nobody's answer
        for step, output in enumerate(outputs):
            lm_head = student.lm_head(step, loader.lm_head)
            estimates = batch.supervised(output).to(lm_head.dtype)
            guesses = functional.linear(estimates, lm_head).topk(min(WIDTH, len(lm_head)), dim=-1).indices
            same = (guesses == best[:, None]) & (valid & (batch.place >= step))[:, None]
            hits[:, step] += torch.stack((same[:, 0].sum(), same[:, :4].any(-1).sum()))
            found = guesses == batch.following[:, None]
            grid[step, own] = torch.where(found.any(-1), found.int().argmax(-1), WIDTH)[valid]
            if step == 0:
                kind = torch.tensor([kinds.index(store.kinds[i]) for i in chosen], device=device)[batch.rows // pairs]
                by_kind.index_add_(0, kind, torch.stack((same[:, 0].double(), batch.valid.double()), dim=1))
        # a chain that starts at pair r has its step m at pair r + m
        starts, grid = pairs - steps + 1, grid.view(steps, len(chosen), pairs)
        if starts > 0:
            along = torch.stack([grid[step, :, step : step + starts] for step in range(steps)], dim=-1).flatten(0, 1)
            chains.append(along[(along >= 0).all(-1)])
    workers.sum(hits)
    workers.sum(by_kind)
    ranks = workers.gather(torch.cat(chains).cpu() if chains else torch.empty(0, steps, dtype=torch.long))
    count = max(1, int(by_kind[:, 1].sum()))
    chain = 1 + (ranks == 0).cumprod(dim=1).sum(1).double().mean().item() if len(ranks) else 1.0
    top1, top4 = ((row / count).tolist() for row in hits)
    told = {name: round(hit / max(1.0, of), 4) for name, (hit, of) in zip(kinds, by_kind.tolist(), strict=True)}
    return HeldOut(count, [round(v, 4) for v in top1], [round(v, 4) for v in top4], round(chain, 4), told, ranks)


def _best(loader: BatchLoader, features: torch.Tensor, full_vocab: bool) -> torch.Tensor:
    """[rows] the target's most probable token, as an index into the vocabulary in use; -1 = not in it."""
    weight = loader.target.lm_head.weight
    out = [functional.linear(rows.to(weight.dtype), weight).argmax(-1) for rows in features.split(512)]
    best = torch.cat(out)
    return best if full_vocab else loader.index.to(best.device)[best]
