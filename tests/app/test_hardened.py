"""A public server: failures in words, and the operator's limits."""

import json
import logging
import os
import re
import shutil
import threading
from argparse import ArgumentParser
from pathlib import Path

import httpx
import pytest
import torch
from gradio_client import Client
from gradio_client.exceptions import AppError
from playwright.sync_api import Browser, expect

from app.cli import parse
from app.comparison import Comparison, Request
from app.models import Models
from app.operator import Operator, from_environment
from decoding import Settings
from decoding.errors import DraftscopeError, UsageError
from decoding.target import Target
from tests.app.asking import PROMPT, ask, run
from tests.app.conftest import Server, opened, serve


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


def test_kept_records_give_way_to_newer_ones(server: Server, tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / f"{name}.json").write_bytes(b" " * 600_000)
        os.utime(tmp_path / f"{name}.json", (ord(name), ord(name)))
    (tmp_path / "notes.txt").write_bytes(b" " * 3_000_000)
    run(server, ask(server, Operator(save_runs=tmp_path, max_saved_mb=1)))
    kept = sorted(path.name for path in tmp_path.iterdir())
    assert len(kept) == 3 and kept[-2:] == ["d.json", "notes.txt"], "the new record, the newest old one that fits, no other file"


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
