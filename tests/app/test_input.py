"""Bad input and many targets, a short version of `python -m tests.fuzz` and `python -m tests.stress_lossless`."""

from tests.fuzz import Cases
from tests.stress_lossless import stress


def test_whatever_comes_in_is_taken_or_refused_in_one_line() -> None:
    counts = Cases(scale=0.03).all()
    assert sum(counts.values()) > 600
    for what in ("prompts", "addresses", "settings of the API", "records, a field changed"):
        assert counts[f"{what}: refused"] and counts[f"{what}: taken"]


def test_random_targets_heads_and_trees_are_lossless() -> None:
    counts, failures, _ = stress(30, seed=12345, sampling_every=1000)
    assert not failures
    assert counts["accepted"] > 50 and counts["context limit"]
