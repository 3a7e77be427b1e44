"""What decoding asks of a draft head. Decoding imports no head; whatever fits these shapes can draft."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from decoding.records import HeadInfo, TreeShape


@dataclass
class DraftTree:
    """A proposed tree: nodes in the EAGLE-2 order (level by level, then rank of the parent, then rank among siblings).

    All tensors are [nodes] and on the target's device.
    """

    token_ids: torch.Tensor  # long
    parents: torch.Tensor  # long, index of the parent node, -1 = root; a parent comes before its children
    depths: torch.Tensor  # long, 1 = child of the root
    logprobs: torch.Tensor  # float32, of the token given its parent, at temperature 1
    scores: torch.Tensor  # float32, cumulative
    # computes, for the root and then each node [nodes + 1, hidden], the head's own estimate of the target's feature
    # there (NaN where it did not draft from that node); None where a head has no such thing (Medusa).
    # Called for the record, outside the timed phases.
    features: Callable[[], torch.Tensor] | None = None

    def __len__(self) -> int:
        return len(self.token_ids)

    def first(self, count: int) -> "DraftTree":
        """The first nodes only: level order keeps every parent."""
        per_node = (tensor[:count] for tensor in (self.token_ids, self.parents, self.depths, self.logprobs, self.scores))
        own = self.features
        return DraftTree(*per_node, None if own is None else lambda: own()[: count + 1])


class DraftSession(Protocol):
    """The draft state of one request."""

    def propose(self, features: torch.Tensor, token_ids: torch.Tensor) -> DraftTree:
        """Take what was committed since the last call, then propose a tree below the newest token.

        Args:
            features: [new, hidden] true target features of the newly committed positions, in order (the whole prompt
                first, then root + accepted nodes of each step).
            token_ids: [new] the token that follows each of those positions; the last one is the root.
        """


class DraftHead(Protocol):
    """A loaded head, bound to its target."""

    name: str
    info: HeadInfo
    tree: TreeShape  # tuned defaults

    def start(self, capacity: int, shape: TreeShape) -> DraftSession:
        """State for a request whose context never grows beyond `capacity` committed tokens.

        Raises:
            UsageError: the head can't draft such a tree.
        """

    def draft_logits(self, features: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] draft features -> [rows, vocab] logits over the target's vocabulary (-inf where the head's
        draft vocabulary has no such token)."""
