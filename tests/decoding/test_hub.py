"""Fetching from the hub, with a stand-in on loopback: a hub that is away, silent, slow, or gone in the middle."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from decoding import DraftscopeError, Settings, UsageError, generate, hub
from decoding.loading import load_target
from tests.app.tiny import GOLDEN
from tests.hub import StandIn

ROOT = Path(__file__).resolve().parent.parent.parent
PROMPT = [72, 101, 108, 108, 111]


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
