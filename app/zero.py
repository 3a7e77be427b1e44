"""ZeroGPU Spaces: a run is carried out in a process that the package `spaces` forks and lends a GPU for some seconds.

Weights are loaded before the page opens (`spaces` moves them along with the fork). What goes in and comes out is plain
data: a Request, and what changed in the lanes. Elsewhere `comparisons` gives the ordinary Comparison.
"""

import contextvars
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr

from app.comparison import Comparison, Lane, Request
from app.device import UPDATE_SECONDS
from app.models import Models
from app.operator import Operator
from app.view import LaneView, Tally, used_ids
from decoding.metrics import Metrics
from decoding.records import Run, Step
from decoding.space import on_zero_gpu

ZERO_GPU = on_zero_gpu()
# seconds: starting the process and moving the weights; warming a lane up; a token of plain decoding on such a GPU, generously
BEGIN, WARM_UP, TOKEN = 8.0, 1.5, 0.04
LONGEST = 110  # a visitor without an account has two minutes a day, and a call that declares more than what is left is refused

# what `spaces` calls a refusal -> what the visitor is told
REFUSALS = {
    "ZeroGPU quota exceeded": "Your share of this Space's GPU time is used up for now",
    "ZeroGPU pending credits exceeded": "Your share of this Space's GPU time is taken by runs that are still going on",
    "ZeroGPU illegal duration": "This run is longer than this Space's GPU may be borrowed: ask for fewer tokens or methods",
    "ZeroGPU queue timeout": "No GPU was free for a minute: try again later",
    "ZeroGPU worker error": "The GPU was taken away before the run had ended: ask for fewer tokens or methods",
}
INSTEAD = "The recorded runs need no GPU: open one under Runs, below."


def seconds(request: Request, flag: str = "") -> int:
    """How long a GPU is borrowed for a request: as short as is safe, since it counts against the visitor's quota."""
    lanes = len(set(request.methods))
    return min(LONGEST, round(BEGIN + lanes * (WARM_UP + TOKEN * request.settings.max_new_tokens)))


def visitor_words(error: gr.Error) -> str:
    """A refusal of `spaces` as a visitor understands it, its own figures behind."""
    told = REFUSALS.get(getattr(error, "title", ""), "This Space could not get a GPU")
    return f"{told} ({str(error.message).strip().rstrip('.')}). {INSTEAD}"


@dataclass
class Change:
    """What happened to a lane since the last time, as it crosses from one process to the other."""

    view: LaneView
    tally: Tally
    output_ids: list[int]
    steps: list[Step]
    texts: dict[int, str]
    run: Run | None  # once, when the lane has ended


@dataclass
class Changes:
    """What happened to a request since the last time."""

    note: str
    failed: bool
    where: str
    plain: Metrics | None
    lanes: list[Change]


class Flag:
    """Stands for Comparison.stopped in the other process: a file that appears, or the borrowed time that is over."""

    def __init__(self, path: str, deadline: float) -> None:
        self.path, self.deadline = path, deadline

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline

    def is_set(self) -> bool:
        return self.late or os.path.exists(self.path)


def changes(models: Models, operator: Operator, request: Request, flag: str) -> Iterator[Changes]:
    """Run a request and tell what changes. This is what `spaces` runs in its process."""
    comparison = Comparison(models, request, operator)
    stopped = Flag(flag, time.monotonic() + seconds(request) - BEGIN / 2)
    comparison.stopped = stopped  # type: ignore[assignment]
    told = [0] * len(comparison.lanes)
    ended: set[str] = set()

    def change(index: int, lane: Lane) -> Change:
        new, told[index] = lane.fresh[told[index] :], len(lane.fresh)
        text = lane.generation.token_text if lane.generation else str
        run = None if lane.key in ended else lane.run
        if run is not None:
            ended.add(lane.key)
        texts = {token_id: text(token_id) for token_id in used_ids(new)} if lane.generation else {}
        return Change(lane.view, lane.tally, lane.output_ids, new, texts, run)

    def now() -> Changes:
        lanes = [change(index, lane) for index, lane in enumerate(comparison.lanes)]
        return Changes(comparison.note, comparison.failed, comparison.where, comparison.plain, lanes)

    shown = 0.0
    for at_once in comparison.work():
        if at_once or time.monotonic() - shown >= UPDATE_SECONDS:
            yield now()
            shown = time.monotonic()
    if stopped.late and not comparison.failed:
        comparison.note = f"The GPU was borrowed for {seconds(request)} s, and they are over: the run was cut short."
    yield now()


@dataclass
class _Texts:
    """Token texts that came over, in the place of the Generation that stayed in the other process."""

    known: dict[int, str] = field(default_factory=dict)

    def token_text(self, token_id: int) -> str:
        return self.known.get(token_id, "")


class BorrowedComparison(Comparison):
    """A Comparison whose lanes run in another process: its state follows what that one tells."""

    def __init__(self, borrowed: Callable[[Request, str], Iterator[Changes]], models: Models, operator: Operator, request: Request) -> None:
        super().__init__(models, request, operator)
        self._borrowed = borrowed
        self._context = contextvars.copy_context()  # of the visitor: `spaces` reads whose quota it is from it

    def work(self) -> Iterator[bool]:
        with tempfile.TemporaryDirectory(prefix="draftscope-stop-") as folder:
            flag = Path(folder) / "stop"
            try:
                asked = self._context.run(self._borrowed, self.request, str(flag))
                while (told := self._context.run(next, asked, None)) is not None:
                    self._take(told)
                    if self.stopped.is_set():
                        flag.touch()
                    yield True
            except gr.Error as error:
                self._fail(visitor_words(error))

    def _take(self, told: Changes) -> None:
        self.note, self.failed, self.where, self.plain = told.note, told.failed, told.where, told.plain
        for lane, change in zip(self.lanes, told.lanes, strict=True):
            lane.view, lane.tally, lane.output_ids = change.view, change.tally, change.output_ids
            lane.fresh += change.steps
            if lane.generation is None:
                lane.generation = _Texts()  # type: ignore[assignment]
            lane.generation.known |= change.texts  # type: ignore[union-attr]
            lane.run = change.run or lane.run


def comparisons(models: Models, operator: Operator, gpu: Callable[..., Any] | None = None) -> Callable[[Request], Comparison]:
    """How a request becomes a Comparison on this server.

    Args:
        operator: the limits that hold for every request.
        gpu: `spaces.GPU` on ZeroGPU, else None.
    """
    if gpu is None:
        return partial(Comparison, models, operator=operator)

    def borrowed(request: Request, flag: str) -> Iterator[Changes]:
        yield from changes(models, operator, request, flag)

    return partial(BorrowedComparison, gpu(duration=seconds)(borrowed), models, operator)
