"""How fast the page answers, measured in the browser."""

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from app.messages import pack
from app.view import session_of
from tests.app.conftest import Server, opened
from tests.app.made_up import long_run

LANES = 4
STREAM = """async (text) => {
  window.longest = 0;
  const seen = (list) => list.getEntries().forEach((entry) => (longest = Math.max(longest, entry.duration)));
  new PerformanceObserver(seen).observe({ entryTypes: ["longtask"] });
  const whole = JSON.parse(text), size = 12;
  for (let at = 0; at < 200; at += size) {
    const lanes = whole.lanes.map((lane) => ({ ...lane, state: "running", at, steps: lane.steps.slice(at, at + size) }));
    draftscope.receive(JSON.stringify({ ...whole, running: true, lanes }));
    await new Promise((done) => setTimeout(done, 100));
  }
  draftscope.receive(text);
  await new Promise((done) => setTimeout(done, 300));
}"""


@pytest.fixture
def long_page(browser: Browser, server: Server) -> Iterator[Page]:
    """The page with four lanes of 200 steps, three of them with trees."""
    runs = [long_run(None), long_run("a"), long_run("b"), long_run("c")]
    for page in opened(browser, server.url):
        page.evaluate("text => draftscope.receive(text)", pack(session_of(runs, "long", "uploaded", "Long")))
        expect(page.locator(".ds-step")).to_have_count(LANES)
        yield page


def median(page: Page, script: str) -> float:
    return page.evaluate(
        f"() => {{ const times = []; for (let i = 0; i < 21; i++) {{ {script} }} return times.sort((a, b) => a - b)[10] }}"
    )


def test_scrubbing_a_long_run_answers_within_100_ms(long_page: Page) -> None:
    spent = median(
        long_page,
        "const before = performance.now(); draftscope.select(draftscope.state.lanes[1].key, (i * 37) % 200);"
        "document.body.getBoundingClientRect(); times.push(performance.now() - before);",
    )
    print(f"scrubbing 4 lanes of 200 steps: {spent:.1f} ms, layout included")
    assert spent < 100


def test_a_tree_of_60_nodes_is_drawn_within_50_ms(long_page: Page) -> None:
    spent = median(
        long_page,
        "const lane = draftscope.state.lanes[1], before = performance.now();"
        "const drawn = draftscope.tree.draw(lane, lane.steps[i], { all: true, width: 700, zoom: 1, node: 0 });"
        "document.body.append(drawn.svg); drawn.svg.getBoundingClientRect(); times.push(performance.now() - before); drawn.svg.remove();",
    )
    print(f"a tree of 60 nodes: {spent:.1f} ms, layout included")
    assert spent < 50


def test_long_lanes_stream_without_a_long_task(page: Page, server: Server) -> None:
    """Four lanes of about 512 tokens, sent as a live run sends them: slices, ten a second."""
    runs = [long_run(None), long_run("a"), long_run("b"), long_run("c")]
    whole = session_of(runs, "stream", "live", "")
    page.evaluate(STREAM, pack(whole))
    longest = page.evaluate("longest")
    print(f"longest task while streaming: {longest:.0f} ms")
    assert page.evaluate("draftscope.state.lanes.every(lane => lane.steps.length === 200)")
    assert longest <= 200


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
