"""Draft vocabularies: the tokens that a head may propose (FR-Spec, arXiv 2502.14856)."""

from collections import Counter
from collections.abc import Collection, Sequence

import torch

from heads.training.features import FeatureStore


def draft_vocabulary(
    store: FeatureStore, dialogues: Sequence[int], size: int, vocab_size: int, stops: Collection[int]
) -> tuple[torch.Tensor, dict[str, float]]:
    """The most frequent answer tokens of some dialogues, stop tokens always among them.

    Returns:
        [size] ascending target token ids, and what share of the answer tokens they cover, in all and by kind of text.
    """
    size = min(size, vocab_size)
    counts: dict[str, Counter[int]] = {}
    for index in dialogues:
        place = store.rows(index)
        counts.setdefault(store.kinds[index], Counter()).update(store.tokens[place][store.answer[place]].tolist())
    total = sum(counts.values(), Counter())
    ranked = [*stops, *(token for token, _ in total.most_common() if token not in stops)][:size]
    # where the text has fewer different tokens, the first ids fill up (byte-pair ids are in order of frequency)
    known = {*total, *stops}
    rest = (token for token in range(vocab_size) if token not in known)
    chosen = {*ranked, *(token for token, _ in zip(rest, range(size - len(ranked)), strict=False))}
    return torch.tensor(sorted(chosen)), coverage(counts, chosen)


def coverage(counts: dict[str, Counter[int]], chosen: Collection[int]) -> dict[str, float]:
    """Share of the counted tokens that are among the chosen ones, by kind and in all."""

    def share(found: Counter[int]) -> float:
        return round(sum(n for token, n in found.items() if token in chosen) / max(1, sum(found.values())), 4)

    return {**{kind: share(found) for kind, found in counts.items()}, "all": share(sum(counts.values(), Counter()))}
