"""MedusaHead: the network of Medusa and KOALA-Medusa heads, and drafting with it.

For each future position, K distinct residual blocks on the target's newest feature, then `lm_head` (the target's, or
an own one). All positions are guessed at once, and the guesses fill a static tree (Medusa, 2401.10774).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from decoding.errors import UsageError
from decoding.head import DraftTree
from decoding.lean import Product
from decoding.records import HeadInfo, TreeShape
from decoding.target import Target
from heads.checkpoint import DRAFT_VOCAB, SECTION, HeadMeta, check_target, draft_dtype, save_folder
from heads.layouts import MEDUSA_FILES, MEDUSA_PREFIX, misfits, read_config, read_weights, weight_files
from heads.vocabulary import draft_product, most_frequent

# Medusa's published static tree mc_sim_7b_63, in its order of priority: child ranks from the root down
MC_SIM_7B_63 = (
    (0,), (0, 0), (1,), (0, 1), (2,), (0, 0, 0), (1, 0), (0, 2), (3,), (0, 3), (4,), (0, 4), (2, 0), (0, 5), (0, 0, 1), (5,),
    (0, 6), (6,), (0, 7), (0, 1, 0), (1, 1), (7,), (0, 8), (0, 0, 2), (3, 0), (0, 9), (8,), (9,), (1, 0, 0), (0, 2, 0), (1, 2),
    (0, 0, 3), (4, 0), (2, 1), (0, 0, 4), (0, 0, 5), (0, 0, 0, 0), (0, 1, 1), (0, 0, 6), (0, 3, 0), (5, 0), (1, 3), (0, 0, 7),
    (0, 0, 8), (0, 0, 9), (6, 0), (0, 4, 0), (1, 4), (7, 0), (0, 1, 2), (2, 0, 0), (3, 1), (2, 2), (8, 0), (0, 5, 0), (1, 5),
    (1, 0, 1), (0, 2, 1), (9, 0), (0, 6, 0), (0, 0, 0, 1), (1, 6), (0, 7, 0),
)  # fmt: skip


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b), W starting at zero."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)
        nn.init.zeros_(self.linear.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.silu(self.linear(x))


class MedusaHead(nn.Module):
    """Guesses of the tokens at +2, +3, ... from one feature. Tensor names are those of the released checkpoints."""

    def __init__(self, hidden: int, positions: int, layers: int, own_vocab: int | None = None) -> None:
        """
        Args:
            own_vocab: rows of an own lm_head per position; None = the target's is used.
        """
        super().__init__()
        self.hidden, self.positions, self.layers, self.own_vocab = hidden, positions, layers, own_vocab

        def blocks() -> list[nn.Module]:
            residual: list[nn.Module] = [ResidualBlock(hidden) for _ in range(layers)]  # distinct ones (KOALA)
            return [*residual, nn.Linear(hidden, own_vocab, bias=False)] if own_vocab else residual

        self.medusa_head = nn.ModuleList(nn.ModuleList(blocks()) for _ in range(positions))

    def forward(self, features: torch.Tensor) -> list[torch.Tensor]:
        """[rows, hidden] -> per position [rows, hidden], ready for an lm_head."""
        out = []
        for blocks in self.medusa_head:
            x = features
            for block in blocks[: self.layers]:
                x = block(x)
            out.append(x)
        return out

    def own_lm_head(self, position: int) -> torch.Tensor | None:
        """[vocab, hidden] of a position's own lm_head, or None where the target's is used."""
        return self.medusa_head[position][self.layers].weight if self.own_vocab else None


@dataclass
class StaticTree:
    """A static tree laid out for one pair of head and settings."""

    ranks: torch.Tensor  # [nodes] rank among siblings
    depths: torch.Tensor  # [nodes]
    parents: torch.Tensor  # [nodes], -1 = root

    @classmethod
    def build(cls, choices: Sequence[Sequence[int]], shape: TreeShape, device: torch.device) -> "StaticTree":
        """The first `nodes` choices that fit depth and width, in level order; a parent always comes before its children
        in the list of choices, so it is kept too."""
        fitting = [tuple(path) for path in choices if len(path) <= shape.depth and max(path) < shape.top_k]
        paths = sorted(fitting[: shape.nodes], key=lambda path: (len(path), path))
        number = {path: index for index, path in enumerate(paths)}
        return cls(
            torch.tensor([path[-1] for path in paths], device=device),
            torch.tensor([len(path) for path in paths], device=device),
            torch.tensor([number[path[:-1]] if len(path) > 1 else -1 for path in paths], device=device),
        )


@dataclass
class MedusaSession:
    """Medusa heads keep no state: each draft starts from the newest feature."""

    head: "MedusaDraftHead"
    tree: StaticTree
    width: int = field(init=False)

    def __post_init__(self) -> None:
        self.width = int(self.tree.ranks.max()) + 1

    @torch.inference_mode()
    def propose(self, features: torch.Tensor, token_ids: torch.Tensor) -> DraftTree:
        """Fill the static tree from the parallel heads (see decoding.head.DraftSession)."""
        head, tree = self.head, self.tree
        newest = head.module(features[-1:].to(head.dtype))
        if head.shared is None:
            logits = torch.cat([lm_head(x) for lm_head, x in zip(head.lm_heads, newest, strict=True)])  # [positions, vocab]
        else:
            logits = head.shared(torch.cat(newest))
        top = functional.log_softmax(logits, dim=-1, dtype=torch.float32).topk(self.width, dim=-1)
        logprobs = top.values[tree.depths - 1, tree.ranks]
        scores = logprobs.clone()
        for depth in range(2, int(head.module.positions) + 1):  # parents are done before their children
            level = tree.depths == depth
            scores[level] += scores[tree.parents[level]]
        ids = head.token_ids(top.indices[tree.depths - 1, tree.ranks])
        return DraftTree(ids, tree.parents, tree.depths, logprobs, scores)


class MedusaDraftHead:
    """A MedusaHead bound to its target (decoding.head.DraftHead)."""

    def __init__(
        self,
        name: str,
        module: MedusaHead,
        meta: HeadMeta,
        target: Target,
        draft_vocab: torch.Tensor | None = None,
        choices: Sequence[Sequence[int]] = MC_SIM_7B_63,
    ) -> None:
        vocab = target.vocab_size if draft_vocab is None else len(draft_vocab)
        # an own lm_head counts the tokens that it was made for: the target's, or those of the draft vocabulary
        made_for = target.vocab_size if module.own_vocab in (None, vocab) else module.own_vocab
        check_target(name, module.hidden, made_for, draft_vocab, target)
        self.name, self.meta, self.target = name, meta, target
        self.dtype = draft_dtype(next(module.parameters()).dtype, target)
        self.module = module.to(target.device, self.dtype).eval().requires_grad_(False)
        self.draft_vocab = None if draft_vocab is None else draft_vocab.to(target.device)
        self.choices = [path for path in choices if len(path) <= module.positions]
        own = [module.own_lm_head(position) for position in range(module.positions)]
        self.lm_heads = [Product(matrix) for matrix in own if matrix is not None]
        self.shared = None
        if not self.lm_heads:
            self.shared = draft_product(target, self.draft_vocab, self.dtype)
        deepest, widest = max(len(path) for path in self.choices), max(max(path) for path in self.choices) + 1
        self.tree = meta.tree or TreeShape(deepest, widest, min(len(self.choices), 63))
        self.info = HeadInfo(
            method=meta.method,
            layers=module.layers,
            parameters=sum(parameter.numel() for parameter in module.parameters()),
            draft_vocab_size=vocab,
            dtype=str(self.dtype).removeprefix("torch."),
            adversary=meta.adversary,
            tokens_seen=meta.tokens_seen,
        )

    def start(self, capacity: int, shape: TreeShape) -> MedusaSession:
        if shape.top_k > self.info.draft_vocab_size:
            raise UsageError(
                f"tree_top_k {shape.top_k} is more than the {self.info.draft_vocab_size} tokens that head {self.name} can propose"
            )
        return MedusaSession(self, StaticTree.build(self.choices, shape, self.target.device))

    def token_ids(self, indices: torch.Tensor) -> torch.Tensor:
        """Draft vocabulary indices -> target token ids."""
        return indices if self.draft_vocab is None else self.draft_vocab[indices]

    @classmethod
    def load(cls, folder: Path, target: Target, name: str | None = None, draft_vocab: int | None = None) -> "MedusaDraftHead":
        """Read a Medusa folder (v1: heads only; v2: heads inside the target's checkpoint; ours) and bind it.

        Args:
            draft_vocab: as FeatureDraftHead.load; not for heads with an lm_head of their own.
        """
        module, meta, own, choices = load_medusa_head(folder)
        if draft_vocab is not None and module.own_vocab:
            raise UsageError(f"head {name or folder.name} has lm_heads of its own: a draft vocabulary is for heads that use the target's")
        return cls(name or folder.name, module, meta, target, most_frequent(own, draft_vocab, target), choices)


def save_medusa_head(
    folder: Path,
    module: MedusaHead,
    meta: HeadMeta,
    choices: Sequence[Sequence[int]],
    vocab_size: int,
    draft_vocab: torch.Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Write a head folder, aside and then renamed. `choices` is its static tree, most useful node first."""
    config = {
        "model_type": "medusa",
        "medusa_num_heads": module.positions,
        "medusa_num_layers": module.layers,
        "hidden_size": module.hidden,
        "vocab_size": vocab_size,
    }
    save_folder(folder, module.state_dict(), config, meta, draft_vocab, dtype, choices=[list(path) for path in choices])


def load_medusa_head(folder: Path) -> tuple[MedusaHead, HeadMeta, torch.Tensor | None, Sequence[Sequence[int]]]:
    """Read a MedusaHead; the number of heads and layers is what the tensors say (released configs are often wrong).

    Raises:
        UsageError: missing, extra or misshapen tensors, by name.
    """
    config = read_config(folder)
    tensors = _medusa_tensors(folder)
    draft_vocab = tensors.pop(DRAFT_VOCAB, None)
    try:
        keys = [name.removeprefix(MEDUSA_PREFIX).split(".") for name in tensors]
        positions = 1 + max(int(key[0]) for key in keys)
        layers = 1 + max(int(key[1]) for key in keys if key[2] == "linear")
    except (ValueError, IndexError) as error:
        raise UsageError(
            f"{folder} has no Medusa heads that can be read: its tensors are {', '.join(sorted(tensors)[:4]) or 'none'}"
        ) from error
    first = tensors.get(f"{MEDUSA_PREFIX}0.0.linear.weight")
    own = tensors.get(f"{MEDUSA_PREFIX}0.{layers}.weight")
    if first is None or first.ndim != 2:
        raise UsageError(f"{folder} has no {MEDUSA_PREFIX}0.0.linear.weight")
    module = MedusaHead(first.shape[1], positions, layers, len(own) if own is not None else None)
    wrong = misfits(tensors, module.state_dict())
    if wrong:
        raise UsageError(f"the tensors of {folder} are not a Medusa head's: {'; '.join(wrong)}")
    module.to(first.dtype).load_state_dict(tensors)
    section = config.get(SECTION) or {}
    meta = HeadMeta.from_section({"method": "medusa", **section})
    return module, meta, draft_vocab, _checked(folder, section.get("choices") or MC_SIM_7B_63)


def _checked(folder: Path, choices: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = []
    for path in choices:
        path = tuple(path)
        if not path or not all(type(rank) is int and rank >= 0 for rank in path) or (len(path) > 1 and path[:-1] not in paths):
            raise UsageError(f"{folder} has a broken static tree: {list(path)} is no path below an earlier one")
        paths.append(path)
    return paths


def _medusa_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The heads' tensors only, under their v2 names."""
    alone = next((folder / name for name in MEDUSA_FILES if (folder / name).is_file()), None)
    if alone is not None:  # v1
        return {MEDUSA_PREFIX + name.removeprefix(MEDUSA_PREFIX): tensor for name, tensor in read_weights([alone]).items()}
    files = weight_files(folder)  # v2: a few heads inside a whole target
    return read_weights(files, MEDUSA_PREFIX) | read_weights(files, DRAFT_VOCAB)
