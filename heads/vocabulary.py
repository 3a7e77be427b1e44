"""A draft vocabulary for any head, trained with one or not (FR-Spec, arXiv 2502.14856): the most frequent tokens only."""

import torch
from torch import nn

from decoding.errors import UsageError
from decoding.lean import Product
from decoding.target import Target


def most_frequent(own: torch.Tensor | None, count: int | None, target: Target) -> torch.Tensor | None:
    """The `count` most frequent of the tokens that a head may propose, and the target's stop tokens.

    Byte-pair vocabularies are numbered by the order of their merges, the most frequent pair first, so the smallest ids
    are the most frequent tokens: no text has to be counted.

    Args:
        own: [tokens] ascending ids that the head was trained with; None = all of the target's.
        count: None = as many as it was trained with.

    Returns:
        [tokens] ascending ids, or None for all of the target's.

    Raises:
        UsageError: less than one token, or more than there are.
    """
    if count is None:
        return own
    have = torch.arange(target.vocab_size) if own is None else own.cpu()
    if not 1 <= count <= len(have):
        raise UsageError(f"draft vocabulary {count} is not between 1 and the {len(have)} tokens that the head can propose")
    stops = have[torch.isin(have, torch.tensor(sorted(target.stop_token_ids), dtype=have.dtype))]
    return torch.cat((stops, have[~torch.isin(have, stops)]))[:count].sort().values


def draft_product(target: Target, draft_vocab: torch.Tensor | None, dtype: torch.dtype) -> nn.Module | Product:
    """The target's `lm_head` for drafting: [rows, hidden] in `dtype` -> logits of the tokens that may be proposed."""
    if draft_vocab is None and dtype == target.dtype:
        return target.lm_product
    weight = target.lm_head.weight
    return Product((weight if draft_vocab is None else weight[draft_vocab]).to(dtype))
