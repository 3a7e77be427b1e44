"""Running the lanes of one request, one after the other on the device, and telling what happens as it happens."""

import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, TypeVar

from app.log import event, told
from app.models import Models
from app.operator import Operator
from app.view import (
    Figures,
    LaneView,
    Message,
    State,
    Tally,
    empty_lane,
    head_facts,
    lane_of,
    settings_line,
    step_view,
    used_ids,
    where_line,
)
from decoding.errors import Stopped, UsageError
from decoding.metrics import Metrics, measure
from decoding.prompts import check_text
from decoding.records import AUTOREGRESSIVE, Run, Settings, Step
from decoding.written import drop_oldest

if TYPE_CHECKING:
    from decoding import Generation
    from decoding.hub import Progress

LOOK_SECONDS = 0.2  # between two looks at what is being loaded
T = TypeVar("T")
REPEATED_UPDATES = 3  # a slice reaches this many updates back: an update that the browser merged into the next is not missed


@dataclass(frozen=True)
class Request:
    """What a person asked for.

    Raises:
        UsageError: a value of another kind (the API checks none), or no prompt.
    """

    prompt: str
    methods: Sequence[str]
    target: str
    settings: Settings
    session: str

    def __post_init__(self) -> None:
        if not isinstance(self.methods, (list, tuple)):
            raise UsageError(f"methods is {self.methods!r:.60}: a list of names was expected")
        for name, value in (("prompt", self.prompt), ("target", self.target), *(("method", one) for one in self.methods)):
            if not isinstance(value, str):
                raise UsageError(f"the {name} is {value!r:.60}: text was expected")
            check_text(name, value)
        if not self.prompt.strip():
            raise UsageError("the prompt is empty: type something for the target to answer, or pick an example")

    def ordered(self) -> tuple[str, ...]:
        """Plain decoding first, so that every speed-up is measured when its lane runs."""
        unique = dict.fromkeys(self.methods)
        return tuple(sorted(unique, key=lambda name: name != AUTOREGRESSIVE))


@dataclass
class Lane:
    """One lane while it runs."""

    key: str
    source: str
    view: LaneView
    tally: Tally = field(default_factory=Tally)
    sent: list[int] = field(default_factory=list)  # steps that each update so far went up to
    fresh: list[Step] = field(default_factory=list)  # steps that a later update still repeats
    generation: "Generation | None" = None
    run: Run | None = None
    told: bool = False  # its end has been told in full
    output_ids: list[int] = field(default_factory=list)


class Comparison:
    """The lanes of one request. `work` runs them on the device's thread; `message` is the state of everything for the
    page, taken between two steps, so that no work of the page falls into a timed phase. `runs` are the records, finished
    or cut short."""

    def __init__(self, models: Models, request: Request, operator: Operator | None = None) -> None:
        """
        Raises:
            UsageError: what the server does not offer, or its operator does not allow.
        """
        self.models, self.request, self.operator = models, request, operator or Operator()
        self.operator.check(request.prompt, request.methods, request.settings)
        models.check(request.target, request.methods)
        self.stopped = threading.Event()
        labels = {offer.source: offer for offer in models.offers(request.target)}
        self.lanes = []
        sampled = request.settings.temperature > 0
        for index, source in enumerate(request.ordered()):
            offer = labels.get(source)
            key = f"{index}:{source}"
            head = None if source == AUTOREGRESSIVE else source
            self.lanes.append(Lane(key, source, empty_lane(key, offer.method if offer else "other", head, "waiting", sampled)))
        self.note, self.failed, self.running, self.where = "", False, True, ""
        self.plain: Metrics | None = None
        self._loads = False
        self.begun = 0.0  # monotonic seconds

    @property
    def runs(self) -> list[Run]:
        return [lane.run for lane in self.lanes if lane.run is not None]

    def work(self) -> Iterator[bool]:
        """Run the lanes; control comes back after each step (True: after each change of a lane's state)."""
        self.begun = time.monotonic()
        try:
            yield from self._prepare()
            for lane in self.lanes:
                if self.stopped.is_set():
                    break
                yield from self._run_lane(lane)
        except Stopped:
            self.note = "Stopped while it was loading."
        except Exception as error:  # the last net: whatever broke is said on the page, and the page stays usable
            self._fail(told(error))

    def finish(self) -> None:
        """The request is over, however it ended. Lanes that had no turn are stopped, or failed with it."""
        self.running = False
        for lane in self.lanes:
            if lane.view["state"] in ("waiting", "loading", "running"):
                lane.view["state"] = "failed" if self.failed else "stopped"

    def _fail(self, note: str) -> None:
        self.note, self.failed = note, True

    def _prepare(self) -> Iterator[bool]:
        """Load what is missing, refuse what can't work before any lane runs."""
        request = self.request
        self._loads = not self.models.ready(request.target, request.methods)
        if self._loads:
            self._set_all("loading")
            yield True
        if not self.models.ready(request.target):
            yield from self._loaded(lambda tell: self.models.fetch(request.target, tell), apart=True)
        target = yield from self._loaded(lambda tell: self.models.target(request.target, tell))
        from decoding.engine import environment  # torch: imported when it is needed, not before the first view

        for lane in self.lanes:
            head = yield from self._loaded(lambda tell, name=lane.source: self.models.head(name, target, tell))
            settings = request.settings.resolved(head.tree if head else None)
            self.operator.check_settings(settings)
            if head is not None:
                lane.view.update(empty_lane(lane.key, head.info.method, head.name, "loading", lane.view["sampled"]))
                lane.view["facts"] = head_facts(head.info, settings.tree)
        self.where = where_line(target.name, environment(target))
        self._set_all("waiting")
        yield True

    def _loaded(self, load: Callable[["Progress"], T], apart: bool = False) -> Generator[bool, None, T]:
        """What `load` gives; while it fetches and reads, the note says how far it is. Stopping ends it the next time it tells
        something; where it works apart from everything else, at once (a slow network may be silent for minutes)."""
        if not self._loads:
            return load(lambda text, share: None)
        news: SimpleQueue[str] = SimpleQueue()
        loading: Future[T] = Future()

        def tell(text: str, share: float | None) -> None:
            if self.stopped.is_set():
                raise Stopped
            news.put(text)

        def beside() -> None:
            try:
                loading.set_result(load(tell))
            except BaseException as error:  # raised again where the result is taken
                loading.set_exception(error)

        threading.Thread(target=beside, name="load", daemon=True).start()
        while not loading.done():
            with suppress(Empty):
                self.note = news.get(timeout=LOOK_SECONDS)
                yield True
            if apart and self.stopped.is_set():
                raise Stopped
        self.note = ""
        return loading.result()

    def _run_lane(self, lane: Lane) -> Iterator[bool]:
        from decoding import Generation  # torch: imported when it is needed, not before the first view

        target = self.models.target(self.request.target)
        head = self.models.head(lane.source, target)
        lane.view["state"] = "loading"
        yield True
        self.models.warm_up(lane.source, target, head)
        generation = lane.generation = Generation(
            target, head, self.request.prompt, self.request.settings, cancelled=self.stopped.is_set, drift=True
        )
        lane.view["state"] = "running"
        lane.view["tree"] = list(generation.settings.tree) if head else None
        try:
            for step in generation:
                if not lane.tally.steps:
                    lane.tally.prefill_ms = generation.prefill_ms
                    lane.view["first"], lane.view["prefill"] = step.root_id, round(generation.prefill_ms, 3)
                    lane.output_ids.append(step.root_id)
                lane.tally.add(step)
                lane.output_ids += step.token_ids
                lane.fresh.append(step)
                if time.monotonic() - self.begun > self.operator.max_run_seconds:
                    self.note = f"Stopped: this server lets a request run for {self.operator.max_run_seconds:g} s at most."
                    self.stopped.set()
                yield False
        except Exception as error:  # a lane that breaks leaves the others to go on
            generation.finish_reason, generation.error = "error", told(error)
        self._end(lane, generation)
        yield True

    def _end(self, lane: Lane, generation: "Generation") -> None:
        """The lane is over: its record, its figures, its line in the log."""
        lane.run, lane.generation = generation.run, None
        lane.output_ids = lane.run.output_ids
        if lane.run.head is None:
            self.plain = measure(lane.run)
        plain = next((other.run for other in self.lanes if other.run is not None and other.run.head is None), None)
        lane.view = lane_of(lane.run, lane.key, plain)
        self._keep(lane.run)

    def _keep(self, run: Run) -> None:
        """One line in the log; the record in a folder where the operator wants it."""
        log_run(self.request, run, self.operator.log_prompts)
        if self.operator.save_runs is not None:
            name = f"{run.created.replace(':', '')}-{self.request.session}-{run.method}.json"
            try:
                run.save(self.operator.save_runs / name)
                drop_oldest(self.operator.save_runs, self.operator.max_saved_mb * 1_000_000)
            except OSError as error:
                self.note = f"The record could not be kept on the server: {told(error)}"

    def _set_all(self, state: State) -> None:
        for lane in self.lanes:
            lane.view["state"] = state

    def figures(self, lane: Lane) -> Figures:
        """The lane's numbers so far."""
        return lane.view["figures"] if lane.run is not None else lane.tally.figures(self.plain)

    def _slice(self, lane: Lane) -> LaneView:
        """The lane's newest steps, the last few updates' ones once more."""
        done = lane.tally.steps
        if lane.run is not None:
            if not lane.told:
                lane.told = True
                return lane.view
            return {**lane.view, "at": done, "steps": [], "texts": {}}
        start = lane.sent[-REPEATED_UPDATES] if len(lane.sent) >= REPEATED_UPDATES else 0
        lane.fresh = lane.fresh[len(lane.fresh) - (done - start) :] if done > start else []
        lane.sent.append(done)
        text = lane.generation.token_text if lane.generation else str
        return {
            **lane.view,
            "figures": self.figures(lane),
            "at": start,
            "steps": [step_view(step) for step in lane.fresh],
            "texts": {token_id: text(token_id) for token_id in used_ids(lane.fresh)},
        }

    def message(self) -> Message:
        """The state of everything: of a lane that runs its newest steps only, at the end all steps of all lanes."""
        request = self.request
        return {
            "session": request.session,
            "kind": "live",
            "title": "",
            "prompt": request.prompt,
            "where": self.where,
            "settings": settings_line(request.settings),
            "note": self.note,
            "failed": self.failed,
            "running": self.running,
            "link": "",
            "lanes": [self._slice(lane) if self.running else lane.view for lane in self.lanes],
        }


def log_run(request: Request, run: Run, with_prompt: bool) -> None:
    """One line for one run. The prompt's text stays out of it unless it is wanted."""
    figures = measure(run)
    event(
        "run",
        id=request.session,
        target=run.target,
        head=run.head,
        settings=run.settings.model_dump(exclude={"stop_token_ids"}),
        prompt_tokens=len(run.prompt_ids),
        tokens=len(run.output_ids),
        tau=figures.mean_acceptance_length,
        tokens_per_second=figures.tokens_per_second,
        outcome=run.finish_reason,
        error=run.error,
        **({"prompt": run.prompt_text} if with_prompt else {}),
    )
