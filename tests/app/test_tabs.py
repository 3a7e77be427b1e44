"""Charts, race, lossless, why, runs, tour and address, in a real browser."""

import json
from pathlib import Path

from playwright.sync_api import Browser, Page, expect

from tests.app.conftest import Server, opened


def tab(page: Page, name: str) -> None:
    page.get_by_role("tab", name=name).click()


def upload(page: Page, *files: Path) -> None:
    with page.expect_file_chooser() as waiting:
        page.click("#ds-upload")
    waiting.value.set_files(files)


def test_charts_are_drawn_for_the_recorded_run(page: Page) -> None:
    tab(page, "Charts")
    expect(page.locator(".ds-chart .js-plotly-plot")).to_have_count(5)
    expect(page.locator(".ds-chart .ds-note").first).to_contain_text("A step of plain decoding takes")


def test_race_replays_all_lanes_on_one_clock(page: Page) -> None:
    tab(page, "Race")
    race = page.locator("#ds-race")
    expect(race).to_contain_text("Replay")
    counts = race.locator(".ds-race-count")
    expect(counts.first).to_contain_text("64 tokens in")
    race.get_by_label("Pace of the replay").select_option("10")
    race.get_by_role("button", name="Restart").click()
    page.wait_for_function("document.querySelectorAll('.ds-race-count')[2].textContent.includes(' of ')")
    page.wait_for_function("[...document.querySelectorAll('.ds-race-count')].every(c => c.textContent.includes('tokens in'))")
    expect(race.locator(".ds-race-text").nth(1).locator(".ds-chip")).to_have_count(64)
    expect(race.get_by_role("button", name="Start", exact=True)).to_be_visible()


def test_lossless_says_equal_in_words(page: Page) -> None:
    tab(page, "Lossless")
    expect(page.locator(".ds-verdict")).to_have_text(["= equal", "= equal"])
    expect(page.locator(".ds-card").get_by_text("All 64 tokens that both have are the same.").first).to_be_visible()


def test_why_shows_drift_break_even_and_the_papers(page: Page) -> None:
    tab(page, "Why HASS, why KOALA")
    expect(page.get_by_text("What it sees in training is what it sees while drafting.")).to_be_visible()
    expect(page.locator(".ds-card[data-method=hass] .ds-seen")).to_contain_text("On this run: HASS beside EAGLE: tau 6.")
    notes = page.locator(".ds-chart .ds-note:visible")
    expect(notes.first).to_contain_text("the cosine goes from")
    expect(page.get_by_text("A head pays where its point lies above the line.")).to_be_visible()
    expect(page.get_by_text("HASS paper (arXiv 2408.15766")).to_be_visible()


def test_another_recording_fills_lanes_prompt_and_address(page: Page) -> None:
    tab(page, "Runs")
    page.get_by_role("radio", name="Small").check()
    expect(page.locator(".ds-title")).to_have_text("Small")
    expect(page.locator("#ds-prompt textarea")).to_have_value(" she will")
    page.wait_for_function("location.search.includes('run=two')")


def test_what_is_shown_can_be_downloaded_and_uploaded_again(page: Page, tmp_path: Path) -> None:
    tab(page, "Runs")
    files = []
    for name in ("1-autoregressive.json", "3-hass.json"):
        with page.expect_download() as waiting:
            page.locator(f'a[download="{name}"]').click()
        files.append(tmp_path / name)
        waiting.value.save_as(files[-1])
    assert json.loads(files[0].read_text())["schema"] == "draftscope.run/1"
    upload(page, *files)
    expect(page.locator(".ds-kind")).to_have_text("Uploaded run")
    expect(page.locator(".ds-lane")).to_have_count(2)
    broken = tmp_path / "broken.json"
    broken.write_text('{"schema": "draftscope.run/1", "target": "x"}')
    upload(page, broken)
    expect(page.get_by_role("alert")).to_contain_text("broken.json is not a valid run record")
    expect(page.locator(".ds-lane")).to_have_count(2)


def test_the_tour_walks_through_the_live_page_and_can_be_left(page: Page) -> None:
    page.get_by_role("button", name="Two-minute tour").click()
    card = page.get_by_role("dialog")
    seen = []
    for stop in range(1, 9):
        expect(card.locator(".ds-tour-count")).to_have_text(f"{stop} of 8")
        seen.append(card.inner_text())
        expect(page.locator(".ds-toured")).to_have_count(1)
        card.locator(".ds-play").click()
    expect(card).to_be_hidden()
    assert len(set(seen)) == 8 and "HASS: 6" in seen[1] and "for HASS" in seen[6]  # figures of this very run
    page.get_by_role("button", name="Two-minute tour").click()
    page.keyboard.press("Escape")
    expect(card).to_be_hidden()


def test_a_copied_link_is_the_address_of_the_view(browser: Browser, server: Server) -> None:
    for page in opened(browser, server.url, "?run=two"):
        page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        expect(page.locator(".ds-title")).to_have_text("Small")
        page.locator(".ds-slider").fill("3")
        page.get_by_role("button", name="Copy link").click()
        expect(page.get_by_role("button", name="Copied")).to_be_visible()
        assert page.evaluate("navigator.clipboard.readText()") == f"{server.url}?run=two&lane=hass&step=3"


def test_an_address_opens_the_same_view(browser: Browser, server: Server) -> None:
    for page in opened(browser, server.url, "?run=two&lane=eagle&step=3"):
        expect(page.locator(".ds-title")).to_have_text("Small")
        expect(page.locator(".ds-readout")).to_contain_text("step 3 of")
        expect(page.locator('.ds-lane[data-focus="true"]')).to_have_attribute("data-method", "eagle")
    for page in opened(browser, server.url, "?prompt=%20he%20was&methods=autoregressive&temperature=0.7&seed=9"):
        expect(page.locator("#ds-prompt textarea")).to_have_value(" he was")
        expect(page.get_by_role("checkbox", name="Plain decoding")).to_be_checked()
        expect(page.get_by_role("checkbox", name="hass")).not_to_be_checked()
        expect(page.get_by_role("alert")).to_contain_text("press Run to measure them here")
    for page in opened(browser, server.url, "?temperature=hot"):
        expect(page.get_by_role("alert")).to_contain_text("temperature='hot'")
