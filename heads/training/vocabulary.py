"""Draft vocabularies: the tokens that a head may propose (FR-Spec, arXiv 2502.14856)."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch

from heads.training.features import FeatureStore


def answer_counts(store: FeatureStore, dialogues: Sequence[int]) -> dict[str, Counter[int]]:
    """How often the assistant wrote each token in some dialogues, by kind of text."""
    counts: dict[str, Counter[int]] = {}
    for index in dialogues:
        place = store.rows(index)
        counts.setdefault(store.kinds[index], Counter()).update(store.tokens[place][store.answer[place]].tolist())
    return counts


def draft_vocabulary(counts: Mapping[str, Counter[int]], size: int, vocab_size: int, stops: Collection[int]) -> torch.Tensor:
    """The most frequent of the counted tokens, stop tokens always among them: [size] ascending target token ids."""
    size = min(size, vocab_size)
    total = sum(counts.values(), Counter())
    ranked = [*stops, *(token for token, _ in total.most_common() if token not in stops)][:size]
    # where the text has fewer different tokens, the first ids fill up (byte-pair ids are in order of frequency)
    known = {*total, *stops}
    rest = (token for token in range(vocab_size) if token not in known)
    chosen = {*ranked, *(token for token, _ in zip(rest, range(size - len(ranked)), strict=False))}
    return torch.tensor(sorted(chosen))


def coverage(counts: Mapping[str, Counter[int]], chosen: Collection[int]) -> dict[str, float]:
    """Share of the counted tokens that are among the chosen ones, by kind and in all."""

    def share(found: Counter[int]) -> float:
        return round(sum(n for token, n in found.items() if token in chosen) / max(1, sum(found.values())), 4)

    return {**{kind: share(found) for kind, found in counts.items()}, "all": share(sum(counts.values(), Counter()))}
