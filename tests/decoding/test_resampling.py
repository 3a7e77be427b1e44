"""Ratios and their intervals, on amounts made by hand."""

import random

import pytest

from decoding.resampling import interval, ratio


def test_a_ratio_is_one_of_sums_and_not_a_mean_of_ratios() -> None:
    # (10 + 30) / (5 + 5) = 4 against (10 + 10) / (10 + 10) = 1; the mean of 2 and 6 would be 4 too, of weights 1 and 9 not
    assert ratio([(10, 5), (30, 5)], [(10, 10), (10, 10)])["ratio"] == 4
    assert ratio([(10, 10), (90, 30)], [(20, 10), (10, 10)])["ratio"] == pytest.approx((100 / 40) / (30 / 20))


def test_a_difference_on_every_prompt_is_told_however_much_the_prompts_differ() -> None:
    base = [(10.0 * size, 10.0) for size in range(1, 20)]
    found = ratio([(1.1 * amount, units) for amount, units in base], base)  # paired: the spread between prompts falls out
    assert found["differs"] and found["low"] == pytest.approx(1.1) == found["high"]
    assert interval(found) == "1.10 [1.10-1.10]"


def test_noise_is_no_difference() -> None:
    draw = random.Random(1)
    one, other = ([(draw.gauss(100, 20), 40.0) for _ in range(24)] for _ in range(2))
    found = ratio(one, other)
    assert found["low"] < 1 < found["high"] and not found["differs"] and interval(found).endswith("] ~")


def test_the_interval_is_as_wide_as_the_mean_is_uncertain() -> None:
    draw = random.Random(2)
    shares = [draw.gauss(1.5, 0.3) for _ in range(100)]
    found = ratio([(share, 1.0) for share in shares], [(1.0, 1.0)] * 100)
    assert (found["high"] - found["low"]) / 2 == pytest.approx(1.96 * 0.3 / 10, rel=0.25)


def test_one_prompt_tells_no_difference() -> None:
    assert ratio([(3, 1)], [(1, 1)]) == {"ratio": 3, "low": 3, "high": 3, "differs": False}
