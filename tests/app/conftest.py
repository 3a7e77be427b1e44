"""The page in a real browser, on the tiny target: a server of its own, recorded runs made with it, one context per test."""

import itertools
import json
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Browser, Page, expect, sync_playwright

from app.device import Device
from app.models import Models
from app.operator import Operator
from app.page import build
from app.record import main as record
from app.server import launch_options
from decoding.target import Target
from tests.app.tiny import tiny_head, tiny_target

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@dataclass
class Server:
    """A running page."""

    url: str
    models: Models
    runs: Path
    device: Device


PATIENCE = 120_000  # ms: only a test that fails waits for so long, and a busy machine is no reason to fail
expect.set_options(timeout=PATIENCE / 2)
TWO_HEADS = {"eagle": "eagle2_tiny/head_bias", "hass": "hass_tiny/head_mid"}


def tiny_models(folder: Path, hostile: bool = False, heads_of: Mapping[str, str] = TWO_HEADS) -> Models:
    """A registry with the tiny target and heads that draft well for it: method -> golden head."""
    target = tiny_target(folder / "tiny", hostile)
    heads = [tiny_head(source, folder / name, name, "tiny") for name, source in heads_of.items()]
    return Models(str(target), "cpu", "float32", tuple(map(str, heads)))


def serve(models: Models, runs: Path, operator: Operator | None = None, **options: object) -> Iterator[Server]:
    """Launch the page on a free loopback port and close it afterwards."""
    operator = operator or Operator()
    device = Device(operator.max_waiting)
    demo = build(models, runs, operator, device, **options)
    launch = launch_options(models, device, operator)
    _, url, _ = demo.queue().launch(server_name="127.0.0.1", prevent_thread_lock=True, quiet=True, **launch)
    yield Server(url, models, runs, device)
    device.close()
    demo.close()


def record_tiny(models: Models, out: Path, tokens: int = 64) -> Path:
    """Recorded runs of the tiny target, made by the command that makes the shipped ones."""
    prompts = out.parent / "prompts.jsonl"
    lines = [
        {"id": "one", "category": "Tiny", "turns": [" the man said that he"]},
        {"id": "two", "category": "Small", "turns": [" she will"]},
    ]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    heads = [part for source in models.extra_heads for part in ("--head", source)]
    asked = ["--target", models.source, *heads, "--device", "cpu", "--dtype", "float32", "--prompts", str(prompts)]
    assert record([*asked, "--max-new-tokens", str(tokens), "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """The tiny target gains nothing from a second thread, and loses much where the cores are busy with other work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("page")
    models = tiny_models(folder)
    yield from serve(models, record_tiny(models, folder / "runs"))


@pytest.fixture(scope="package")
def browser(browser_executable: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=browser_executable, args=FLAGS)
        yield running
        running.close()


# every lane has its chips, and every lane with a head that has room (on a phone: the selected one) has its tree:
# what an opened page shows without a click
DRAWN = """() => {
  const lanes = window.draftscope?.state.lanes ?? [];
  const full = (name) => document.querySelectorAll(name).length === lanes.length;
  const roomy = [...document.querySelectorAll(".ds-scroll")].filter((part) => part.clientWidth);
  return lanes.length && full(".ds-lane:has(.ds-chip)") && full(".ds-step") && roomy.length
    && roomy.every((part) => part.querySelector(".ds-tree"));
}"""


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Page]:
    """The opened page; fails the test on any script error or message of the console's error level."""
    yield from opened(browser, server.url)


def opened(browser: Browser, url: str, query: str = "", width: int = 1440, dark: bool = False, height: int = 900) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light")
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    page.goto(url + query)
    page.wait_for_function(DRAWN)
    yield page
    context.close()
    assert not wrong


@pytest.fixture
def held_target(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Target forwards take 30 ms more, and from the 40th on they wait for the event: a run can be met while it runs."""
    forward, free, count = Target.forward, threading.Event(), itertools.count()

    def slowly(self: Target, *arguments: object) -> object:
        time.sleep(0.03)
        if next(count) >= 40:
            free.wait(120)
        return forward(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Target, "forward", slowly)
    yield free
    free.set()
