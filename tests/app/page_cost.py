"""What does following a run cost the engine? `python -m tests.app.page_cost`, on the embedded target.

The same request runs on the device's thread, followed by nobody and followed by somebody in turns (nobody, somebody,
nobody, somebody, ..., nobody). Sums of phase times of each followed run are compared with the mean of its two neighbours,
which cancels a drift of the machine; printed are the median of these ratios and its 95 % interval (order statistics).
Followed by a browser on the same machine, which competes for its cores, or by a client in another process that only
takes what /compare sends: this one is the engine's own cost of being watched. Exit code 1 where that is above the bar.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from playwright.sync_api import sync_playwright
from scipy.stats import binom

from app.comparison import Comparison, Request
from app.device import Device
from app.models import Models
from app.page import build
from app.theme import page_head, theme
from decoding import Run, Settings
from decoding.metrics import measure
from decoding.records import AUTOREGRESSIVE
from tests.app.conftest import FLAGS
from tests.conftest import find_browser

PROMPT = "Explain to a ten-year-old why the sea has tides. Use four short sentences."
BAR = 0.05
CLIENT = """
import json, sys
from gradio_client import Client
client = Client(sys.argv[1], verbose=False)
print("ready", flush=True)
while line := sys.stdin.readline():
    for item in client.submit(**json.loads(line), api_name="/compare"):
        last = item
    print(json.dumps(last["runs"]), flush=True)
"""
Follow = Callable[[], list[float]]


def sums(runs: list[Run]) -> list[float]:
    """Milliseconds of all phases, for each run."""
    return [sum(measure(run).phase_ms.values()) for run in runs]


def interval(values: list[float]) -> tuple[float, float]:
    """95 % interval of the median (the whole range where there are too few values for one)."""
    values = sorted(values)
    low = max(0, int(binom.ppf(0.025, len(values), 0.5)) - 1)
    return values[low], values[-1 - low]


@contextmanager
def by_client(url: str, methods: list[str], tokens: int) -> Iterator[Follow]:
    """A process that takes the updates of /compare and does nothing with them."""
    process = subprocess.Popen([sys.executable, "-c", CLIENT, url], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin and process.stdout
    process.stdout.readline()

    def follow() -> list[float]:
        process.stdin.write(json.dumps({"prompt": PROMPT, "methods": methods, "max_new_tokens": tokens}) + "\n")
        process.stdin.flush()
        return sums([Run.model_validate(raw) for raw in json.loads(process.stdout.readline())])

    yield follow
    process.stdin.close()
    process.wait()


@contextmanager
def by_browser(url: str, labels: list[str], tokens: int) -> Iterator[Follow]:
    """The page in Chromium on this machine."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_browser(), args=FLAGS)
        page = browser.new_page()
        page.goto(url)
        page.fill("#ds-prompt textarea", PROMPT)
        for label in page.locator("#ds-methods label").all():
            label.locator("input").set_checked(label.inner_text().strip() in labels)
        page.click("#ds-settings button")
        page.get_by_label("number input for New tokens").fill(str(tokens))
        page.keyboard.press("Tab")

        def follow() -> list[float]:
            before = page.evaluate("draftscope.state.session")
            page.click("#ds-run")
            ended = "before => draftscope.state.session !== before && !draftscope.state.info.running"
            page.wait_for_function(ended, arg=before, timeout=300_000, polling=500)
            return page.evaluate("draftscope.state.lanes.map(l => l.steps.reduce((sum, s) => sum + draftscope.total(s), 0))")

        yield follow
        browser.close()


def cpu_seconds() -> tuple[float, float]:
    """Of this process, and of the processes below it."""
    mine = psutil.Process(os.getpid())
    below = 0.0
    for process in mine.children(recursive=True):
        try:
            below += sum(process.cpu_times()[:2])
        except psutil.NoSuchProcess:
            continue
    return sum(mine.cpu_times()[:2]), below


def compare(name: str, alone: Follow, follow: Follow, rounds: int) -> float:
    """Print the cost of being followed; the larger one of the two lanes."""
    alone(), follow()  # neither is measured cold
    before, spent, watched = [alone()], [0.0, 0.0, 0.0], []
    for _ in range(rounds):
        start, (mine, below) = time.monotonic(), cpu_seconds()
        watched.append(follow())
        now = cpu_seconds()
        spent = [spent[0] + time.monotonic() - start, spent[1] + now[0] - mine, spent[2] + now[1] - below]
        before.append(alone())
    worst = 0.0
    for lane, what in enumerate(("plain decoding", "head")):
        ratios = [w[lane] / ((a[lane] + b[lane]) / 2) - 1 for w, (a, b) in zip(watched, itertools.pairwise(before), strict=True)]
        usual, (low, high) = statistics.median(ratios), interval(ratios)
        noise = [b[lane] / a[lane] - 1 for a, b in itertools.pairwise(before)]
        spread = statistics.median(abs(value) for value in noise)
        worst = max(worst, usual)
        print(
            f"followed by {name}, {what}: {usual:+.1%} [{low:+.1%}, {high:+.1%}] over {statistics.median(b[lane] for b in before):.0f} ms "
            f"({rounds} rounds; two runs that nobody follows differ by {spread:.1%})"
        )
    print(f"  while followed: server {spent[1] / spent[0]:.2f} cores, {name} {spent[2] / spent[0]:.2f} cores", flush=True)
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--head", default=None, help="name of a head (default: the first shipped one)")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--by", nargs="+", choices=("client", "browser"), default=["client", "browser"])
    options = parser.parse_args()
    models, device = Models(options.target), Device()
    head = next(offer for offer in models.offers() if offer.source != AUTOREGRESSIVE and options.head in (None, offer.source))
    methods = [AUTOREGRESSIVE, head.source]

    def alone() -> list[float]:
        job = device.submit(
            Comparison(models, Request(PROMPT, tuple(methods), options.target, Settings(max_new_tokens=options.tokens), ""))
        )
        job.ended.wait()
        return sums(job.work.runs)

    alone()
    demo = build(models, Path(tempfile.mkdtemp()), device)
    _, url, _ = demo.queue().launch(prevent_thread_lock=True, quiet=True, ssr_mode=False, theme=theme(), head=page_head())
    worst = 0.0
    if "client" in options.by:
        with by_client(url, methods, options.tokens) as follow:
            worst = compare("a client in another process", alone, follow, options.rounds)
    if "browser" in options.by:
        labels = [offer.label for offer in models.offers() if offer.source in methods]
        with by_browser(url, labels, options.tokens) as follow:
            compare("a browser on this machine", alone, follow, options.rounds)
    demo.close()
    device.close()
    return int(worst > BAR)


if __name__ == "__main__":
    raise SystemExit(main())
