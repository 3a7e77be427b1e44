"""What does following a run cost the engine? `python -m tests.app.page_cost`, on the embedded target.

Within one run updates are sent for a while and held back for a while, in turns (`WINDOW` seconds each), so that the noise of
the machine falls on both alike. The mean step of each window with updates is compared with the mean of its two neighbours
without, which cancels a drift; printed are the median of these ratios and its 95 % interval (order statistics). Followed by a
client in another process that only takes what /compare sends: this is the engine's own cost of being watched, and exit code 1
says that it is above the bar. Followed by the page in a browser on the same machine, which competes for its cores as well.
"""

import argparse
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

from app.device import Device, Job
from app.models import Models
from app.operator import Operator
from app.page import build
from app.server import launch_options
from decoding.records import AUTOREGRESSIVE
from tests.app.conftest import FLAGS
from tests.conftest import find_browser

PROMPT = "Explain to a ten-year-old why the sea has tides. Use four short sentences."
BAR = 0.05
WINDOW = 0.6  # seconds
CLIENT = """
import json, sys
from gradio_client import Client
client = Client(sys.argv[1], verbose=False)
print("ready", flush=True)
while line := sys.stdin.readline():
    for item in client.submit(**json.loads(line), api_name="/compare"):
        pass
    print("done", flush=True)
"""
Follow = Callable[[], None]


class Watch:
    """Lets updates through in every other window, and notes how long each step took."""

    def __init__(self) -> None:
        self.steps: dict[tuple[str, int, int], list[float]] = {}  # (run, lane, window) -> milliseconds
        self._show = Job.show
        Job.show = lambda job, at_once: self.show(job, at_once)  # type: ignore[method-assign]

    def show(self, job: Job, at_once: bool) -> None:
        window = int(time.monotonic() / WINDOW)
        if at_once:
            self._show(job, at_once)
            return
        lane = next(lane for lane in job.work.lanes if lane.generation is not None)
        step = lane.generation.steps[-1]
        spent = step.draft_ms + step.verify_ms + step.accept_ms + step.commit_ms + step.record_ms
        self.steps.setdefault((job.work.request.session, job.work.lanes.index(lane), window), []).append(spent)
        if window % 2:
            self._show(job, at_once)

    def ratios(self, lane: int) -> tuple[list[float], list[float]]:
        """Of each window with updates to its neighbours without, and of two neighbours without, both minus 1."""
        mean = {key: statistics.mean(values) for key, values in self.steps.items() if key[1] == lane and len(values) >= 3}
        followed, noise = [], []
        for (run, _, window), value in mean.items():
            before, after = mean.get((run, lane, window - 1)), mean.get((run, lane, window + 1))
            if window % 2 and before and after:
                followed.append(value / ((before + after) / 2) - 1)
                noise.append(after / before - 1)
        return followed, noise


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

    def follow() -> None:
        process.stdin.write(json.dumps({"prompt": PROMPT, "methods": methods, "max_new_tokens": tokens}) + "\n")
        process.stdin.flush()
        assert process.stdout.readline() == "done\n"

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

        def follow() -> None:
            before = page.evaluate("draftscope.state.session")
            page.click("#ds-run")
            ended = "before => draftscope.state.session !== before && !draftscope.state.info.running"
            page.wait_for_function(ended, arg=before, timeout=300_000, polling=500)

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


def compare(name: str, watch: Watch, follow: Follow, seconds: float) -> float:
    """Print the cost of being followed; the larger one of the two lanes."""
    follow()  # not measured cold
    watch.steps.clear()
    start, (mine, below) = time.monotonic(), cpu_seconds()
    while time.monotonic() - start < seconds:
        follow()
    lasted, now = time.monotonic() - start, cpu_seconds()
    worst = 0.0
    for lane, what in enumerate(("plain decoding", "head")):
        ratios, noise = watch.ratios(lane)
        usual, (low, high) = statistics.median(ratios), interval(ratios)
        worst = max(worst, usual)
        step = statistics.median(ms for key, values in watch.steps.items() if key[1] == lane for ms in values)
        print(
            f"followed by {name}, {what}: {usual:+.1%} [{low:+.1%}, {high:+.1%}] of a step of {step:.0f} ms ({len(ratios)} windows; "
            f"two windows without updates differ by {statistics.median(abs(value) for value in noise):.1%})"
        )
    print(f"  meanwhile: server {(now[0] - mine) / lasted:.2f} cores, {name} {(now[1] - below) / lasted:.2f} cores", flush=True)
    return worst


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--head", default=None, help="name of a head (default: the first shipped one)")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=60, help="how long to measure each")
    parser.add_argument("--by", nargs="+", choices=("client", "browser"), default=["client", "browser"])
    options = parser.parse_args()
    models, device, watch = Models(options.target), Device(), Watch()
    head = next(offer for offer in models.offers() if offer.source != AUTOREGRESSIVE and options.head in (None, offer.source))
    methods = [AUTOREGRESSIVE, head.source]

    demo = build(models, Path(tempfile.mkdtemp()), device=device)
    _, url, _ = demo.queue().launch(prevent_thread_lock=True, quiet=True, **launch_options(models, device, Operator()))
    worst = 0.0
    if "client" in options.by:
        with by_client(url, methods, options.tokens) as follow:
            worst = compare("a client in another process", watch, follow, options.seconds)
    if "browser" in options.by:
        labels = [offer.label for offer in models.offers() if offer.source in methods]
        with by_browser(url, labels, options.tokens) as follow:
            compare("a browser on this machine", watch, follow, options.seconds)
    demo.close()
    device.close()
    return int(worst > BAR)


if __name__ == "__main__":
    raise SystemExit(main())
