"""What tests share: golden data, the embedded target, and a real browser."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from decoding import Target, load_target

GOLDEN = Path(__file__).parent / "golden"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def pytest_configure() -> None:
    """On two cores, two threads of one process are the most that helps."""
    torch.set_num_threads(min(2, os.cpu_count() or 1))


@pytest.fixture(scope="session")
def tiny_target() -> Target:
    """The golden target, in float32 on the CPU."""
    return load_target(str(GOLDEN / "tiny_base"), device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def embedded_float32() -> Target:
    """The embedded target in float32 (fetched on the first use)."""
    return load_target("embedded", device="cpu", dtype="float32")


def _find_browser() -> str | None:
    named = os.environ.get("CHROMIUM_PATH")
    return named or next((path for name in BROWSERS if (path := shutil.which(name))), None)


@pytest.fixture(scope="session")
def browser_executable() -> str:
    """Path of a Chromium: CHROMIUM_PATH, one on the PATH, else Debian's package where this machine lets us install it."""
    if found := _find_browser():
        return found
    if os.name == "posix" and os.geteuid() == 0 and shutil.which("apt-get"):
        print("installing chromium (Debian's package) for the browser tests ...", flush=True)
        for command in (["apt-get", "update", "-qq"], ["apt-get", "install", "-y", "-qq", "chromium"]):
            subprocess.run(command, check=False, stdout=subprocess.DEVNULL)
        if found := _find_browser():
            return found
    message = "no Chromium found: install it (on Debian: apt-get install chromium) or set CHROMIUM_PATH"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)
