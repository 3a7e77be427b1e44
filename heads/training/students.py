"""The two networks that are trained, seen alike: draft step m of either estimates what pair r should give, m steps ahead.

A FeatureHead's step m is its alignment step. A MedusaHead's step m is its position m, moved by m rows, so that row r
of every step is about the same token. Loss, agreement and adversary need not know which network it is.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig

from decoding.errors import UsageError
from decoding.target import Target
from heads.checkpoint import HeadMeta, load_feature_head, save_feature_head
from heads.feature import FeatureHead, FeatureShape
from heads.medusa import MedusaHead, load_medusa_head, save_medusa_head
from heads.training.alignment import aligned_forwards
from heads.training.batches import Batch, BatchLoader
from heads.training.conditioning import plain_state
from heads.training.recipe import Recipe
from heads.training.static_tree import build_choices


class Student(Protocol):
    """A network in training."""

    module: nn.Module
    context: int  # size of what the adversary is told of a row's input

    def outputs(self, batch: Batch, features: torch.Tensor, steps: int) -> list[torch.Tensor]:
        """Per draft step [batch, pairs, hidden]; `features` are the batch's own, or noisy ones."""

    def lm_head(self, step: int, shared: torch.Tensor) -> torch.Tensor:
        """[vocab, hidden] that reads a step's outputs."""

    def seen(self, batch: Batch, step: int) -> torch.Tensor:
        """[rows, context] what the supervised rows of a step were made from."""

    def save(self, folder: Path, meta: HeadMeta, draft_vocab: torch.Tensor | None, ranks: torch.Tensor) -> None:
        """Write the head; `ranks` [places, steps] is how the text went on among its held-out guesses."""


class FeatureStudent:
    """A FeatureHead (EAGLE, HASS, KOALA-EAGLE)."""

    def __init__(self, target: Target, recipe: Recipe) -> None:
        self.module = FeatureHead(head_shape(target, recipe.layers))
        self.context = 2 * target.hidden_size

    def outputs(self, batch: Batch, features: torch.Tensor, steps: int) -> list[torch.Tensor]:
        return aligned_forwards(self.module, batch.embeddings, features, steps)

    def lm_head(self, step: int, shared: torch.Tensor) -> torch.Tensor:
        return shared

    def seen(self, batch: Batch, step: int) -> torch.Tensor:
        return torch.cat((batch.supervised(batch.embeddings), batch.supervised(batch.features)), dim=-1)

    def save(self, folder: Path, meta: HeadMeta, draft_vocab: torch.Tensor | None, ranks: torch.Tensor) -> None:
        save_feature_head(folder, _plain(self.module, FeatureHead(self.module.shape)), meta, draft_vocab)


class MedusaStudent:
    """A MedusaHead (Medusa, KOALA-Medusa)."""

    def __init__(self, target: Target, recipe: Recipe, shared: torch.Tensor) -> None:
        self.module = MedusaHead(target.hidden_size, recipe.positions, recipe.layers, len(shared) if recipe.own_lm_head else None)
        self.context, self.vocab_size = target.hidden_size, target.vocab_size
        for position in range(recipe.positions if recipe.own_lm_head else 0):
            self.module.own_lm_head(position).data.copy_(shared)  # Medusa: each starts as the target's

    def outputs(self, batch: Batch, features: torch.Tensor, steps: int) -> list[torch.Tensor]:
        pairs = features.shape[1]
        return [functional.pad(out, (0, 0, step, 0))[:, :pairs] for step, out in enumerate(self.module(features)[:steps])]

    def lm_head(self, step: int, shared: torch.Tensor) -> torch.Tensor:
        own = self.module.own_lm_head(step)
        return shared if own is None else own

    def seen(self, batch: Batch, step: int) -> torch.Tensor:
        return batch.supervised(functional.pad(batch.features, (0, 0, step, 0))[:, : batch.features.shape[1]])

    def save(self, folder: Path, meta: HeadMeta, draft_vocab: torch.Tensor | None, ranks: torch.Tensor) -> None:
        choices, worth = build_choices(ranks)
        meta.results["static_tree"] = {"places": len(ranks), "expected_tau": {n: round(1 + sum(worth[:n]), 3) for n in (16, 32, 63)}}
        module = self.module
        fresh = MedusaHead(module.hidden, module.positions, module.layers, module.own_vocab)
        save_medusa_head(folder, _plain(module, fresh), meta, choices, self.vocab_size, draft_vocab)


def _plain(trained: nn.Module, fresh: nn.Module) -> nn.Module:
    """The trained weights in a module of the checkpoint format."""
    fresh.load_state_dict(plain_state(trained))
    return fresh


def read_start(folder: Path, family: str) -> tuple[nn.Module, HeadMeta, torch.Tensor | None]:
    """The head that a second stage starts from, what is known of its making, and its draft vocabulary."""
    return load_medusa_head(folder)[:3] if family == "medusa" else load_feature_head(folder)


def take_over(module: nn.Module, trained: nn.Module, folder: Path) -> None:
    """Give a head in training the weights of a trained one.

    Raises:
        UsageError: it is another network.
    """
    wanted, found = module.state_dict(), trained.state_dict()
    if {name: value.shape for name, value in wanted.items()} != {name: value.shape for name, value in found.items()}:
        raise UsageError(f"--start {folder} is another network than the one that is to be trained (layers, biases or sizes differ)")
    module.load_state_dict(found)


def head_shape(target: Target, layers: int) -> FeatureShape:
    """A head of the target's own layer sizes, its rope included."""
    config = target.model.config.get_text_config()
    llama = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", config.num_attention_heads),
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        rope_parameters=getattr(config, "rope_parameters", None),
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
    )
    return FeatureShape(llama)


@torch.no_grad()
def fit_input(head: FeatureHead, loader: BatchLoader, batches: Sequence[Sequence[int]]) -> None:
    """Start a FeatureHead as the best linear guess of the next feature, which its layers then only correct.

    `fc` becomes the least-squares map from (embedding, feature) to the next feature; what the layers add starts at
    zero. A random `fc` needs hundreds of steps to find the embedding's scale alone (a tenth of the feature's here).
    """
    inputs = head.fc.in_features
    size = inputs + 1 if head.fc.bias is not None else inputs
    device = head.fc.weight.device
    square, right = torch.zeros(size, size, dtype=torch.float64), torch.zeros(size, head.fc.out_features, dtype=torch.float64)
    for dialogues in batches:
        batch = loader.load(dialogues)
        x = torch.cat((batch.supervised(batch.embeddings), batch.supervised(batch.features)), dim=-1).float()
        x = functional.pad(x, (0, size - inputs), value=1.0) * batch.valid[:, None]
        square += (x.T @ x).double().cpu()
        right += (x.T @ batch.wanted.float()).double().cpu()
    ridge = 1e-4 * square.diagonal().clamp(min=1e-6 * float(square.diagonal().mean()))
    solution = torch.linalg.solve(square + torch.diag(ridge), right).T.float().to(device)
    head.fc.weight.copy_(solution[:, :inputs])
    if head.fc.bias is not None:
        head.fc.bias.copy_(solution[:, inputs])
    for layer in head.layers:
        layer.self_attn["o_proj"].weight.zero_()
        layer.mlp.down_proj.weight.zero_()
