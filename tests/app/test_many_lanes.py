"""A recording with more lanes than a view shows, Medusa's among them."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect

from tests.app.conftest import PATIENCE, Server, opened, record_tiny, serve, tiny_models

HEADS = {
    "eagle": "eagle2_tiny/head_bias",
    "hass": "hass_tiny/head_mid",
    "koala-eagle": "eagle2_tiny/head_bias",
    "medusa": "medusa_tiny",
    "koala-medusa": "medusa_tiny",
}


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("many")
    models = tiny_models(folder, heads_of=HEADS)
    yield from serve(models, record_tiny(models, folder / "runs", tokens=40))


def test_the_lanes_of_a_recording_are_chosen(browser: Browser, many: Server) -> None:
    for page in opened(browser, many.url):
        expect(page.locator(".ds-lane h2")).to_have_text(["Plain decoding", "EAGLE", "HASS", "KOALA-EAGLE"])
        page.get_by_role("tab", name="Runs").click()
        lanes = page.locator("#ds-shown")
        lanes.get_by_label("KOALA-EAGLE").uncheck()
        expect(page.locator(".ds-lane h2")).to_have_text(["Plain decoding", "EAGLE", "HASS"])
        lanes.get_by_label("Medusa", exact=True).check()
        expect(page.locator(".ds-lane h2")).to_have_text(["Plain decoding", "EAGLE", "HASS", "Medusa"])
        page.wait_for_function("decodeURIComponent(location.search).includes('methods=autoregressive,eagle,hass,medusa')")
        lanes.get_by_label("KOALA-Medusa").check()
        expect(page.get_by_role("alert")).to_contain_text("a view shows 4 lanes at most")
        expect(page.locator(".ds-lane")).to_have_count(4)


def test_a_lane_that_an_address_names_is_among_them(browser: Browser, many: Server) -> None:
    for page in opened(browser, many.url, "?run=two&lane=koala-medusa&step=2"):
        expect(page.locator(".ds-lane[data-focus=true] h2")).to_have_text("KOALA-Medusa")
        expect(page.locator(".ds-lane")).to_have_count(4)
    for page in opened(browser, many.url, "?run=two&methods=eagle,nothing"):
        expect(page.get_by_role("alert")).to_contain_text("the recording has no lane 'nothing'")


def test_medusa_is_shown_as_what_it_is(browser: Browser, many: Server) -> None:
    for page in opened(browser, many.url, "?run=one&methods=autoregressive,hass,medusa,koala-medusa&lane=medusa&step=1"):
        lane = page.locator(".ds-lane[data-method=medusa]")
        expect(lane.locator(".ds-facts")).to_contain_text("1 block per position")
        expect(lane.locator(".ds-facts")).to_contain_text("static tree: depth 4, top-k 10, 63 nodes")
        expect(page.locator(".ds-step[data-method=medusa] .ds-node")).to_have_count(65)
        page.get_by_role("tab", name="Why HASS, why KOALA").click()
        expect(page.locator(".ds-card[data-method=koala-eagle] .ds-seen")).to_contain_text("KOALA-Medusa beside Medusa: tau")
        expect(page.get_by_text("Medusa and KOALA-Medusa guess every position from one true feature").first).to_be_visible()


def test_a_view_that_an_address_names_is_the_first_to_be_drawn(browser: Browser, many: Server) -> None:
    seen = """window.seen = [];
    new MutationObserver(() => {
      const title = document.querySelector(".ds-title")?.textContent;
      if (title && window.seen.at(-1) !== title) window.seen.push(title);
    }).observe(document, { subtree: true, childList: true, characterData: true });"""
    titles = []
    for query in ("", "?run=two&lane=hass&step=1"):
        with browser.new_context() as context:
            context.add_init_script(seen)
            page = context.new_page()
            page.goto(many.url + query)
            page.locator(".ds-node").first.wait_for(timeout=PATIENCE)
            titles.append(page.evaluate("window.seen"))
    opening, named = titles
    assert len(opening) == len(named) == 1 and opening != named
