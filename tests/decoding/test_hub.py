"""Fetching from the hub, with a stand-in on loopback: a hub that is away, silent, slow, or gone in the middle."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from decoding import DraftscopeError, Settings, UsageError, generate, hub
from decoding.loading import load_target
from tests.app.tiny import GOLDEN

ROOT = Path(__file__).resolve().parent.parent.parent
COMMIT = "a" * 40
PROMPT = [72, 101, 108, 108, 111]


class StandIn(ThreadingHTTPServer):
    """A hub with one repository, org/tiny: the tiny target, and files that nobody wants."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {path.name: path.read_bytes() for path in (GOLDEN / "tiny_base").iterdir()}
        self.files |= {"README.md": b"# tiny", ".gitattributes": b"x", "original/consolidated.00.pth": b"x"}
        self.how = "well"  # well | silent | slow | cut
        self.begun = threading.Event()  # some bytes of the weights are out
        self.asked: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(path)
        if self.server.how == "silent":
            time.sleep(60)
        elif not path.removeprefix("/api/models").startswith("/org/tiny"):
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif "/resolve/" in path:
            self._file(path.partition(f"/resolve/{COMMIT}/")[2])
        elif "/tree/" in path:
            rows = [{"type": "file", "path": name, "size": len(data), "oid": _id(data)} for name, data in self.server.files.items()]
            self._send(200, json.dumps(rows).encode())
        else:
            told = {"id": "org/tiny", "sha": COMMIT, "siblings": [{"rfilename": name} for name in self.server.files]}
            self._send(200, json.dumps(told).encode())

    def _file(self, name: str) -> None:
        data = self.server.files[name]
        headers = {"ETag": f'"{_id(data)}"', "X-Repo-Commit": COMMIT}
        if self.command == "HEAD" or not name.endswith(".safetensors") or self.server.how == "well":
            self._send(200, data, headers)
            return
        self.send_response(200)
        for key, value in (headers | {"Content-Length": str(len(data))}).items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data[: len(data) // 2])
        self.wfile.flush()
        self.server.begun.set()
        if self.server.how == "slow":
            for place in range(len(data) // 2, len(data)):
                time.sleep(0.05)
                self.wfile.write(data[place : place + 1])

    def _send(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(data))} | (headers or {})).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Not on the tests' output."""


def _id(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[StandIn]:
    """The hub is the stand-in, and its cache is empty."""
    server = StandIn()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 1)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 1)
    monkeypatch.setattr(hub, "ANSWER_SECONDS", 1.0)
    yield server
    server.shutdown()
    server.server_close()


def works(source: str) -> bool:
    run = generate(load_target(source, "cpu", "float32"), None, PROMPT, Settings(max_new_tokens=4, stop_token_ids=()))
    return len(run.output_ids) == 4


def test_what_is_fetched_is_what_is_needed_and_later_needs_no_hub(stand_in: StandIn) -> None:
    folder = hub.find("target", "org/tiny")
    assert {path.name for path in folder.iterdir()} == {path.name for path in (GOLDEN / "tiny_base").iterdir()}
    asked = len(stand_in.asked)
    stand_in.how = "silent"
    begun = time.monotonic()
    assert works("org/tiny") and len(stand_in.asked) == asked + 1
    assert time.monotonic() - begun < 30
    stand_in.server_close()  # nobody listens there any more
    assert works("org/tiny")


@pytest.mark.parametrize("how", ["silent", "cut", "away"])
def test_a_hub_that_fails_is_told_in_time_and_what_came_of_it_is_never_used(stand_in: StandIn, how: str) -> None:
    stand_in.how = how
    if how == "away":
        stand_in.server_close()
    for _ in range(2):  # the second time the cache holds what the first one left
        begun = time.monotonic()
        with pytest.raises(DraftscopeError, match=r"target org/tiny can't be had: .* the hub can't be reached") as failure:
            hub.find("target", "org/tiny")
        assert time.monotonic() - begun < 60 and "\n" not in str(failure.value)


def test_a_hub_that_comes_back_is_used(stand_in: StandIn) -> None:
    stand_in.how = "cut"
    with pytest.raises(DraftscopeError):
        hub.find("target", "org/tiny")
    stand_in.how = "well"
    assert works("org/tiny")


def test_an_unknown_repository_is_the_asker_s_mistake(stand_in: StandIn) -> None:
    with pytest.raises(UsageError, match="no such repository"):
        hub.find("target", "org/other")


FETCH = "import sys; from decoding import hub; print(hub.find('target', 'org/tiny'))"


def test_kill_while_weights_are_fetched_leaves_nothing_that_is_used(stand_in: StandIn, tmp_path: Path) -> None:
    stand_in.how = "slow"
    environment = {**os.environ, "HF_ENDPOINT": stand_in.url, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "0"}
    process = subprocess.Popen([sys.executable, "-c", FETCH], cwd=ROOT, env=environment)
    try:
        assert stand_in.begun.wait(120)
        time.sleep(0.5)
        process.send_signal(signal.SIGKILL)
        process.wait()
    finally:
        process.kill()
    stand_in.how = "silent"
    with pytest.raises(DraftscopeError, match="can't be had"):  # not half a target
        hub.find("target", "org/tiny")
    stand_in.how = "well"
    assert works("org/tiny")
