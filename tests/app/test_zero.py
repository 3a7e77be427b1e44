"""ZeroGPU: a run in another process, of which only plain data comes back. `tests/check_space.py` runs the real `spaces`."""

import pickle
import pickletools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gradio as gr
import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError
from playwright.sync_api import Browser, expect

from app import zero
from app.comparison import Comparison, Request
from app.models import Models
from app.operator import Operator
from app.zero import Flag, changes, comparisons, seconds, visitor_words
from decoding.records import Run, Settings
from tests.app.conftest import Server, opened, serve

Borrowed = Callable[..., Iterator[Any]]


def crossing(value: object) -> Any:
    """What the other process gets: pickled, and without anything of torch in it."""
    packed = pickle.dumps(value)
    named = [str(argument) for code, argument, _ in pickletools.genops(packed) if code.name in ("GLOBAL", "SHORT_BINUNICODE", "BINUNICODE")]
    assert not any(name.startswith(("torch.", "transformers.")) for name in named)
    return pickle.loads(packed)


class Lender:
    """Stands for spaces.GPU: what goes in and out is pickled; it can refuse as `spaces` does."""

    def __init__(self) -> None:
        self.refusal: gr.Error | None = None
        self.asked: list[float] = []

    def __call__(self, duration: Callable[..., float]) -> Callable[[Borrowed], Borrowed]:
        def lend(task: Borrowed) -> Borrowed:
            def run(*arguments: object) -> Iterator[Any]:
                self.asked.append(duration(*arguments))
                if self.refusal is not None:
                    raise self.refusal
                for value in task(*crossing(arguments)):
                    yield crossing(value)

            return run

        return lend


@pytest.fixture(scope="module")
def lender() -> Lender:
    return Lender()


@pytest.fixture(scope="module")
def borrowing(server: Server, lender: Lender) -> Iterator[Server]:
    """The same targets and heads, but every run is lent its GPU."""
    yield from serve(server.models, server.runs, gpu=lender)


def request_for(models: Models, tokens: int = 40) -> Request:
    return Request(" the man said that he", ("autoregressive", models.extra_heads[1]), models.source, Settings(max_new_tokens=tokens), "s")


def test_elsewhere_nothing_is_borrowed(server: Server) -> None:
    assert type(comparisons(server.models, Operator())(request_for(server.models))) is Comparison


def test_a_gpu_is_borrowed_for_as_long_as_the_request_needs(server: Server) -> None:
    short, long = request_for(server.models, 16), request_for(server.models, 512)
    assert zero.BEGIN < seconds(short) < seconds(long) <= zero.LONGEST < 120, "an anonymous visitor has two minutes a day"


def test_a_borrowed_run_is_the_same_run(borrowing: Server, server: Server, lender: Lender) -> None:
    client = Client(borrowing.url, verbose=False)
    asked = {"prompt": " the man said that he", "methods": ["autoregressive", server.models.extra_heads[1]], "max_new_tokens": 40}
    *updates, last = list(client.submit(**asked, api_name="/compare"))
    runs = [Run.model_validate(raw) for raw in last["runs"]]
    own = [Run.model_validate(raw) for raw in list(Client(server.url, verbose=False).submit(**asked, api_name="/compare"))[-1]["runs"]]
    assert [run.output_ids for run in runs] == [run.output_ids for run in own]
    assert [[step.node_ids for step in run.steps] for run in runs] == [[step.node_ids for step in run.steps] for run in own]
    assert updates[-1]["lanes"][1]["token_ids"] == runs[1].output_ids and updates[-1]["lanes"][1]["speed_up"] > 0
    assert lender.asked[-1] == seconds(request_for(server.models))


def test_the_page_shows_a_borrowed_run(browser: Browser, borrowing: Server) -> None:
    for page in opened(browser, borrowing.url):
        page.click("#ds-run")
        expect(page.locator(".ds-state")).to_have_text(["finished"] * 3, timeout=60_000)
        expect(page.locator(".ds-lane[data-method=hass] .ds-equal")).to_contain_text("Equal to plain decoding")
        expect(page.locator(".ds-lane[data-method=hass] .ds-chip").first).not_to_be_empty()


@pytest.mark.parametrize(
    ("title", "own", "told"),
    [
        ("ZeroGPU quota exceeded", "You have exceeded your free ZeroGPU quota (20s requested vs. 3s left).", "GPU time is used up for now"),
        ("ZeroGPU illegal duration", "The requested GPU duration (300s) is larger than the maximum allowed", "ask for fewer tokens"),
        ("ZeroGPU worker error", "GPU task aborted", "taken away before the run had ended"),
        ("Something new", "no idea", "could not get a GPU"),
    ],
)
def test_a_refusal_is_told_in_a_visitor_s_words(
    title: str, own: str, told: str, borrowing: Server, server: Server, lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = gr.Error(own, title=title)
    assert told in visitor_words(error) and own.rstrip(".") in visitor_words(error) and "recorded runs" in visitor_words(error)
    monkeypatch.setattr(lender, "refusal", error)
    with pytest.raises(AppError, match=told):
        Client(borrowing.url, verbose=False).predict(prompt=" he", methods=["autoregressive"], api_name="/compare")


def test_without_quota_the_recorded_runs_are_there(
    browser: Browser, borrowing: Server, lender: Lender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lender, "refusal", gr.Error("20s requested vs. 3s left", title="ZeroGPU quota exceeded"))
    for page in opened(browser, borrowing.url):
        page.click("#ds-run")
        expect(page.locator("#ds-lanes")).to_contain_text("The recorded runs need no GPU", timeout=30_000)
        expect(page.locator("#ds-run")).to_be_enabled()


def test_the_other_process_stops_when_it_is_told_or_when_its_time_is_over(server: Server, tmp_path: Path) -> None:
    flag = tmp_path / "stop"
    assert not Flag(str(flag), time.monotonic() + 60).is_set() and Flag(str(flag), time.monotonic() - 1).is_set()
    flag.touch()
    assert Flag(str(flag), time.monotonic() + 60).is_set()
    last = list(changes(server.models, Operator(), request_for(server.models), str(flag)))[-1]
    assert all(lane.run is None for lane in last.lanes) and not last.failed


def test_a_run_that_outlasts_its_time_is_cut_short_and_says_so(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zero, "LONGEST", 0)
    last = list(changes(server.models, Operator(), request_for(server.models), str(tmp_path / "stop")))[-1]
    assert "cut short" in last.note
