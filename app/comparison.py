"""Running the lanes of one request, one after the other on the device, and telling what happens as it happens."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from app.models import Models
from app.view import (
    LaneView,
    Message,
    State,
    Tally,
    empty_lane,
    head_facts,
    lane_of,
    run_state,
    settings_line,
    step_view,
    used_ids,
    where_line,
)
from decoding.errors import DraftscopeError
from decoding.metrics import Metrics, measure
from decoding.records import AUTOREGRESSIVE, Run, Settings, Step

UPDATE_SECONDS = 0.1
REPEATED_UPDATES = 3  # a slice reaches this many updates back: an update that the browser merged into the next is not missed


@dataclass(frozen=True)
class Request:
    """What a person asked for."""

    prompt: str | list[int]
    methods: tuple[str, ...]
    target: str
    settings: Settings
    session: str

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
    texts: dict[int, str] = field(default_factory=dict)
    sent: list[int] = field(default_factory=list)  # steps that each update so far went up to
    fresh: list[Step] = field(default_factory=list)  # steps that a later update still repeats
    run: Run | None = None
    output_ids: list[int] = field(default_factory=list)


class Comparison:
    """The lanes of one request. Iterating it runs them: a Message at most ten times a second, page-sized; `runs` are
    the records, finished or cut short. No work of the page falls into a timed phase: the engine stands still meanwhile."""

    def __init__(self, models: Models, request: Request, cancelled: Callable[[], bool] = lambda: False, note: str = "") -> None:
        self.models, self.request, self.cancelled = models, request, cancelled
        labels = {offer.source: offer for offer in models.offers(request.target)}
        self.lanes = []
        sampled = request.settings.temperature > 0
        for index, source in enumerate(request.ordered()):
            offer = labels.get(source)
            key = f"{index}:{source}"
            head = None if source == AUTOREGRESSIVE else source
            self.lanes.append(Lane(key, source, empty_lane(key, offer.method if offer else "other", head, "waiting", sampled)))
        self.note, self.failed, self.running, self.where = note, False, True, ""
        self.plain: Metrics | None = None

    @property
    def runs(self) -> list[Run]:
        return [lane.run for lane in self.lanes if lane.run is not None]

    def __iter__(self) -> Iterator[Message]:
        try:
            yield from self._prepare()
            for lane in self.lanes:
                if self.cancelled():
                    break
                yield from self._run_lane(lane)
        except DraftscopeError as error:
            self.note, self.failed = str(error), True
        self.running = False
        for lane in self.lanes:
            if lane.view["state"] in ("waiting", "loading", "running"):
                lane.view["state"] = "failed" if self.failed else "stopped"
        yield self.message(whole=True)

    def _prepare(self) -> Iterator[Message]:
        """Load what is missing, refuse what can't work before any lane runs."""
        request, self.note = self.request, ""
        self.models.check(request.target, list(request.methods))
        if not self.models.ready(request.target):
            self._set_all("loading")
            yield self.message()
        target = self.models.target(request.target)
        from decoding.engine import environment  # torch: imported when it is needed, not before the first view

        for lane in self.lanes:
            head = self.models.head(lane.source, target)
            request.settings.resolved(head.tree if head else None)
            if head is not None:
                lane.view.update(empty_lane(lane.key, head.info.method, head.name, "loading", lane.view["sampled"]))
                lane.view["facts"] = head_facts(head.info, request.settings.resolved(head.tree).tree)
        self.where = where_line(target.name, environment(target))
        self._set_all("waiting")
        yield self.message()

    def _run_lane(self, lane: Lane) -> Iterator[Message]:
        from decoding import Generation  # torch: imported when it is needed, not before the first view

        target = self.models.target(self.request.target)
        head = self.models.head(lane.source, target)
        lane.view["state"] = "loading"
        yield self.message()
        self.models.warm_up(lane.source, target, head)
        generation = Generation(target, head, self.request.prompt, self.request.settings, cancelled=self.cancelled, drift=True)
        lane.view["state"] = "running"
        lane.view["tree"] = list(generation.settings.tree) if head else None
        steps = iter(generation)
        shown = time.monotonic()
        try:
            for step in steps:
                if not lane.tally.steps:
                    lane.tally.prefill_ms = generation.prefill_ms
                    lane.view["first"], lane.view["prefill"] = step.root_id, round(generation.prefill_ms, 3)
                    lane.output_ids.append(step.root_id)
                lane.tally.add(step)
                lane.output_ids += step.token_ids
                lane.fresh.append(step)
                lane.view["figures"] = lane.tally.figures(self.plain)
                if time.monotonic() - shown >= UPDATE_SECONDS:
                    lane.texts = {token_id: generation.token_text(token_id) for token_id in used_ids(lane.fresh)}
                    yield self.message()
                    shown = time.monotonic()
        except DraftscopeError as error:
            lane.view["error"] = str(error)
        finally:
            steps.close()
        lane.run = generation.run
        lane.output_ids = lane.run.output_ids
        lane.view["state"] = run_state(lane.run)
        if head is None:
            self.plain = measure(lane.run)
        plain = next((other.run for other in self.lanes if other.run is not None and other.run.head is None), None)
        lane.view = lane_of(lane.run, lane.key, plain)
        yield self.message(whole_lane=lane)

    def _set_all(self, state: State) -> None:
        for lane in self.lanes:
            lane.view["state"] = state

    def _slice(self, lane: Lane) -> LaneView:
        """The lane's newest steps, the last few updates' ones once more."""
        done = lane.tally.steps
        start = lane.sent[-REPEATED_UPDATES] if len(lane.sent) >= REPEATED_UPDATES else 0
        if lane.run is not None:
            return {**lane.view, "at": done, "steps": [], "texts": {}}
        lane.fresh = lane.fresh[len(lane.fresh) - (done - start) :] if done > start else []
        lane.sent.append(done)
        return {
            **lane.view,
            "at": start,
            "steps": [step_view(step) for step in lane.fresh],
            "texts": lane.texts,
        }

    def message(self, whole: bool = False, whole_lane: Lane | None = None) -> Message:
        """The state of everything, with the newest steps only; `whole` sends all steps of all lanes."""
        request = self.request
        return {
            "session": request.session,
            "kind": "live",
            "title": "",
            "prompt": request.prompt if isinstance(request.prompt, str) else "",
            "where": self.where,
            "settings": settings_line(request.settings),
            "note": self.note,
            "failed": self.failed,
            "running": self.running,
            "link": "",
            "lanes": [lane.view if whole or lane is whole_lane else self._slice(lane) for lane in self.lanes],
        }
