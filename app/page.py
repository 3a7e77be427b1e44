"""Building the page: parts, handlers, endpoints."""

import secrets
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from functools import wraps
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import gradio as gr

from app.address import Address, link, read_address
from app.charts import Look
from app.comparison import Comparison, Request
from app.device import Device, Job
from app.downloads import Downloads
from app.endpoints import add_endpoints
from app.layout import HEADER, SETTINGS, TREE_SETTINGS, Parts, controls, drawing, method_names, pool_line
from app.library import MAX_LANES, RUNS, Recording, lane_name, load_recording, load_uploaded, pick, recordings
from app.log import told
from app.messages import notice, pack, refusal, selection
from app.models import Models, Preload
from app.operator import Operator
from app.panels import Panels, filled, lane_choice, tabs
from app.requests import Requests, new_token
from app.view import Message, session_of
from app.zero import comparisons
from decoding.errors import DraftscopeError, UsageError
from decoding.records import Run, Settings

# not told of and not to be called by name (Gradio alone would let a private handler be called by its)
PRIVATE = {"api_visibility": "private", "api_name": False}
QUIET = {"queue": False, "show_progress": "hidden", **PRIVATE}
LOOK = "() => [document.body.classList.contains('dark'), window.innerWidth < 700]"
BUSY = "A run is going on here: stop it first, or wait until it has ended."
FROM_LINK = "The link's prompt and settings are filled in: press Run to measure them here. What is shown below is a recorded run."


def read_settings(values: Sequence[object]) -> Settings:
    """The settings fields as Settings; empty ones are left to the defaults and to each head.

    Raises:
        UsageError: a value out of range, in words.
    """
    pairs = zip(SETTINGS, values, strict=True)
    return Settings(**{name: value for name, value in pairs if value is not None and not (name in TREE_SETTINGS and value == 0)})


def recorded(recording: Recording, wanted: Sequence[str] = (), lane: str | None = None) -> tuple[list[Run], Message]:
    """The runs of a recording (four at most, see `pick`) and what the page is told of them.

    Raises:
        UsageError: a broken recording, or lanes that it does not have.
    """
    every = load_recording(recording)
    runs = pick(every, wanted, lane)
    names = ",".join(map(lane_name, runs))
    message = session_of(runs, f"recorded-{recording.name}-{names}", "recorded", recording.title)
    message["link"] = urlencode({"run": recording.name, **({"methods": names} if len(every) > MAX_LANES else {})}, safe=",")
    return runs, message


def place_line(job: Job) -> str:
    """What a visitor who waits is told."""
    ahead, seconds = job.device.ahead(job), job.device.wait_seconds(job)
    if not ahead:
        return ""
    if job.device.doing and ahead == 1:
        return f"Getting ready, once: {job.device.doing}"
    about = "" if seconds is None else f", about {max(5, 5 * round(seconds / 5))} s"
    return f"Waiting for the device: {ahead} earlier request{'s' if ahead > 1 else ''}{about}."


def build(
    models: Models,
    runs: Path = RUNS,
    operator: Operator | None = None,
    device: Device | None = None,
    gpu: Callable[..., Any] | None = None,
) -> gr.Blocks:
    """The whole page.

    Args:
        models: what this server can run.
        runs: folder of the recorded runs; the page opens on the first.
        operator: what is allowed; None = the defaults.
        device: where it runs, one for the page and the API; None = a new one.
        gpu: `spaces.GPU` on a ZeroGPU Space.
    """
    operator = operator or Operator()
    device, compare = device or Device(operator.max_waiting), comparisons(models, operator, gpu)
    if gpu is None and not operator.keep_trees:
        device.spare = models.fit_trees
    shipped = recordings(runs)
    opening = recorded(shipped[0])[1] if shipped else notice("No recorded runs are shipped with this copy: press Run.")
    with gr.Blocks(title="Draftscope", analytics_enabled=False, fill_width=True, delete_cache=(3600, 86400)) as demo:
        drawing("guide", template=HEADER, elem_id="ds-head")
        with gr.Row(elem_id="ds-main"):
            with gr.Column(scale=0, min_width=290, elem_id="ds-controls"):
                parts = controls(models, opening["prompt"], operator)
            with gr.Column(scale=1, min_width=320, elem_id="ds-stage"):
                parts.lanes = drawing("lanes", pack(opening), elem_id="ds-lanes")
                drawing("transport", elem_id="ds-transport")
                panels = tabs(shipped)
        _Handlers(models, parts, panels, shipped, device, compare, operator).wire(demo)
        add_endpoints(models, device, compare)
    return demo


def safely(handler: Callable[..., dict]) -> Callable[..., dict]:
    """A handler with a clear message in place of whatever it may raise: values come from anyone, disks fill up."""

    @wraps(handler)
    def run(self: "_Handlers", *values: object) -> dict:
        try:
            return handler(self, *values)
        except Exception as error:
            return {self.parts.lanes: refusal(told(error))}

    return run


class _Handlers:
    """What happens when a person does something. None of this is an endpoint of the API."""

    def __init__(
        self,
        models: Models,
        parts: Parts,
        panels: Panels,
        shipped: Sequence[Recording],
        device: Device,
        compare: Callable[[Request], Comparison],
        operator: Operator,
    ) -> None:
        self.models, self.parts, self.panels, self.device, self.compare = models, parts, panels, device, compare
        self.operator = operator
        self.shipped = {recording.name: recording for recording in shipped}
        self.requests, self.downloads = Requests(device), Downloads()
        self._preloads = False

    # ---- a live run --------------------------------------------------------------------------------------------------
    @safely
    def begin(self, token: str, prompt: str, target: str, methods: list[str], *values: object) -> dict:
        """Check the request at once; a good one gets a token, which starts it. While one runs nothing else begins."""
        parts = self.parts
        if self.requests.active(token):
            return {parts.token: token}
        try:
            token = new_token()
            comparison = self.compare(Request(prompt, methods, target, read_settings(values), token))
            self.requests.open(comparison)
        except UsageError as error:
            return {parts.token: "", parts.lanes: refusal(str(error))}
        return {
            parts.token: token,
            parts.lanes: pack(comparison.message()),
            parts.run: gr.Button(interactive=False),
            parts.stop: gr.Button(interactive=True),
        }

    @safely
    def choose_target(self, target: str) -> dict:
        """Offer the methods of a target, as many chosen as a request may name."""
        names = method_names(self.models, target)
        methods = gr.update(choices=names, value=[source for _, source in names[: self.operator.max_lanes]])
        return {self.parts.methods: methods, self.parts.memory: self.models.memory_line()}

    @safely
    def stop(self, token: str, request: gr.Request) -> dict:
        """Stop the request: within a step where it runs, at once where it still waits."""
        parts = self.parts
        if not self.requests.stop(token):
            self.requests.leave(request.session_hash)  # Gradio may have forgotten the token (see SESSIONS)
            return {parts.token: token}
        message = refusal("Stopped before it began.", failed=False, ended=True)
        return {parts.lanes: message, parts.run: gr.Button(interactive=True), parts.stop: gr.Button(interactive=False)}

    async def run_lanes(self, token: str, request: gr.Request) -> AsyncIterator[dict]:
        """Follow the run of a request; the page gets a message at most a few times a second."""
        parts = self.parts
        idle = {parts.run: gr.Button(interactive=True), parts.stop: gr.Button(interactive=False)}
        try:
            job = self.requests.start(token, request.session_hash)
        except UsageError as error:
            yield {parts.lanes: refusal(str(error), ended=True), **idle}
            return
        if job is None:
            yield {parts.token: token}  # a refused request: nothing to run
            return
        comparison = job.work
        address = link(comparison.request.prompt, comparison.request.ordered(), comparison.request.settings)

        def shown() -> dict:
            if job.ended.is_set() and job.started is None:
                return {parts.lanes: refusal("Stopped before it began.", failed=False, ended=True), **idle}
            message = comparison.message()
            message["link"], message["note"] = address, message["note"] or place_line(job)
            return {parts.lanes: pack(message), **({} if message["running"] else idle)}

        stays = False
        try:
            async with aclosing(job.updates(shown, {parts.token: token})) as updates:
                async for update in updates:
                    yield update
            stays = True
        finally:
            self.requests.close(token, drawn=stays)

    @safely
    def draw_finished(self, token: str, dark: bool, narrow: bool) -> dict:
        """Fill the tabs from the runs that have just ended."""
        runs = [run for run in self.requests.take(token) if run.steps]
        if not runs:
            return {self.panels.gallery: gr.skip()}
        return {
            self.panels.gallery: None,
            self.panels.shown: lane_choice((), ()),
            **filled(self.panels, runs, token, Look(dark, narrow), self.downloads),
        }

    # ---- recorded and uploaded runs ----------------------------------------------------------------------------------
    @safely
    def choose_lanes(self, token: str, name: str | None, wanted: list[str], dark: bool, narrow: bool) -> dict:
        """Show other lanes of the recording that is open."""
        return self.open_recording(token, name, dark, narrow, Address(methods=wanted))

    @safely
    def open_recording(self, token: str, name: str | None, dark: bool, narrow: bool, address: Address | None = None) -> dict:
        """Show a recording, in the lanes and in the tabs; an address says which of its lanes, and where it opens."""
        address = address or Address()
        if not name:
            return {self.parts.lanes: gr.skip()}
        if self.requests.active(token):
            return {self.parts.lanes: refusal(BUSY), self.panels.gallery: None}
        try:
            if name not in self.shipped:
                raise UsageError(f"no recorded run is called {name[:60]!r}: there are {', '.join(self.shipped)}")
            runs, message = recorded(self.shipped[name], address.methods, address.lane)
        except UsageError as error:
            return {self.parts.lanes: refusal(str(error))}
        every = load_recording(self.shipped[name])
        out: dict = {self.parts.lanes: pack(message, **selection(address.lane, address.step)), self.parts.prompt: message["prompt"]}
        out[self.panels.shown] = lane_choice(every, runs)
        return {**out, **filled(self.panels, runs, message["session"], Look(dark, narrow), self.downloads)}

    @safely
    def open_upload(self, token: str, files: list[str] | None, dark: bool, narrow: bool) -> dict:
        """Check uploaded records and show them."""
        if self.requests.active(token):
            return {self.parts.lanes: refusal(BUSY)}
        try:
            runs = load_uploaded(list(files or []))
        except DraftscopeError as error:
            return {self.parts.lanes: refusal(str(error))}
        session = f"uploaded-{secrets.token_hex(8)}"
        message = session_of(runs, session, "uploaded", "")
        return {
            self.parts.lanes: pack(message),
            self.panels.gallery: None,
            self.panels.shown: lane_choice((), ()),
            **filled(self.panels, runs, session, Look(dark, narrow), self.downloads),
        }

    @safely
    def open_page(self, dark: bool, narrow: bool, request: gr.Request) -> dict:
        """Fill the page as its address says; without one, with the first recording."""
        parts, out = self.parts, {}
        try:
            address = read_address(dict(request.query_params))
            self.operator.check_settings(address.checked())
            if address.methods and not address.run:
                self.operator.check(address.prompt or "", address.methods, address.checked())
                self.models.check(self.models.source, address.methods)
        except UsageError as error:
            address, out = Address(), {parts.lanes: refusal(str(error))}
        name = address.run or next(iter(self.shipped), None)
        shown = self.open_recording("", name, dark, narrow, address)
        if parts.lanes in out or not (address.run or address.lane or address.step):
            shown.pop(parts.lanes, None)  # the opening view is there already
        if not address.run:
            shown.pop(parts.prompt, None)  # so is its prompt, and a person may have typed another one since
        out = {**shown, **out}
        if address.run in self.shipped:
            out[self.panels.gallery] = address.run
        if address.prompt:
            out[parts.prompt] = address.prompt
        if address.methods and not address.run:
            out[parts.methods] = address.methods
        if address.prompt and not address.run and parts.lanes not in out:
            out[parts.lanes] = refusal(FROM_LINK, failed=False)
        out.update(
            {field: address.settings[name] for name, field in zip(SETTINGS, parts.settings, strict=True) if name in address.settings}
        )
        self.preload()
        return out or {parts.lanes: gr.skip()}

    def preload(self) -> None:
        """Load what the first Run needs, once, when the first view is out: importing torch meanwhile would make it late."""
        if not self._preloads:
            self._preloads = True
            timer = threading.Timer(2.0, self._load_ahead)
            timer.daemon = True
            timer.start()

    def _load_ahead(self) -> None:
        with suppress(UsageError):  # the device has enough to do
            self.device.submit(Preload(self.models))

    def leave(self, request: gr.Request) -> None:
        """The visitor's tab is closed: nobody waits for its run any more."""
        self.requests.leave(request.session_hash)

    # ---- events ------------------------------------------------------------------------------------------------------
    def wire(self, demo: gr.Blocks) -> None:
        parts, panels = self.parts, self.panels
        inputs = [parts.prompt, parts.target, parts.methods, *parts.settings]
        below = [panels.gallery, panels.shown, *panels.outputs()]
        everything = [parts.lanes, parts.prompt, parts.methods, *parts.settings, *below]
        gr.on(
            [parts.run.click, parts.prompt.submit],
            self.begin,
            [parts.token, *inputs],
            [parts.token, parts.run, parts.stop, parts.lanes],
            **QUIET,
        ).then(
            self.run_lanes,
            parts.token,
            [parts.lanes, parts.run, parts.stop, parts.token],
            concurrency_limit=None,  # the device has a queue of its own, which knows places and times
            show_progress="hidden",
            **PRIVATE,
        ).then(self.draw_finished, [parts.token, *parts.look], [parts.lanes, *below], **QUIET).then(
            self.models.memory_line, None, parts.memory, **QUIET
        )
        parts.target.change(self.choose_target, parts.target, [parts.methods, parts.memory, parts.lanes], **QUIET)
        parts.stop.click(self.stop, parts.token, [parts.token, parts.lanes, parts.run, parts.stop], **QUIET)
        panels.gallery.input(self.open_recording, [parts.token, panels.gallery, *parts.look], everything, **QUIET)
        panels.shown.input(self.choose_lanes, [parts.token, panels.gallery, panels.shown, *parts.look], everything, **QUIET)
        panels.upload.upload(self.open_upload, [parts.token, panels.upload, *parts.look], everything, **QUIET)
        for button, example in parts.examples:
            button.click(lambda text=example.prompt: text, None, parts.prompt, **QUIET)
        gr.on([field.change for field in parts.settings[-3:]], pool_line, parts.settings[-3:], parts.pool, **QUIET)
        demo.unload(self.leave)
        demo.load(self.open_page, parts.look, everything, js=LOOK, **QUIET)
        demo.load(self.models.memory_line, None, parts.memory, **QUIET)
