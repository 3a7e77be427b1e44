"""Ratios of two methods on the same prompts, with a 95 % interval from resampling the prompts (bootstrap)."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

RESAMPLES = 2000
UNTOLD = " ~"
NOTE = "~ = the interval holds 1: no difference was measured"
Amounts = Sequence[tuple[float, float]]  # by prompt: an amount, and what it is counted against (tokens and ms; tokens and steps)


def ratio(mine: Amounts, base: Amounts) -> dict[str, Any]:
    """How many times the rate of `base` (sum of its amounts over the sum of what they are counted against) mine is.

    Args:
        mine, base: of the same prompts in the same order.

    Returns:
        ratio, low, high (95 %; every resample draws the same prompts for both) and differs: whether the interval leaves out 1.
        One prompt has no spread: its interval is its ratio, and no difference is told.
    """
    prompts = [(*own, *other) for own, other in zip(mine, base, strict=True)]
    draw = random.Random(0)

    def over(chosen: list[tuple[float, ...]]) -> float:
        own, own_units, other, other_units = (sum(column) for column in zip(*chosen, strict=True))
        return (own / max(own_units, 1e-9)) / max(other / max(other_units, 1e-9), 1e-9)

    spread = sorted(over(draw.choices(prompts, k=len(prompts))) for _ in range(RESAMPLES))
    low, high = spread[int(0.025 * RESAMPLES)], spread[int(0.975 * RESAMPLES)]
    return {"ratio": over(prompts), "low": low, "high": high, "differs": len(prompts) > 1 and not low <= 1 <= high}


def interval(found: Mapping[str, Any]) -> str:
    """As tables show it, with `UNTOLD` where no difference was measured."""
    return f"{found['ratio']:.2f} [{found['low']:.2f}-{found['high']:.2f}]" + ("" if found["differs"] else UNTOLD)
