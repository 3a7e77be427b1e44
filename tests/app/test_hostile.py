"""Tokens that try to break out or to break the layout are shown, never executed."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.app.conftest import Server, opened, record_tiny, serve, tiny_models
from tests.app.tiny import HOSTILE


@pytest.fixture(scope="module")
def hostile_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("hostile")
    models = tiny_models(folder, hostile=True)
    yield from serve(models, record_tiny(models, folder / "runs", tokens=160))


@pytest.mark.parametrize("width", [1440, 390])
def test_hostile_tokens_are_text(browser: Browser, hostile_server: Server, width: int) -> None:
    for page in opened(browser, hostile_server.url, width=width):
        page.on("dialog", lambda dialog: pytest.fail(f"a token was executed: {dialog.message}"))
        everywhere(page)
        expect(page.locator(".ds-root script, .ds-root img")).to_have_count(0)
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def everywhere(page: Page) -> None:
    """Show every step, tab and view, so that every token is drawn in every way there is."""
    expect(page.locator(".ds-lane .ds-text").first).to_contain_text("<script>alert(1)</script>")
    page.get_by_label("attention mask", exact=True).check()
    for look, drawn in (("Table", ".ds-table"), ("Tree", ".ds-tree")):
        page.get_by_text(look, exact=True).click()
        expect(page.locator(f'.ds-step[data-focus="true"] {drawn}')).to_be_visible()
        expect(page.locator('.ds-step[data-focus="true"] .ds-mask')).to_be_visible()
        for step in range(1, 12):
            page.locator(".ds-slider").fill(str(step))
            expect(page.locator(".ds-readout")).to_contain_text(f"step {step} of")
    for name, part in (("Race", "#ds-race .ds-chip"), ("Lossless", ".ds-verdict")):
        page.get_by_role("tab", name=name).click()
        expect(page.locator(part).first).to_be_visible()


def test_whitespace_and_bytes_are_visible(page: Page) -> None:
    seen = page.evaluate(
        """texts => texts.map(text => {
          const box = document.createElement("div");
          box.append(...draftscope.pieces(text));
          return box.textContent;
        })""",
        [" a", "\n", "\t", "<0xE2>", "", "\u202eabc", "\u200b", *HOSTILE],
    )
    assert seen[:7] == ["·a", "⏎\n", "⇥", "E2", "∅", "U+202Eabc", "U+200B"]
    assert "👩" in seen[7 + HOSTILE.index("👩‍👩‍👧‍👦")]
    assert all(len(text) < 420 for text in seen)
