"""axe-core finds no serious or critical fault, in both themes, in every tab; nothing overflows at any width."""

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect

from tests.app.conftest import Server, opened

# each tab and what shows that it is filled
TABS = {
    "Charts": "#ds-tabs .js-plotly-plot .main-svg",
    "Race": "#ds-race .ds-chip",
    "Lossless": ".ds-verdict",
    "Why HASS, why KOALA": "#ds-tabs .js-plotly-plot .main-svg",
    "Runs": "#ds-gallery",
}


def faults(page: Page, part: str | None = None) -> list[str]:
    found = Axe().run(page, context=part, options={"resultTypes": ["violations"]}).response["violations"]
    return [f"{fault['id']}: {fault['nodes'][0]['html'][:120]}" for fault in found if fault["impact"] in ("serious", "critical")]


@pytest.mark.parametrize("dark", [False, True])
def test_no_serious_fault_in_any_tab(browser: Browser, server: Server, dark: bool) -> None:
    for page in opened(browser, server.url, dark=dark):
        page.wait_for_function("dark => document.body.classList.contains('dark') === dark", arg=dark)
        page.click("#ds-settings button")
        expect(page.get_by_label("Tree depth")).to_be_visible()
        assert faults(page) == []
        page.get_by_text("Table", exact=True).click()
        assert faults(page, "#ds-tabs") == []
        for name, filled in TABS.items():
            page.get_by_role("tab", name=name).click()
            expect(page.locator(f"{filled}:visible").first).to_be_visible()
            assert faults(page, "#ds-tabs") == [], name
        page.get_by_role("button", name="Two-minute tour").click()
        assert faults(page, ".ds-tour") == []


@pytest.mark.parametrize("width", [360, 390, 720, 1024, 1440, 2000])
def test_nothing_is_wider_than_the_window(browser: Browser, server: Server, width: int) -> None:
    for page in opened(browser, server.url, width=width):
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        cut = page.evaluate(
            """() => [...document.querySelectorAll('.ds-lane h2, .ds-figures dd, .ds-state, .ds-strip-text, .ds-readout, .ds-equal')]
              .filter(part => part.scrollWidth > part.clientWidth + 1 && getComputedStyle(part).display !== 'inline')
              .map(part => part.textContent)"""
        )
        assert cut == []


@pytest.mark.parametrize("width", [390, 1024])
def test_measured_tables_are_read_whole(browser: Browser, server: Server, width: int) -> None:
    """What a table is about isn't cut where the table scrolls, and no cell is a tower of single figures."""
    for page in opened(browser, server.url, width=width):
        page.get_by_role("tab", name="Why HASS, why KOALA").click()
        expect(page.locator(".ds-sheet").last).to_be_visible()
        ends, rows = page.evaluate(
            """() => [
              [...document.querySelectorAll('.ds-sheet figcaption')].map(node => node.getBoundingClientRect().right),
              [...document.querySelectorAll('.ds-sheet tbody tr')].map(node => node.getBoundingClientRect().height),
            ]"""
        )
        assert len(ends) > 4 and max(ends) <= width
        assert max(rows) < 70  # three lines


def test_live_regions_say_start_and_end_only(page: Page) -> None:
    page.evaluate(
        """() => {
          window.said = [];
          const node = document.getElementById('ds-status');
          new MutationObserver(() => said.push(node.textContent)).observe(node, { childList: true, characterData: true, subtree: true });
        }"""
    )
    before = page.evaluate("draftscope.state.session")
    page.click("#ds-run")
    page.wait_for_function("b => draftscope.state.session !== b && !draftscope.state.info.running", arg=before)
    said = page.evaluate("said")
    assert len(said) == 2 and said[0] == "Run started." and said[1].startswith("Run ended: Plain decoding: done, ")
