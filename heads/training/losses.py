"""Training losses: feature regression, soft cross-entropy and HASS's top-K distillation, over a draft vocabulary or all tokens."""

from dataclasses import dataclass

import torch
from torch.nn import functional

CHUNK = 1024  # rows whose logits are held at once


@dataclass(frozen=True)
class LossWeights:
    """L = feature * SmoothL1 + soft * CE + top * top-K (HASS, equation for L; EAGLE: 1.0, 0.1, 0)."""

    feature: float = 1.0
    soft: float = 0.1
    top: float = 0.0
    top_k: int = 10


@torch.no_grad()
def teacher_distribution(features: torch.Tensor, lm_head: torch.Tensor) -> torch.Tensor:
    """[rows, hidden] target features -> [rows, vocab] probabilities at temperature 1 over the rows of `lm_head`.

    With a draft vocabulary this is the target's distribution restricted to it and renormalised: the head can only rank
    what it may propose, and a token outside can't be drafted anyway.
    """
    out = torch.empty(len(features), len(lm_head), dtype=lm_head.dtype, device=features.device)
    for start in range(0, len(features), CHUNK):
        rows = slice(start, start + CHUNK)
        out[rows] = torch.softmax(functional.linear(features[rows].to(lm_head.dtype), lm_head).float(), dim=-1)
    return out


class _Distillation(torch.autograd.Function):
    """sum over rows of weight * -sum_x t(x) log q(x), t = soft * p + top * p restricted to its top K.

    The gradient with respect to the logits is (sum t) q - t; it is taken to the hidden states at once, so that no
    [rows, vocab] tensor outlives its chunk.
    """

    @staticmethod
    def forward(ctx, hidden, lm_head, teacher, row_weights, soft, top, top_k):
        gradient = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
        sums = torch.zeros(3, dtype=torch.float64, device=hidden.device)  # soft loss, top loss, agreements
        for start in range(0, len(hidden), CHUNK):
            rows = slice(start, start + CHUNK)
            weights = row_weights[rows].float()
            logits = functional.linear(hidden[rows].to(lm_head.dtype), lm_head).float()
            p = teacher[rows].float()
            lse = logits.logsumexp(dim=-1)
            best = p.topk(min(top_k, p.shape[-1]), dim=-1)
            soft_loss = lse * p.sum(-1) - (p * logits).sum(-1)
            top_loss = lse * best.values.sum(-1) - (best.values * logits.gather(1, best.indices)).sum(-1)
            sums[0] += (soft_loss * weights).sum()
            sums[1] += (top_loss * weights).sum()
            sums[2] += ((logits.argmax(-1) == best.indices[:, 0]) * weights).sum()
            mass = soft * p.sum(-1) + top * best.values.sum(-1)
            grad = torch.exp_(logits.sub_(lse[:, None])).mul_(mass[:, None])
            grad.sub_(p, alpha=soft)
            if top:
                grad.scatter_add_(1, best.indices, -top * best.values)
            grad.mul_(weights[:, None])
            gradient[rows] = (grad.to(lm_head.dtype) @ lm_head).float()
        ctx.save_for_backward(gradient.to(hidden.dtype))
        soft_sum, top_sum, agreed = sums.float()
        ctx.mark_non_differentiable(soft_sum, top_sum, agreed)
        return soft * soft_sum + top * top_sum, soft_sum, top_sum, agreed

    @staticmethod
    def backward(ctx, grad_loss, *_):
        (gradient,) = ctx.saved_tensors
        return gradient * grad_loss, None, None, None, None, None, None


@dataclass
class StepLoss:
    """Losses of one alignment step; all but `total` are for the log."""

    total: torch.Tensor
    feature: float
    soft: float
    top: float
    agreement: float  # share of rows whose best draft token is the target's


def step_loss(
    output: torch.Tensor,
    features: torch.Tensor,
    teacher: torch.Tensor,
    row_weights: torch.Tensor,
    lm_head: torch.Tensor,
    weights: LossWeights,
) -> StepLoss:
    """Loss of one alignment step, a mean over the supervised rows (denominator + 1e-5, as released).

    Args:
        output: [rows, hidden] head outputs of the supervised rows.
        features: [rows, hidden] the target features that they should be.
        teacher: [rows, vocab] target distributions there.
        row_weights: [rows] 1, or 0 where the text goes on with a token outside the draft vocabulary: there only the
            feature is learned, since no distribution over the draft vocabulary is right.
        lm_head: [vocab, hidden], frozen.
    """
    regression = functional.smooth_l1_loss(output.float(), features.float(), reduction="none").mean(-1)
    feature_loss = regression.sum() / (len(regression) + 1e-5)
    count = row_weights.sum() + 1e-5
    distilled, soft, top, agreed = _Distillation.apply(output, lm_head, teacher, row_weights, weights.soft, weights.top, weights.top_k)
    total = weights.feature * feature_loss + distilled / count
    return StepLoss(total, feature_loss.item(), (soft / count).item(), (top / count).item(), (agreed / count).item())
