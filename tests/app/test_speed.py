"""How fast the page answers, measured in the browser."""

import json
import subprocess
import sys
from collections.abc import Iterator
from statistics import median

import pytest
from playwright.sync_api import Browser, Page, expect

from app.messages import pack
from app.view import session_of
from tests.app.conftest import Server, opened
from tests.app.made_up import long_run

LANES, STEPS = 4, 200


class Clock:
    """CPU time of the page's main thread: script, style, layout and paint. Other work on the machine does not count."""

    def __init__(self, page: Page) -> None:
        self.page, self.tools = page, page.context.new_cdp_session(page)
        self.tools.send("Performance.enable", {"timeDomain": "threadTicks"})

    def spent(self, script: str, argument: object = None) -> float:
        """ms that a script costs until its result is on the screen."""
        before = self._now()
        self.page.evaluate(script, argument)
        self.page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return 1000 * (self._now() - before)

    def _now(self) -> float:
        told = self.tools.send("Performance.getMetrics")["metrics"]
        return next(entry["value"] for entry in told if entry["name"] == "TaskDuration")


@pytest.fixture
def long_page(browser: Browser, server: Server) -> Iterator[Page]:
    """The page with four lanes of 200 steps, three of them with trees."""
    runs = [long_run(None), long_run("a"), long_run("b"), long_run("c")]
    for page in opened(browser, server.url):
        page.evaluate("text => draftscope.receive(text)", pack(session_of(runs, "long", "uploaded", "Long")))
        expect(page.locator(".ds-step")).to_have_count(LANES)
        yield page


def test_scrubbing_a_long_run_answers_within_100_ms(long_page: Page) -> None:
    clock = Clock(long_page)
    select = "step => draftscope.select(draftscope.state.lanes[1].key, step)"
    spent = median(clock.spent(select, (step * 37) % STEPS) for step in range(11))
    print(f"scrubbing 4 lanes of 200 steps: {spent:.1f} ms, until it is painted")
    assert spent < 100


def test_a_tree_of_60_nodes_is_drawn_within_50_ms(long_page: Page) -> None:
    clock = Clock(long_page)
    draw = """step => {
      const lane = draftscope.state.lanes[1];
      const { svg } = draftscope.tree.draw(lane, lane.steps[step], { all: true, width: 700, height: 480, zoom: 1, node: 0 });
      document.body.prepend(svg);
      svg.getBoundingClientRect();
    }"""
    spent = []
    for step in range(11):
        spent.append(clock.spent(draw, step))
        long_page.evaluate("document.body.firstChild.remove()")
    print(f"a tree of 60 nodes: {median(spent):.1f} ms, until it is painted")
    assert median(spent) < 50


def test_long_lanes_stream_without_a_long_task(page: Page) -> None:
    """Four lanes of about 512 tokens, one after the other, sent as a live run sends them: slices of new steps."""
    whole = session_of([long_run(None), long_run("a"), long_run("b"), long_run("c")], "stream", "live", "")
    clock, size, spent = Clock(page), 10, []
    for running in range(LANES):
        for at in range(0, STEPS, size):
            lanes = [
                {
                    **lane,
                    "state": "done" if nth < running else "running" if nth == running else "waiting",
                    "at": at if nth == running else 0,
                    "steps": lane["steps"][at : at + size] if nth == running else [],
                }
                for nth, lane in enumerate(whole["lanes"])
            ]
            spent.append(clock.spent("text => draftscope.receive(text)", pack({**whole, "running": True, "lanes": lanes})))
    ended = clock.spent("text => draftscope.receive(text)", pack(whole))
    print(f"an update: {median(spent):.1f} ms at the median, {max(spent):.0f} ms at most, the end {ended:.0f} ms, until painted")
    assert page.evaluate(f"draftscope.state.lanes.every(lane => lane.steps.length === {STEPS})")
    assert max(*spent, ended) <= 200


def test_an_update_changes_the_running_lane_only(page: Page) -> None:
    """While one lane streams, nothing in the finished ones is touched: no chip, no bar, no tree."""
    whole = session_of([long_run(None), long_run("a"), long_run("b")], "quiet", "live", "")
    changed = page.evaluate(
        """async (text) => {
          const whole = JSON.parse(text);
          const send = (state, at, end) => {
            const lanes = whole.lanes.map((lane, nth) => nth < 2
              ? { ...lane, state: "done", at: 0, steps: nth || !at ? lane.steps.slice(0, at ? 0 : 20) : [] }
              : { ...lane, state, at, steps: lane.steps.slice(at, end) });
            draftscope.receive(JSON.stringify({ ...whole, running: true, lanes }));
          };
          send("running", 0, 20);
          const seen = new Set();
          new MutationObserver((list) => list.forEach(({ target }) => {
            const part = target.parentElement?.closest(".ds-lane, .ds-step") || target.closest?.(".ds-lane, .ds-step");
            if (part) seen.add([...part.parentNode.children].indexOf(part));
          })).observe(document.querySelector(".ds-lanes"), { subtree: true, childList: true, characterData: true });
          send("running", 20, 22);
          await new Promise(requestAnimationFrame);
          return [...seen];
        }""",
        pack(whole),
    )
    assert changed == [2]


def test_slices_that_overlap_or_repeat_change_nothing(page: Page) -> None:
    whole = session_of([long_run(None), long_run("a")], "slices", "live", "")
    page.evaluate(
        """(text) => {
          const whole = JSON.parse(text);
          for (const [at, end] of [[0, 5], [3, 9], [3, 9], [0, 12], [9, 12], [12, 20], [8, 20]]) {
            const lanes = whole.lanes.map((lane) => ({ ...lane, at, steps: lane.steps.slice(at, end) }));
            draftscope.receive(JSON.stringify({ ...whole, running: true, lanes }));
          }
        }""",
        pack(whole),
    )
    assert page.evaluate("draftscope.state.lanes.map(lane => lane.steps.length)") == [20, 20]
    assert page.evaluate("draftscope.state.lanes[1].starts.slice(0, 4)") == [1, 4, 7, 10]
    expect(page.locator(".ds-lane").nth(1).locator(".ds-chip")).to_have_count(1 + 20 * 3)


def test_first_view_does_not_import_torch() -> None:
    script = "import sys, app.page, app.models; app.page.build(app.models.Models()); print(json.dumps('torch' in sys.modules))"
    told = subprocess.run([sys.executable, "-c", f"import json; {script}"], capture_output=True, text=True, check=True)
    assert json.loads(told.stdout.strip().splitlines()[-1]) is False
