"""A public server: many visitors and one device, runs that are cut short."""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError
from playwright.sync_api import Browser, expect

from app.comparison import Comparison, Request
from app.device import Device
from app.models import Models
from app.requests import Requests
from decoding import Run, Settings
from decoding.errors import UsageError
from decoding.target import Target
from tests.app.asking import PROMPT, ask, run, wait_until
from tests.app.conftest import DRAWN, PATIENCE, Server, opened, serve
from tests.hub import StandIn
from tests.load import Visitors

ROOT = Path(__file__).resolve().parent.parent.parent


def test_several_visitors_get_what_they_would_get_alone(server: Server) -> None:
    visitors = Visitors(server.url)
    visitors.together(clients=4, seconds=6)
    assert not visitors.wrong, visitors.wrong
    assert visitors.counts["run"] and server.device.requests == 0


class Held:
    """Work that goes on until it is stopped."""

    def __init__(self) -> None:
        self.stopped, self.begun, self.finished = threading.Event(), threading.Event(), False

    def work(self) -> Iterator[bool]:
        self.begun.set()
        while not self.stopped.wait(0.01):
            yield False

    def finish(self) -> None:
        self.finished = True


def test_the_queue_knows_places_is_bounded_and_serves_in_order() -> None:
    device = Device(places=3)
    works = [Held() for _ in range(3)]
    jobs = [device.submit(work) for work in works]
    assert works[0].begun.wait(5)
    assert [device.ahead(job) for job in jobs] == [0, 1, 2]
    with pytest.raises(UsageError, match="3 requests are waiting or running"):
        device.submit(Held())
    jobs[1].stop()  # one that waits goes at once, and is told that it is over
    assert jobs[1].ended.is_set() and works[1].finished and not works[1].begun.is_set()
    assert device.ahead(jobs[2]) == 1
    jobs[0].stop()
    assert jobs[0].ended.wait(5) and works[2].begun.wait(5)
    device.close()
    assert jobs[2].ended.is_set()
    with pytest.raises(UsageError, match="shutting down"):
        device.submit(Held())


def test_work_that_breaks_does_not_take_the_device_along() -> None:
    class Broken(Held):
        def work(self) -> Iterator[bool]:
            raise RuntimeError("broken")
            yield False

    device = Device()
    assert device.submit(Broken()).ended.wait(5)
    after = Held()
    job = device.submit(after)
    assert after.begun.wait(5)
    job.stop()
    device.close()


def test_spare_time_is_used_a_step_at_a_time_and_gives_way() -> None:
    spent, more = [], threading.Event()

    def spare() -> bool:
        spent.append(threading.current_thread().name)
        return not more.wait(0.01)

    device = Device(spare=spare)
    time.sleep(0.05)
    assert not spent, "the device is not there before it is asked for"
    first = Held()
    job = device.submit(first)
    assert first.begun.wait(5) and not spent, "a visitor waited"
    job.stop()
    wait_until(lambda: len(spent) > 3)
    assert device.requests == 0 and set(spent) == {"device"}
    second = Held()
    job = device.submit(second)
    assert second.begun.wait(5)
    before = len(spent)
    time.sleep(0.1)
    assert len(spent) == before, "spare work goes on beside a visitor's"
    more.set()
    job.stop()
    wait_until(lambda: len(spent) == before + 1)
    time.sleep(0.1)
    assert len(spent) == before + 1, "asked again where nothing was left"
    device.close()
    assert not device._thread.is_alive()


def test_spare_work_that_breaks_is_not_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    device = Device(spare=lambda: 1 / 0)
    for _ in range(2):
        work = Held()
        job = device.submit(work)
        assert work.begun.wait(5)
        job.stop()
        assert job.ended.wait(5)
    wait_until(lambda: device.spare is None)
    assert caplog.text.count("ZeroDivisionError: ") == 1
    device.close()


def cut_short(server: Server, held_target: threading.Event, go: Callable[[], object]) -> Run:
    """What is kept of the run that has the device when its visitor goes, while the target computes a step."""

    def writes() -> bool:
        job = server.device._running
        return job is not None and isinstance(job.work, Comparison) and bool(job.work.lanes[0].output_ids)

    wait_until(writes)
    job = server.device._running
    assert httpx.get(server.url + "health").json()["requests"] >= 1  # more where the page's own loading waits behind
    go()
    wait_until(job.work.stopped.is_set)
    made = len(job.work.lanes[0].output_ids)
    held_target.set()
    assert job.ended.wait(60)
    wait_until(lambda: server.device.requests == 0)
    assert len(job.work.runs) == 1, "a lane began after the visitor had gone"
    assert made <= len(job.work.runs[0].output_ids) <= made + 1, "more than the step that was being computed"
    assert not run(server, ask(server)).failed, "the next visitor is not served"
    return job.work.runs[0]


def test_a_dropped_connection_frees_the_device_within_a_step(server: Server, held_target: threading.Event) -> None:
    body = {"data": [PROMPT, ["autoregressive"], server.models.source, 300, 0, 1, 0, 0, 0, 0, 0]}
    event = httpx.post(server.url + "gradio_api/call/compare", json=body).json()["event_id"]
    with httpx.Client() as client, client.stream("GET", f"{server.url}gradio_api/call/compare/{event}", timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        kept = cut_short(server, held_target, lines.close)  # which closes the connection
    assert kept.finish_reason == "cancelled"


def test_an_answer_that_nobody_fetches_is_given_up(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.endpoints.GONE_SECONDS", 1.0)
    monkeypatch.setattr("app.device.TELL_SECONDS", 0.1)
    forward = Target.forward
    monkeypatch.setattr(Target, "forward", lambda *arguments: (time.sleep(0.05), forward(*arguments))[1])
    body = {"data": [PROMPT, ["autoregressive"], server.models.source, 500, 0, 1, 0, 0, 0, 0, 0]}
    for _ in range(2):  # one that runs, and one that waits for it
        httpx.post(server.url + "gradio_api/call/compare", json=body).raise_for_status()
    wait_until(lambda: server.device.requests == 2 and server.device._running is not None)
    job = server.device._running
    wait_until(lambda: server.device.requests == 0)
    assert job is not None and job.work.runs[0].finish_reason == "cancelled"


@pytest.mark.parametrize("how", ["close", "reload"])
def test_a_tab_that_goes_frees_the_device_within_a_step(
    browser: Browser, server: Server, held_target: threading.Event, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    other = browser.new_page()  # not `opened`: Gradio's script complains of its cut stream while a reload takes the page down
    other.set_default_timeout(PATIENCE)
    other.goto(server.url)
    other.wait_for_function(DRAWN)
    other.click("#ds-run")
    expect(other.locator(".ds-lane[data-state=running] .ds-chip").nth(3)).to_be_attached()
    with caplog.at_level(logging.INFO, "draftscope"):
        kept = cut_short(server, held_target, getattr(other, how))
    other.close()
    assert kept.finish_reason == "cancelled"
    assert '"outcome": "cancelled"' in "".join(caplog.messages)


def test_stop_works_where_gradio_has_forgotten_the_visit(
    browser: Browser, server: Server, held_target: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.server.SESSIONS", 1)
    for small in serve(server.models, server.runs):
        for page in opened(browser, small.url):
            page.click("#ds-run")
            expect(page.locator(".ds-lane[data-state=running] .ds-chip").nth(3)).to_be_attached()
            with pytest.raises(AppError, match="unknown method"):
                Client(small.url, verbose=False).predict(prompt=PROMPT, methods=["x"], api_name="/compare")  # another visit
            cut_short(small, held_target, lambda page=page: page.click("#ds-stop"))
            expect(page.locator(".ds-lane[data-state=stopped]")).to_have_count(3)


def test_stop_ends_a_fetch_at_once_and_the_old_target_works_on(server: Server, stand_in: StandIn) -> None:
    models = Models(server.models.source, "cpu", "float32", allow_custom=True)
    old = Request(PROMPT, ("autoregressive",), models.source, Settings(max_new_tokens=8), "old")
    before = run(server, Comparison(models, old)).runs[0].output_ids
    stand_in.how = "slow"  # it needs hours
    job = server.device.submit(Comparison(models, replace(old, target="org/tiny")))
    assert stand_in.begun.wait(60)
    job.stop()
    assert job.ended.wait(20)
    assert job.work.note == "Stopped while it was loading." and not job.work.failed and job.work.lanes[0].view["state"] == "stopped"
    assert models.ready(models.source)
    assert run(server, Comparison(models, old)).runs[0].output_ids == before


def test_the_runs_of_a_page_that_is_gone_are_not_kept_for_it(server: Server) -> None:
    requests = Requests(server.device)
    for drawn in (True, False):
        requests.open(ask(server))
        job = requests.start("test")
        assert job and job.ended.wait(60)
        requests.close("test", drawn)
        assert len(requests.take("test")) == drawn


def test_sigterm_keeps_the_partial_run_and_says_cancelled(tmp_path: Path) -> None:
    told = tmp_path / "log"
    prompt = "Write a long story about an old sailor, with many details."  # the embedded target needs many seconds for it
    with told.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "app.py", "--target", "embedded", "--device", "cpu", "--dtype", "float32", "--port", "7951"],
            cwd=ROOT, stderr=log, stdout=log, env={**os.environ, "DRAFTSCOPE_SAVE_RUNS": str(tmp_path / "kept")},
        )  # fmt: skip
        try:
            wait_until(lambda: '"begin"' in told.read_text(), 120)
            job = Client("http://127.0.0.1:7951", verbose=False).submit(
                prompt=prompt, methods=["autoregressive"], max_new_tokens=512, api_name="/compare"
            )
            wait_until(lambda: any(item["lanes"][0]["tokens"] for item in job.outputs() if item["type"] == "lanes"))
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            wait_until(job.done)
        finally:
            process.kill()
    lines = [json.loads(line) for line in told.read_text().splitlines() if line.startswith("{")]
    line = next(line for line in lines if line["event"] == "run")
    assert line["outcome"] == "cancelled" and line["tokens"] > 0 and line["tau"] == 1 and line["tokens_per_second"] > 0
    assert prompt not in told.read_text() and "Traceback" not in told.read_text()
    kept = Run.load(next((tmp_path / "kept").iterdir()))
    assert kept.finish_reason == "cancelled" and len(kept.output_ids) == line["tokens"]
    last = job.outputs()[-1]  # the visitor gets what was made
    assert last["type"] == "runs" and last["runs"][0]["output_ids"] == kept.output_ids


def test_sigterm_ends_a_server_whose_fetch_hangs(stand_in: StandIn, tmp_path: Path) -> None:
    stand_in.how = "slow"
    process = subprocess.Popen(
        [sys.executable, "app.py", "--device", "cpu", "--port", "7952", "--allow-custom-models"],
        cwd=ROOT, stderr=subprocess.DEVNULL,
        env={**os.environ, "HF_ENDPOINT": stand_in.url, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "0"},
    )  # fmt: skip
    try:
        wait_until(lambda: answers("http://127.0.0.1:7952/health"), 120)
        asked = {"prompt": PROMPT, "methods": ["autoregressive"], "target": "org/tiny"}
        httpx.post("http://127.0.0.1:7952/gradio_api/call/v2/compare", json=asked).raise_for_status()
        assert stand_in.begun.wait(60)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()


def answers(url: str) -> bool:
    try:
        return httpx.get(url).is_success
    except httpx.HTTPError:
        return False


def test_kill_while_saving_leaves_no_half_record(tmp_path: Path) -> None:
    script = (
        "import sys; from tests.records import make_run\n"
        "run = make_run([[6, 7]] * 400)\n"
        "while True: run.save(sys.argv[1]); print('saved', flush=True)"
    )
    out = tmp_path / "run.json"
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", script, str(out)], cwd=ROOT, stdout=subprocess.PIPE)
        assert process.stdout and process.stdout.readline()
        process.kill()
        process.wait()
        assert len(Run.load(out).steps) == 400
