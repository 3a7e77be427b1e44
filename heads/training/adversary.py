"""KOALA's adversary (arXiv 2408.08146): a discriminator tells the head's outputs from the target's features.

The paper's form of it is not public; this one is ours. The discriminator sees where the head stands (the embedding and
feature that it was given), a candidate for the hidden state that `lm_head` reads there, and the draft step. It learns
with the logistic loss; the head gets the non-saturating one. Both learn at every step, each with the other one fixed.
"""

import torch
from torch import nn
from torch.nn import functional


class Discriminator(nn.Module):
    """A small perceptron: (context, candidate, draft step) -> logit, high where the candidate looks like the target's."""

    def __init__(self, hidden: int, context: int, steps: int) -> None:
        """
        Args:
            hidden: size of a feature. context: size of what the head was given. steps: draft steps that are trained.
        """
        super().__init__()
        self.context_norm = nn.LayerNorm(context, elementwise_affine=False)
        self.candidate_norm = nn.LayerNorm(hidden, elementwise_affine=False)
        self.inner = nn.Linear(context + hidden, hidden)
        self.steps = nn.Embedding(steps, hidden)
        self.middle = nn.Linear(hidden, hidden // 2)
        self.outer = nn.Linear(hidden // 2, 1)

    def forward(self, context: torch.Tensor, candidate: torch.Tensor, step: int) -> torch.Tensor:
        """[rows, context] and [rows, hidden] -> [rows] logits."""
        seen = torch.cat((self.context_norm(context), self.candidate_norm(candidate)), dim=-1)
        x = functional.silu(self.inner(seen) + self.steps.weight[step])
        return self.outer(functional.silu(self.middle(x)))[:, 0].float()


def discriminator_loss(
    discriminator: Discriminator, context: torch.Tensor, real: torch.Tensor, fake: torch.Tensor, valid: torch.Tensor, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the discriminator learns from.

    Args:
        context: [rows, context].
        real, fake: [rows, hidden] target features and (detached) head outputs.
        valid: [rows] 1.0 where there is something to learn.

    Returns:
        The loss, and [2] the shares of real and of fake candidates that it recognises: both near 1 means that the head
        learns nothing from it, both near 0.5 that it can't tell them apart.
    """
    on_real, on_fake = discriminator(context, real, step), discriminator(context, fake.detach(), step)
    loss = _mean(functional.softplus(-on_real) + functional.softplus(on_fake), valid)
    return loss, torch.stack((_mean((on_real > 0).float(), valid), _mean((on_fake < 0).float(), valid)))


def adversarial_loss(
    discriminator: Discriminator, context: torch.Tensor, fake: torch.Tensor, valid: torch.Tensor, step: int
) -> torch.Tensor:
    """-log D(fake): falls as the head's outputs look more like the target's."""
    return _mean(functional.softplus(-discriminator(context, fake, step)), valid)


def _mean(values: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
    return (values * valid).sum() / (valid.sum() + 1e-5)
