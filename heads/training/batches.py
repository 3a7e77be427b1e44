"""Training batches: pairs (feature i, token i + 1) of some dialogues, and what the supervised ones should give."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from decoding.target import Target
from heads.training.features import FeatureStore, target_features
from heads.training.losses import Teacher


@dataclass
class Batch:
    """Padded pairs; `rows` marks the supervised ones, whose answers follow in the same order.

    Pair i predicts feature i + 1, and with it token i + 2: it is supervised where the assistant wrote that token.
    """

    embeddings: torch.Tensor  # [batch, pairs, hidden] of token i + 1
    features: torch.Tensor  # [batch, pairs, hidden]
    rows: torch.Tensor  # [batch, pairs] bool
    place: torch.Tensor  # [rows] their i
    wanted: torch.Tensor  # [rows, hidden] feature i + 1
    following: torch.Tensor  # [rows] token i + 2, as an index into the vocabulary in use; -1 = not in it
    teacher: Teacher

    @property
    def counted(self) -> torch.Tensor:
        """[rows] 1.0 where the text goes on with a token that the head may propose."""
        return (self.following >= 0).float()


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
        size = max(store.length(i) for i in dialogues)
        ids = torch.zeros(len(dialogues), size, dtype=torch.long)
        answer = torch.zeros(len(dialogues), size, dtype=torch.bool)
        features = torch.zeros(len(dialogues), size, self.target.hidden_size, dtype=self.dtype, device=device)
        found = target_features(self.target, store, dialogues) if store.features is None else None
        for row, index in enumerate(dialogues):
            place, length = store.rows(index), store.length(index)
            ids[row, :length] = torch.from_numpy(store.tokens[place].astype(np.int64))
            answer[row, :length] = torch.from_numpy(store.answer[place])
            if found is not None:
                features[row, :length] = found[row]
            else:
                features[row, :length] = torch.from_numpy(np.array(store.features[place])).view(torch.bfloat16).to(device)
        rows = torch.zeros(len(dialogues), size - 1, dtype=torch.bool)
        rows[:, : size - 2] = answer[:, 2:]
        following = self.index[ids[:, 2:][rows[:, : size - 2]]].to(device)
        table = self.target.embedding
        embeddings = table(ids[:, 1:].to(table.weight.device)).to(device, self.dtype)
        rows = rows.to(device)
        wanted = features[:, 1:][rows]
        if self.hard_labels:
            teacher = Teacher.of_text(following.clamp(min=0), len(self.lm_head), self.lm_head.dtype, self.top_k)
        else:
            teacher = Teacher.of(wanted, self.lm_head, self.top_k)
        return Batch(embeddings, features[:, :-1], rows, rows.nonzero()[:, 1], wanted, following, teacher)
