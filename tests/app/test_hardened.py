"""A public server: limits, the queue, cancelling, failures, what is served, what a browser may run, an orderly end."""

import json
import logging
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import torch
from gradio_client import Client
from gradio_client.exceptions import AppError
from playwright.sync_api import Browser, expect

from app.cli import parse
from app.comparison import Comparison, Request
from app.device import Device
from app.log import scrub
from app.models import Models
from app.operator import Operator, from_environment
from app.requests import Requests
from decoding import Run, Settings
from decoding.errors import DraftscopeError, UsageError
from decoding.target import Target
from tests.app.conftest import DRAWN, PATIENCE, Server, opened, serve
from tests.hub import StandIn
from tests.load import Visitors

ROOT = Path(__file__).resolve().parent.parent.parent
PROMPT = " the man said that he"


def ask(server: Server, operator: Operator | None = None, tokens: int = 24, **values: object) -> Comparison:
    settings = Settings(max_new_tokens=tokens, **values)
    return Comparison(server.models, Request(PROMPT, ("autoregressive",), server.models.source, settings, "test"), operator)


def run(server: Server, work: Comparison) -> Comparison:
    job = server.device.submit(work)
    assert job.ended.wait(60)
    return work


# ---- many visitors ---------------------------------------------------------------------------------------------------
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


# ---- cancel and loss -------------------------------------------------------------------------------------------------
def wait_until(true: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.05)


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


# ---- failures --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("raised", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB"), "out of memory"),
        (MemoryError(), "out of memory"),
        (DraftscopeError("the hub can't be reached"), "the hub can't be reached"),
        (OSError(28, "No space left on device"), "disk is full"),
        (FileNotFoundError(2, "No such file", "/secret/place/model.safetensors"), "a file is missing on the server: model.safetensors"),
        (ZeroDivisionError("x = 1 / 0"), "something broke here that should not (ZeroDivisionError)"),
    ],
)
def test_a_failure_is_told_with_an_id_that_the_log_explains(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, raised: Exception, words: str
) -> None:
    loaded = run(server, ask(server))
    assert not loaded.failed

    def fails(*_: object, **__: object) -> None:
        raise raised

    for place, name in ((Target, "forward"), (Models, "head")):
        with monkeypatch.context() as patch, caplog.at_level(logging.INFO, "draftscope"):
            patch.setattr(place, name, fails)
            broken = run(server, ask(server))
        message = broken.note or broken.runs[0].error or ""
        assert words in message and "/secret" not in message and "Traceback" not in message
        number = re.search(r"under id (\w+)", message)
        if number:  # the engine's own words for memory carry none where the lane's error is that of the run
            assert any(number[1] in line and type(raised).__name__ in line for line in caplog.messages)
    assert run(server, ask(server)).runs[0].output_ids == loaded.runs[0].output_ids  # the state from before is intact


def test_logits_that_are_no_numbers_fail_the_lane_in_words(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    run(server, ask(server))
    monkeypatch.setattr(Target, "logits", lambda self, features: torch.full((len(features), self.vocab_size), float("nan")))
    assert "not numbers" in (run(server, ask(server)).runs[0].error or "")


def test_a_record_that_can_t_be_kept_is_told(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    work = run(server, ask(server, Operator(save_runs=tmp_path / "file")))
    assert "could not be kept" in work.note and work.runs[0].finish_reason == "length"


@pytest.mark.parametrize("wanted", [False, True])
def test_a_run_is_one_line_of_the_log_with_its_prompt_only_where_that_is_wanted(
    server: Server, caplog: pytest.LogCaptureFixture, wanted: bool
) -> None:
    with caplog.at_level(logging.INFO, "draftscope"):
        work = run(server, ask(server, Operator(log_prompts=wanted), tokens=8, temperature=0.5))
    (line,) = [told for told in map(json.loads, caplog.messages) if told["event"] == "run"]
    assert (line["id"], line["outcome"], line["tokens"], line["settings"]["temperature"]) == ("test", "length", 8, 0.5)
    assert line["tau"] == 1 and line["tokens_per_second"] > 0 and line["error"] is None
    assert line.get("prompt") == (work.runs[0].prompt_text if wanted else None) and (PROMPT in str(caplog.messages)) == wanted


# ---- limits ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("limit", "values", "words"),
    [
        ({"max_new_tokens": 10}, {"tokens": 11}, "max_new_tokens is 11: this server allows 10"),
        ({"max_tree_nodes": 8}, {"tree_nodes": 9}, "tree_nodes is 9: this server allows 8"),
        ({"max_tree_depth": 2}, {"tree_depth": 3}, "tree_depth is 3: this server allows 2"),
        ({"max_prompt_chars": 5}, {}, "characters: this server takes 5"),
    ],
)
def test_the_operator_s_limits_hold(server: Server, limit: dict, values: dict, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ask(server, Operator(**limit), **values)


def test_limits_hold_on_the_api_and_a_long_run_is_stopped(server: Server, held_target: threading.Event) -> None:
    held_target.set()
    work = run(server, ask(server, Operator(max_run_seconds=1e-6), tokens=64))
    assert work.runs[0].finish_reason == "cancelled" and "at most" in work.note
    for other in serve(server.models, server.runs, Operator(max_new_tokens=8)):
        with pytest.raises(AppError, match="this server allows 8"):
            Client(other.url, verbose=False).predict(prompt=PROMPT, methods=["autoregressive"], max_new_tokens=9, api_name="/compare")


@pytest.mark.parametrize(("most", "label", "words"), [(1, "Methods (one)", "choose one"), (2, "Methods (one or two)", "choose one or two")])
def test_the_number_of_methods_is_the_operator_s_on_page_and_api_alike(
    browser: Browser, server: Server, most: int, label: str, words: str
) -> None:
    methods = ["autoregressive", *server.models.extra_heads]
    for other in serve(server.models, server.runs, Operator(max_lanes=most)):
        client = Client(other.url, verbose=False)
        with pytest.raises(AppError, match=f"3 methods chosen: {words}"):
            client.predict(prompt=PROMPT, methods=methods, api_name="/compare")
        assert len(client.predict(prompt=PROMPT, methods=methods[:most], max_new_tokens=4, api_name="/compare")["runs"]) == most
        for page in opened(browser, other.url):
            expect(page.get_by_text(label, exact=True)).to_be_visible()
            page.click("#ds-run")  # as many as are allowed are chosen already
            page.wait_for_function("draftscope.state.info.kind === 'live' && !draftscope.state.info.running")
            expect(page.locator(".ds-state")).to_have_text(["finished"] * most)
            page.locator("#ds-methods").get_by_label("hass", exact=True).check()
            page.click("#ds-run")
            expect(page.get_by_role("alert")).to_contain_text(f"{most + 1} methods chosen: {words}")
        for page in opened(browser, other.url, "?methods=" + ",".join(methods)):
            expect(page.get_by_role("alert")).to_contain_text(f"3 methods chosen: {words}")


def test_more_methods_than_four_where_the_operator_allows_them(server: Server, tmp_path: Path) -> None:
    heads = [shutil.copytree(server.models.extra_heads[0], tmp_path / f"head{number}") for number in range(4)]
    models = Models(server.models.source, "cpu", "float32", tuple(map(str, heads)))
    request = Request(PROMPT, ("autoregressive", *map(str, heads)), models.source, Settings(max_new_tokens=4), "test")
    with pytest.raises(UsageError, match="5 methods chosen: choose 2 to 4"):
        Comparison(models, request)
    work = run(server, Comparison(models, request, Operator(max_lanes=5)))
    assert len(work.runs) == 5 and len({tuple(one.output_ids) for one in work.runs}) == 1


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"prompt": None}, "prompt is None: text was expected"),
        ({"prompt": [{"role": "system", "content": "x"}]}, "text was expected"),
        ({"methods": "autoregressive"}, "a list of names was expected"),
        ({"methods": None}, "a list of names was expected"),
        ({"methods": [["autoregressive"]]}, "the method is ['autoregressive']: text was expected"),
        ({"methods": []}, "0 methods chosen"),
        ({"target": 5}, "target is 5: text was expected"),
        ({"prompt": "half \ud83d"}, "the prompt is not valid text"),
        ({"methods": ["half \ud83d"]}, "the method is not valid text"),
        ({"prompt": " \n"}, "the prompt is empty"),
        ({"max_new_tokens": "many"}, "max_new_tokens"),
        ({"seed": {}}, "seed"),
    ],
)
def test_values_of_another_kind_are_refused_in_words(server: Server, asked: dict, words: str) -> None:
    body = {"prompt": PROMPT, "methods": ["autoregressive"], **asked}
    sent = httpx.post(server.url + "gradio_api/call/v2/compare", content=json.dumps(body), headers={"Content-Type": "application/json"})
    event = sent.json()["event_id"]
    told = httpx.get(f"{server.url}gradio_api/call/compare/{event}", timeout=60).text
    assert told.startswith("event: error") and words in json.loads(told.split("data: ", 1)[1])["error"]
    assert "log tells more" not in told, "the visitor's own mistake counts as the server's"


def test_limits_come_from_arguments_and_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSCOPE_MAX_NEW_TOKENS", "99")
    monkeypatch.setenv("DRAFTSCOPE_HEAD", "one two")
    monkeypatch.setenv("DRAFTSCOPE_ALLOW_CUSTOM_MODELS", "0")
    assert Operator.of(parse([])).max_new_tokens == 99
    assert Operator.of(parse(["--max-new-tokens", "5"])).max_new_tokens == 5
    assert parse([]).head == ["one", "two"] and not parse([]).allow_custom_models
    monkeypatch.setenv("DRAFTSCOPE_MAX_WAITING", "-1")
    with pytest.raises(SystemExit) as ended:
        parse([])
    assert ended.value.code == 2
    assert from_environment(ArgumentParser()) == []


def test_a_space_takes_no_foreign_models_unless_it_is_allowed(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    models = Models(server.models.source, "cpu", "float32")
    with pytest.raises(UsageError, match="unknown target"):
        models.check("someone/model", ["autoregressive"])
    models.allow_custom, models.allow_local = True, False
    models.check("someone/model", ["autoregressive"])
    for path in ("/etc", "../x", "assets/heads", "a/b/c", "~/x"):
        with pytest.raises(UsageError, match="no hub id"):
            models.check(path, ["autoregressive"])
        with pytest.raises(UsageError, match="no hub id"):
            models.check(server.models.source, ["autoregressive", path])


# ---- what is served, and what a browser may run ----------------------------------------------------------------------
@pytest.mark.parametrize(
    "path",
    [
        "gradio_api/file=app.py", "gradio_api/file=README.md", "gradio_api/file=../app.py", "gradio_api/file=/etc/passwd",
        "gradio_api/file=%2e%2e/app.py", "gradio_api/file=assets/../app.py", "gradio_api/file=.git/config", "app.py", "assets/style.css",
        "static/../../app.py", "theme.css/../app.py", "file=app.py", "gradio_api/file=link", ".env",
    ],
)  # fmt: skip
def test_only_intended_files_are_served(server: Server, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if path.endswith("link"):
        link = tmp_path / "link"
        link.symlink_to("/etc/passwd")
        path = f"gradio_api/file={link}"
    answer = httpx.get(server.url + path)
    assert answer.status_code in (403, 404, 405) and "root:" not in answer.text and "import" not in answer.text


def test_foreign_scripts_do_not_run(browser: Browser, server: Server) -> None:
    blocked: list[str] = []
    other = browser.new_page()
    other.on("console", lambda message: blocked.append(message.text) if message.type == "error" else None)
    other.goto(server.url)
    other.wait_for_selector(".ds-lane .ds-chip")
    other.evaluate(
        """() => { document.body.insertAdjacentHTML('beforeend', '<img src="x:" onerror="window.bad = 1"><svg onload="window.bad = 2">');
        const script = document.createElement('script'); script.textContent = 'window.bad = 3'; document.body.append(script);
        const far = document.createElement('script'); far.src = 'https://example.com/x.js'; document.body.append(far); }"""
    )
    other.wait_for_timeout(0)  # lets the messages in
    wait_until(lambda: other.evaluate("1") and len(blocked) >= 3)
    assert other.evaluate("window.bad") is None
    other.close()


def test_every_answer_carries_a_policy_and_the_nonce_is_new_each_time(server: Server) -> None:
    policies = [httpx.get(server.url).headers["content-security-policy"] for _ in range(2)]
    assert policies[0] != policies[1] and all("'unsafe-inline'" not in policy.split("style-src")[0] for policy in policies)
    health = httpx.get(server.url + "health")
    assert health.json()["status"] == "ok" and "sandbox" in health.headers["content-security-policy"]


def test_a_checkpoint_with_code_in_it_does_not_run(server: Server, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "ran",))

    head = tmp_path / "head"
    head.mkdir()
    (head / "config.json").write_text((Path(server.models.extra_heads[0]) / "config.json").read_text())
    (head / "pytorch_model.bin").write_bytes(pickle.dumps({"fc.weight": Bomb()}))
    torch.save({"fc.weight": Bomb()}, head / "pytorch_model.bin")
    models = Models(server.models.source, "cpu", "float32", (str(head),))
    with pytest.raises(DraftscopeError):
        models.head(str(head), models.target(server.models.source))
    assert not (tmp_path / "ran").exists()


def copied(server: Server, folder: Path) -> Path:
    return Path(shutil.copytree(server.models.source, folder / "target"))


def test_a_target_with_code_in_its_weights_does_not_run_it(server: Server, tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple:
            return (Path.touch, (tmp_path / "ran",))

    target = copied(server, tmp_path)
    for weights in target.glob("*.safetensors*"):
        weights.unlink()
    models = Models(server.models.source, "cpu", "float32")
    wanted = models.target(models.source).name
    for write in (
        lambda path: path.write_bytes(pickle.dumps({"model.norm.weight": Bomb()})),
        lambda path: torch.save({"model.norm.weight": Bomb()}, path),
    ):
        write(target / "pytorch_model.bin")
        with pytest.raises(DraftscopeError, match="can't be loaded"):
            models.target(str(target))
        assert not (tmp_path / "ran").exists() and models.target(models.source).name == wanted


@pytest.mark.parametrize("part", ["config.json", "tokenizer_config.json"])
def test_a_target_that_brings_code_of_its_own_does_not_run_it(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def asked(*_: object) -> str:
        pytest.fail("somebody is asked on the terminal whether to trust it")

    monkeypatch.setattr("builtins.input", asked)
    target = copied(server, tmp_path)
    ran = f"from pathlib import Path; Path({str(tmp_path / 'ran')!r}).touch()\nclass Own: pass\n"
    (target / "own.py").write_text(ran)
    told = json.loads((target / part).read_text())
    told["auto_map"] = {"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own", "AutoTokenizer": ["own.Own", "own.Own"]}
    told |= {"model_type": "of_its_own", "tokenizer_class": "Own"}
    (target / part).write_text(json.dumps(told))
    with suppress(DraftscopeError):  # refused, or loaded as the kind that transformers knows
        Models(str(target), "cpu", "float32").target(str(target))
    assert not (tmp_path / "ran").exists()


def test_a_file_that_is_too_large_is_refused_in_words(browser: Browser, server: Server) -> None:
    for other in serve(server.models, server.runs, Operator(max_upload_mb=1)):
        for size, status in ((1 << 20, 200), ((1 << 20) + 1, 413)):
            answer = httpx.post(other.url + "gradio_api/upload", files={"files": ("run.json", b"x" * size)}, timeout=60)
            assert answer.status_code == status
        assert answer.text == "File size exceeded maximum allowed size of 1048576 bytes."
        page = browser.new_page()
        page.goto(other.url)
        page.wait_for_function(DRAWN)
        page.get_by_role("tab", name="Runs").click()
        with page.expect_file_chooser() as waiting:
            page.click("#ds-upload")
        waiting.value.set_files({"name": "run.json", "mimeType": "application/json", "buffer": b"x" * (2 << 20)})
        expect(page.get_by_role("alert")).to_contain_text("run.json has 2 MB: this server takes files of 1 MB at most")
        expect(page.locator(".ds-lane")).to_have_count(3)
        page.close()


def test_no_token_of_the_hub_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret-value")
    assert scrub("a hf_abcdefghij b secret-value c") == "a hf_*** b *** c"
