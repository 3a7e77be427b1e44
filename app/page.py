"""Building the page: parts, handlers, endpoints."""

import json
import secrets
import threading
import traceback
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import gradio as gr

from app.comparison import Comparison, Request
from app.endpoints import add_endpoints
from app.layout import HEADER, SETTINGS, TREE_SETTINGS, Parts, controls, drawing, pool_line
from app.library import RUNS, load_recording, recordings
from app.models import Models
from app.view import Message, session_of
from decoding.errors import UsageError
from decoding.records import Settings

DEVICE = "device"  # one queue for all work on the device
MAX_REQUESTS = 512


class Requests:
    """Requests that were asked for and not ended: Stop reaches a running one and one that still waits in the queue."""

    def __init__(self) -> None:
        self._events: OrderedDict[str, threading.Event] = OrderedDict()
        self._claimed: set[str] = set()

    def open(self) -> str:
        token = secrets.token_hex(8)
        self._events[token] = threading.Event()
        while len(self._events) > MAX_REQUESTS:
            self._events.popitem(last=False)
        return token

    def claim(self, token: str) -> bool:
        """True once for each token: a request runs once."""
        event = self._events.get(token)
        if event is None or token in self._claimed:
            return False
        self._claimed.add(token)
        return True

    def active(self, token: str) -> bool:
        return token in self._events

    def stop(self, token: str) -> None:
        if token in self._events:
            self._events[token].set()

    def stopped(self, token: str) -> bool:
        event = self._events.get(token)
        return event is None or event.is_set()

    def close(self, token: str) -> None:
        self._events.pop(token, None)
        self._claimed.discard(token)


def pack(message: Message) -> str:
    """A message as the browser's script takes it (a string: Gradio would wrap plain data into reactive proxies)."""
    return json.dumps(message, ensure_ascii=False, separators=(",", ":"))


def first_view(folder: Path) -> Message:
    """What the page opens on: the first recorded runs."""
    shipped = recordings(folder)
    if not shipped:
        return notice("No recorded runs are shipped with this copy: press Run.", "start")
    runs = list(load_recording(shipped[0]))[:4]
    return session_of(runs, f"recorded-{shipped[0].name}", "recorded", shipped[0].title)


def notice(text: str, session: str, failed: bool = False) -> Message:
    """A message without lanes."""
    return {
        "session": session,
        "kind": "live",
        "title": "",
        "prompt": "",
        "where": "",
        "settings": "",
        "note": text,
        "failed": failed,
        "running": False,
        "lanes": [],
    }


def refusal(text: str) -> str:
    """A packed message that shows an error above the lanes that are there; never the same twice, so that it always arrives."""
    return json.dumps({"kind": "keep", "note": text, "failed": True, "nonce": secrets.token_hex(4)})


def read_settings(values: tuple[object, ...]) -> Settings:
    """The settings fields as Settings; empty ones are left to the defaults and to each head.

    Raises:
        UsageError: a value out of range, in words.
    """
    pairs = zip(SETTINGS, values, strict=True)
    given = {name: value for name, value in pairs if value is not None and not (name in TREE_SETTINGS and value == 0)}
    return Settings(**given)


def build(models: Models, runs: Path = RUNS) -> gr.Blocks:
    """The whole page on a registry of models."""
    requests = Requests()
    opening = first_view(runs)

    with gr.Blocks(title="Draftscope", analytics_enabled=False, fill_width=True) as demo:
        gr.HTML(HEADER, apply_default_css=False)
        with gr.Row(elem_id="ds-main"):
            with gr.Column(scale=0, min_width=290, elem_id="ds-controls"):
                parts = controls(models)
            with gr.Column(scale=1, min_width=320, elem_id="ds-stage"):
                parts.lanes = drawing("lanes", pack(opening), elem_id="ds-lanes")
                with gr.Tabs(elem_id="ds-tabs"), gr.Tab("Step by step", id="steps"):
                    drawing("steps", elem_id="ds-steps")
        parts.prompt.value = opening["prompt"]
        _wire(parts, models, requests)
        # after the first view: importing torch while the page is being built would make it late
        demo.load(lambda: models.preload(delay=2.0), queue=False, show_progress="hidden", api_visibility="private")
        add_endpoints(models, DEVICE)
    return demo


def _wire(parts: Parts, models: Models, requests: Requests) -> None:
    """Handlers of the page; none of them is an endpoint of the API."""

    def begin(token: str, prompt: str, target: str, methods: list[str], *values: object) -> dict:
        """Check the request at once; a good one gets a token, which starts it. While one runs nothing else begins."""
        if requests.active(token):
            return {parts.token: token}
        try:
            if not prompt.strip():
                raise UsageError("the prompt is empty: type something for the target to answer, or pick an example")
            models.check(target, methods)
            read_settings(values)
        except UsageError as error:
            return {parts.token: "", parts.lanes: refusal(str(error))}
        return {parts.token: requests.open(), parts.run: gr.Button(interactive=False), parts.stop: gr.Button(interactive=True)}

    def run_lanes(token: str, prompt: str, target: str, methods: list[str], *values: object) -> Iterator[dict]:
        """Run the lanes; the page gets a message at most ten times a second."""
        if not requests.claim(token):
            yield {parts.token: token}  # a refused request: nothing to run
            return
        idle = {parts.run: gr.Button(interactive=True), parts.stop: gr.Button(interactive=False)}
        try:
            request = Request(prompt, tuple(methods), target, read_settings(values), token)
            for message in Comparison(models, request, lambda: requests.stopped(token)):
                yield {parts.lanes: pack(message), **({} if message["running"] else idle)}
        except Exception as error:  # the last net: whatever broke is said on the page, and the page stays usable
            traceback.print_exc()
            yield {parts.lanes: refusal(f"unexpected failure: {type(error).__name__}: {error}"), **idle}
        finally:
            requests.close(token)

    inputs = [parts.prompt, parts.target, parts.methods, *parts.settings]
    started = gr.on(
        [parts.run.click, parts.prompt.submit],
        begin,
        [parts.token, *inputs],
        [parts.token, parts.run, parts.stop, parts.lanes],
        queue=False,
        show_progress="hidden",
        api_visibility="private",
    )
    started.then(
        run_lanes,
        [parts.token, *inputs],
        [parts.lanes, parts.run, parts.stop, parts.token],
        concurrency_id=DEVICE,
        concurrency_limit=1,
        show_progress="hidden",
        api_visibility="private",
    )
    parts.stop.click(requests.stop, parts.token, None, queue=False, show_progress="hidden", api_visibility="private")
    for button, example in parts.examples:
        button.click(lambda text=example.prompt: text, None, parts.prompt, queue=False, show_progress="hidden", api_visibility="private")
    gr.on(
        [field.change for field in parts.settings[-3:]],
        pool_line,
        parts.settings[-3:],
        parts.pool,
        queue=False,
        show_progress="hidden",
        api_visibility="private",
    )
