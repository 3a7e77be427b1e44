"""What tests share: golden data, the embedded target, and a real browser."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from decoding import Target, hub, load_target
from tests.hub import StandIn

GOLDEN = Path(__file__).parent / "golden"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def pytest_configure() -> None:
    """On two cores, two threads of one process are the most that helps; OMP_NUM_THREADS may ask for fewer."""
    torch.set_num_threads(min(2, torch.get_num_threads()))
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # tests talk to nobody


@pytest.fixture(scope="session")
def tiny_target() -> Target:
    """The golden target, in float32 on the CPU."""
    return load_target(str(GOLDEN / "tiny_base"), device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def embedded_float32() -> Target:
    """The embedded target in float32 (fetched on the first use)."""
    return load_target("embedded", device="cpu", dtype="float32")


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


def find_browser() -> str:
    """Path of a Chromium: CHROMIUM_PATH, one on the PATH, else Debian's package where this machine lets us install it.

    Raises:
        LookupError: there is none; the message says what to do.
    """
    if named := os.environ.get("CHROMIUM_PATH"):
        if shutil.which(named):
            return named
        raise LookupError(f"CHROMIUM_PATH names {named!r}, which is no program")
    if found := next((path for name in BROWSERS if (path := shutil.which(name))), None):
        return found
    told = ""
    if hasattr(os, "geteuid") and os.geteuid() == 0 and shutil.which("apt-get"):
        for command in (["apt-get", "update"], ["apt-get", "install", "-y", "chromium"]):
            done = subprocess.run(
                command, check=False, capture_output=True, text=True, env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            )
            if done.returncode:
                told = f" ({' '.join(command)} failed: {done.stderr.strip().splitlines()[-1:]})"
        if found := shutil.which("chromium"):
            return found
    raise LookupError(f"no Chromium found: install it (on Debian: apt-get install chromium) or set CHROMIUM_PATH{told}")


@pytest.fixture(scope="session")
def browser_executable(pytestconfig: pytest.Config) -> str:
    """A Chromium to drive. Without one the browser tests are skipped with a reason; in CI they fail."""
    try:
        if not any(map(shutil.which, BROWSERS)):
            with pytestconfig.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
                print("\nno browser here: installing Debian's chromium, if this machine lets us (about a minute) ...", flush=True)
        return find_browser()
    except LookupError as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))
