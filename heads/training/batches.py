"""Training batches: pairs (feature i, token i + 1) of some dialogues, and what the supervised ones should give."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from decoding.target import Target
from heads.training.features import FeatureStore, target_features
from heads.training.losses import Teacher

# sizes are rounded up: for every new one, a CPU's matrix library makes (and keeps) kernels, to gigabytes in half an hour
PAIRS, ROWS = 32, 128


@dataclass
class Batch:
    """Padded pairs, and the supervised ones among them (rows, padded too: `valid` is 0 there).

    Pair i predicts feature i + 1, and with it token i + 2: it is supervised where the assistant wrote that token.
    """

    embeddings: torch.Tensor  # [batch, pairs, hidden] of token i + 1
    features: torch.Tensor  # [batch, pairs, hidden]
    rows: torch.Tensor  # [rows] where they stand in [batch * pairs]
    place: torch.Tensor  # [rows] their i
    valid: torch.Tensor  # [rows] 1.0 or 0.0
    wanted: torch.Tensor  # [rows, hidden] feature i + 1
    following: torch.Tensor  # [rows] token i + 2, as an index into the vocabulary in use; -1 = not in it
    teacher: Teacher

    @property
    def counted(self) -> torch.Tensor:
        """[rows] 1.0 where the text goes on with a token that the head may propose."""
        return (self.following >= 0) * self.valid

    def supervised(self, pairs: torch.Tensor) -> torch.Tensor:
        """[batch, pairs, ...] -> [rows, ...]."""
        return pairs.flatten(0, 1)[self.rows]


class BatchLoader:
    """Makes batches of one text for one target and draft vocabulary."""

    def __init__(
        self, target: Target, store: FeatureStore, draft_vocab: torch.Tensor | None, top_k: int = 10, hard_labels: bool = False
    ) -> None:
        self.target, self.store, self.top_k, self.hard_labels = target, store, top_k, hard_labels
        weight = target.lm_head.weight
        self.lm_head = (weight if draft_vocab is None else weight[draft_vocab.to(weight.device)]).contiguous()
        self.dtype = torch.bfloat16 if target.dtype == torch.bfloat16 else torch.float32
        vocab = torch.arange(target.vocab_size) if draft_vocab is None else draft_vocab
        self.index = torch.full((target.vocab_size,), -1).index_copy_(0, vocab, torch.arange(len(vocab)))

    def load(self, dialogues: Sequence[int]) -> Batch:
        """The pairs of some dialogues, padded to the longest."""
        store, device = self.store, self.target.device
        pairs = _up(max(store.length(i) for i in dialogues) - 1, PAIRS)
        ids = torch.zeros(len(dialogues), pairs + 1, dtype=torch.long)
        answer = torch.zeros(len(dialogues), pairs + 2, dtype=torch.bool)
        features = torch.zeros(len(dialogues), pairs + 1, self.target.hidden_size, dtype=self.dtype, device=device)
        found = target_features(self.target, store, dialogues) if store.features is None else None
        for row, index in enumerate(dialogues):
            place, length = store.rows(index), store.length(index)
            ids[row, :length] = torch.from_numpy(store.tokens[place].astype(np.int64))
            answer[row, :length] = torch.from_numpy(store.answer[place])
            if found is not None:
                features[row, :length] = found[row]
            else:
                features[row, :length] = torch.from_numpy(np.array(store.features[place])).view(torch.bfloat16).to(device)
        rows = answer[:, 2:].flatten().nonzero()[:, 0]
        missing = _up(max(1, len(rows)), ROWS) - len(rows)
        valid = functional.pad(torch.ones(len(rows)), (0, missing)).to(device)
        rows = functional.pad(rows, (0, missing))
        place = rows % pairs
        following = self.index[ids[rows // pairs, (place + 2).clamp(max=pairs)]].to(device)
        following = torch.where(valid > 0, following, -1)
        rows, place = rows.to(device), place.to(device)
        table = self.target.embedding
        embeddings = table(ids[:, 1:].to(table.weight.device)).to(device, self.dtype)
        wanted = features[:, 1:].flatten(0, 1)[rows]
        if self.hard_labels:
            teacher = Teacher.of_text(following.clamp(min=0), len(self.lm_head), self.lm_head.dtype, self.top_k)
        else:
            teacher = Teacher.of(wanted, self.lm_head, self.top_k)
        return Batch(embeddings, features[:, :-1], rows, place, valid, wanted, following, teacher)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
