"""Training in coordinates where every input of a matrix has size 1.

The target's features have a few entries twenty times as large as the others, its embeddings a tenth of their size. A step
of equal size in every weight is then far too long for the former and too short for the latter. So the matrices that
read them are trained as V, W = V / size of the input; what is saved is W. On the embedded target this and Muon together
need three quarters of the tokens that AdamW needs in W (README, "Training heads").
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.utils import parametrize

from heads.feature import FeatureHead
from heads.medusa import MedusaHead
from heads.training.batches import BatchLoader


class _PerInput(nn.Module):
    """W = V / size, column by column."""

    def __init__(self, sizes: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("sizes", sizes)

    def forward(self, trained: torch.Tensor) -> torch.Tensor:
        return trained / self.sizes

    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.sizes


@torch.no_grad()
def input_sizes(loader: BatchLoader, batches: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Root mean squares [hidden] of embeddings and of features over the supervised pairs of some batches."""
    sums, count = torch.zeros(2, loader.target.hidden_size, device=loader.target.device), 0.0
    for dialogues in batches:
        batch = loader.load(dialogues)
        for total, pairs in zip(sums, (batch.embeddings, batch.features), strict=True):
            total += (batch.supervised(pairs).float().square() * batch.valid[:, None]).sum(0)
        count += float(batch.valid.sum())
    sizes = (sums / max(count, 1.0)).sqrt()
    embedding, feature = sizes.clamp(min=1e-3 * float(sizes.max()))
    return embedding, feature


@torch.no_grad()
def start_norms(head: FeatureHead, feature: torch.Tensor) -> None:
    """Norms begin as those of a trained model are: what is large is made small."""
    for layer in head.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            if not isinstance(norm, nn.Identity):
                norm.weight.copy_(feature.square().mean().sqrt() / feature)


def condition(head: FeatureHead | MedusaHead, embedding: torch.Tensor, feature: torch.Tensor) -> None:
    """Give the matrices that read embeddings and features their sizes; what the head computes stays the same."""
    for linear in _readers(head):
        sizes = torch.cat((embedding, feature)) if linear.in_features == len(embedding) + len(feature) else feature
        parametrize.register_parametrization(linear, "weight", _PerInput(sizes.clone()))


def _readers(head: FeatureHead | MedusaHead) -> list[nn.Linear]:
    if isinstance(head, MedusaHead):
        return [block.linear for blocks in head.medusa_head for block in blocks[: head.layers]]
    attention = head.layers[0].self_attn  # the first layer has no norm in front of it
    return [head.fc, *(attention[name] for name in ("q_proj", "k_proj", "v_proj"))]


def plain_state(head: nn.Module) -> dict[str, torch.Tensor]:
    """A head's weights under the names, and in the coordinates, of the checkpoint formats."""
    state = {}
    for place, module in head.named_modules():
        if type(module) is _PerInput or isinstance(module, parametrize.ParametrizationList):
            continue
        own = [name for name, _ in module.named_parameters(recurse=False)]
        if parametrize.is_parametrized(module):
            own += list(module.parametrizations)
        state |= {f"{place}.{name}": getattr(module, name).detach() for name in own}
    return state
