"""Training losses: feature regression, soft cross-entropy and HASS's top-K distillation, over a draft vocabulary or all tokens."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

CHUNK = 1024  # rows whose logits are held at once: as many as a matrix product likes
BLOCK_VALUES = 400_000  # logits of a chunk that are worked on at once on a CPU: as many as stay in a core's cache
STATISTICS = ("feature", "soft", "top", "agreement")


@dataclass(frozen=True)
class LossWeights:
    """L = feature * SmoothL1 + soft * CE + top * top-K (HASS, equation for L; EAGLE: 1.0, 0.1, 0)."""

    feature: float = 1.0
    soft: float = 0.1
    top: float = 0.0
    top_k: int = 10


@dataclass
class Teacher:
    """What the draft's distributions should be at the supervised rows, found once per batch for all draft steps."""

    probabilities: torch.Tensor  # [rows, vocab]
    best: torch.Tensor  # [rows, K] float32, the highest of them
    best_ids: torch.Tensor  # [rows, K]

    @classmethod
    @torch.no_grad()
    def of(cls, features: torch.Tensor, lm_head: torch.Tensor, top_k: int = 10) -> "Teacher":
        """The target's distributions at temperature 1, from its features [rows, hidden], over the rows of `lm_head`.

        With a draft vocabulary they are restricted to it and renormalised: the head can only rank what it may propose,
        and a token outside can't be drafted anyway.
        """
        top_k = min(top_k, len(lm_head))
        out = torch.empty(len(features), len(lm_head), dtype=lm_head.dtype, device=features.device)
        best = torch.empty(len(features), top_k, device=features.device)
        best_ids = torch.empty(len(features), top_k, dtype=torch.long, device=features.device)
        for chunk in _slices(len(features), CHUNK):
            logits = functional.linear(features[chunk].to(lm_head.dtype), lm_head)
            for block in _blocks(logits):
                rows = slice(chunk.start + block.start, chunk.start + block.stop)
                out[rows] = torch.softmax(logits[block], dim=-1, dtype=torch.float32)
                found = out[rows].topk(top_k, dim=-1)
                best[rows], best_ids[rows] = found.values.float(), found.indices
        return cls(out, best, best_ids)

    @classmethod
    def of_text(cls, ids: torch.Tensor, vocab: int, dtype: torch.dtype, top_k: int = 10) -> "Teacher":
        """Hard labels: all probability on the text's own token [rows] (an index into the vocabulary in use)."""
        out = torch.zeros(len(ids), vocab, dtype=dtype, device=ids.device).scatter_(1, ids[:, None], 1.0)
        found = out.topk(min(top_k, vocab), dim=-1)
        return cls(out, found.values.float(), found.indices)


def _slices(rows: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _blocks(logits: torch.Tensor) -> list[slice]:
    """Rows to work on at once: ten passes over a block that stays in the cache cost less than three over one that does not."""
    rows = len(logits) if logits.is_cuda else max(1, BLOCK_VALUES // logits.shape[-1])
    return _slices(len(logits), rows)


class _Distillation(torch.autograd.Function):
    """sum over rows of weight * -sum_x t(x) log q(x), t = soft * p + top * p restricted to its top K.

    The gradient with respect to the logits is (sum t) q - t; it is taken to the hidden states (and to an own `lm_head`)
    at once, so that no [rows, vocab] tensor outlives its chunk.
    """

    @staticmethod
    def forward(ctx, hidden, lm_head, teacher: Teacher, row_weights, soft: float, top: float):
        gradient = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        own = ctx.needs_input_grad[1]
        head_gradient = torch.zeros(lm_head.shape, dtype=torch.float32, device=hidden.device) if own else None
        matrix = lm_head.to(teacher.probabilities.dtype)
        figures = torch.empty(3, len(hidden), device=hidden.device)  # soft loss, top loss, agreement of each row
        for chunk in _slices(len(hidden), CHUNK):
            inputs = hidden[chunk].to(matrix.dtype)
            logits = functional.linear(inputs, matrix)  # becomes their gradient, block by block
            for block in _blocks(logits):
                rows = slice(chunk.start + block.start, chunk.start + block.stop)
                log_q = torch.log_softmax(logits[block], dim=-1, dtype=torch.float32)
                p, best, best_ids = teacher.probabilities[rows].float(), teacher.best[rows], teacher.best_ids[rows]
                figures[0, rows] = -(p * log_q).sum(-1)
                chosen = log_q.gather(1, best_ids)
                figures[1, rows] = -(best * chosen).sum(-1)
                figures[2, rows] = (chosen[:, 0] >= log_q.amax(-1)).float()  # argmax would cost more than the softmax
                mass = soft * p.sum(-1) + top * best.sum(-1)
                grad = log_q.exp_().mul_(mass[:, None]).sub_(p, alpha=soft)
                if top:
                    grad.scatter_add_(1, best_ids, -top * best)
                logits[block] = grad.mul_(row_weights[rows].float()[:, None])
            gradient[chunk] = (logits @ matrix).float()
            if own:
                head_gradient += (logits.T @ inputs).float()
        soft_sum, top_sum, agreed = (figures.double() @ row_weights.double()).float()
        ctx.save_for_backward(gradient.to(hidden.dtype), head_gradient)
        ctx.mark_non_differentiable(soft_sum, top_sum, agreed)
        return soft * soft_sum + top * top_sum, soft_sum, top_sum, agreed

    @staticmethod
    def backward(ctx, grad_loss, *_) -> tuple[Any, ...]:
        gradient, head_gradient = ctx.saved_tensors
        return gradient * grad_loss, None if head_gradient is None else head_gradient * grad_loss, None, None, None, None


def step_loss(
    output: torch.Tensor,
    features: torch.Tensor,
    teacher: Teacher,
    valid: torch.Tensor,
    counted: torch.Tensor,
    lm_head: torch.Tensor,
    weights: LossWeights,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of one draft step, a mean over the supervised rows (denominator + 1e-5, as released).

    Args:
        output: [rows, hidden] head outputs of the supervised rows.
        features: [rows, hidden] the target features that they should be.
        valid: [rows] 1, or 0 where there is nothing to learn.
        counted: [rows] as `valid`, but 0 too where the text goes on with a token outside the draft vocabulary: there only
            the feature is learned, since no distribution over the draft vocabulary is right.
        lm_head: [vocab, hidden], frozen or the head's own.

    Returns:
        The loss, and [4] STATISTICS for the log (agreement: share of rows whose best draft token is the teacher's).
    """
    regression = torch.zeros((), device=output.device)
    if weights.feature:
        distance = functional.smooth_l1_loss(output.float(), features.float(), reduction="none").mean(-1)
        regression = (distance * valid).sum() / (valid.sum() + 1e-5)
    count = counted.sum() + 1e-5
    distilled, soft, top, agreed = _Distillation.apply(output, lm_head, teacher, counted, weights.soft, weights.top)
    total = weights.feature * regression + distilled / count
    return total, torch.stack((regression.detach(), soft / count, top / count, agreed / count))
