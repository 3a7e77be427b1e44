"""What the field measures, derived from Run records: counted once in the steps, everything else computed here."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from decoding.records import Run, Step

PHASES = ("draft", "verify", "accept", "commit", "record")


@dataclass(frozen=True)
class Metrics:
    """Figures of one run, or of several runs taken together (totals first, ratios after)."""

    steps: int
    tokens: int  # emitted by steps: the first token, which the prefill gives, is not counted
    drafted: int
    accepted: int
    decode_ms: float
    prefill_ms: float
    phase_ms: dict[str, float]
    accepted_lengths: tuple[int, ...]  # accepted nodes of each step that drafted
    reachable: tuple[int, ...]  # deepest drafted level of each of those steps

    @property
    def mean_acceptance_length(self) -> float | None:
        """tau: tokens per step, bonus included; 1.0 = plain decoding. Counts what was accepted, also where the cut at
        stop or length emitted less."""
        return None if not self.steps else 1 + self.accepted / self.steps

    @property
    def draft_acceptance_rate(self) -> float | None:
        """Accepted / drafted nodes ("tree use": small by construction, one path of many nodes)."""
        return None if not self.drafted else self.accepted / self.drafted

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of the steps over the time of the steps (prefill and first token apart)."""
        return None if not self.decode_ms else 1000 * self.tokens / self.decode_ms

    @property
    def ms_per_token(self) -> float | None:
        return None if not self.tokens else self.decode_ms / self.tokens

    @property
    def phase_ms_per_token(self) -> dict[str, float]:
        return {name: value / self.tokens for name, value in self.phase_ms.items()} if self.tokens else {}

    @property
    def acceptance_histogram(self) -> dict[int, int]:
        """{accepted nodes: steps}, bonus excluded."""
        return dict(sorted(Counter(self.accepted_lengths).items()))

    @property
    def acceptance_by_depth(self) -> list[float]:
        """For depth 1, 2, ...: share of all drafting steps whose node at that depth was accepted."""
        steps = len(self.accepted_lengths)
        return [sum(length >= depth for length in self.accepted_lengths) / steps for depth in self._depths()]

    @property
    def conditional_acceptance(self) -> list[float | None]:
        """n-alpha: the same, given that depth n-1 was accepted and the tree went that deep; None where never tried."""
        out = []
        for depth in self._depths():
            tried = sum(length >= depth - 1 and reach >= depth for length, reach in zip(self.accepted_lengths, self.reachable, strict=True))
            out.append(sum(length >= depth for length in self.accepted_lengths) / tried if tried else None)
        return out

    def _depths(self) -> range:
        return range(1, max(self.reachable, default=0) + 1)


def measure(runs: Run | Sequence[Run]) -> Metrics:
    """Figures of a run, or of several runs added up."""
    runs = [runs] if isinstance(runs, Run) else list(runs)
    steps: list[Step] = [step for run in runs for step in run.steps]
    drafting = [step for step in steps if step.node_ids]
    return Metrics(
        steps=len(steps),
        tokens=sum(len(step.token_ids) for step in steps),
        drafted=sum(len(step.node_ids) for step in steps),
        accepted=sum(len(step.accepted) for step in steps),
        decode_ms=sum(run.steps[-1].end_ms - run.prefill_ms for run in runs if run.steps),
        prefill_ms=sum(run.prefill_ms for run in runs),
        phase_ms={name: sum(getattr(step, f"{name}_ms") for step in steps) for name in PHASES},
        accepted_lengths=tuple(len(step.accepted) for step in drafting),
        reachable=tuple(max(step.depths) for step in drafting),
    )


def speed_up(run: Metrics, plain: Metrics) -> float | None:
    """Tokens per second over those of measured plain decoding (same prompts, process and settings: the caller's duty)."""
    if not run.tokens_per_second or not plain.tokens_per_second:
        return None
    return run.tokens_per_second / plain.tokens_per_second


@dataclass(frozen=True)
class Lossless:
    """A run against plain decoding of the same prompt."""

    equal: bool
    compared: int  # tokens that both have
    index: int | None = None  # of the first differing token
    plain_id: int | None = None  # both None where one of the two ended there
    run_id: int | None = None
    margin: float | None = None  # plain decoding's best minus second-best logit there; near zero = rounding decided

    @property
    def near_tie(self) -> bool:
        """The two best logits are so close that the rounding of a half-precision forward can swap them."""
        return self.margin is not None and self.margin < 0.25


def lossless(run: Run, plain: Run) -> Lossless:
    """Equal token for token, or the first divergence with both tokens and the gap between plain's two best logits.

    A run that did not come to its end (cancelled, error) is compared as far as it came.
    """
    for index, (mine, theirs) in enumerate(zip(run.output_ids, plain.output_ids, strict=False)):
        if mine != theirs:
            margins = [None] + [margin for step in plain.steps for margin in (step.margins or [None])]
            return Lossless(False, index, index, theirs, mine, margins[index] if index < len(margins) else None)
    shorter, longer = sorted((run, plain), key=lambda one: len(one.output_ids))
    end = len(shorter.output_ids)
    if len(longer.output_ids) == end or shorter.finish_reason in ("cancelled", "error"):
        return Lossless(True, end)
    return Lossless(False, end, end)
