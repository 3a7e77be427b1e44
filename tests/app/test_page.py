"""The page driven in a real browser: opening, running, scrubbing, stopping, errors."""

import re
from threading import Event

import pytest
from playwright.sync_api import Browser, Page, expect

from decoding import DraftscopeError
from heads.session import FeatureSession
from tests.app.conftest import DRAWN, Server, opened


def expect_states(page: Page, *states: str) -> None:
    expect(page.locator(".ds-state")).to_have_text(list(states))


def run_to_end(page: Page) -> None:
    before = page.evaluate("draftscope.state.session")
    page.click("#ds-run")
    ended = "before => draftscope.state.session !== before && !draftscope.state.info.running"
    page.wait_for_function(ended, arg=before)
    expect(page.locator("#ds-run")).to_be_enabled()


def stop_running(page: Page, held: Event) -> None:
    """Press Stop while the target is held, so that exactly the step that runs is finished."""
    with page.expect_response(lambda answer: answer.request.method == "POST"):
        page.click("#ds-stop")
    held.set()


def test_opens_on_a_recorded_run_with_everything_filled(page: Page) -> None:
    expect(page.locator(".ds-kind")).to_have_text("Recorded run")
    expect(page.locator(".ds-verdicts")).to_contain_text(re.compile(r"Fastest: |No head pays here: "))
    expect(page.locator(".ds-verdicts")).to_contain_text("Texts: all equal to plain decoding, token for token.")
    expect(page.locator(".ds-lane")).to_have_count(3)
    expect_states(page, *["finished"] * 3)
    expect(page.locator(".ds-lane[data-method=hass] .ds-equal")).to_contain_text("Equal to plain decoding, 64 tokens")
    expect(page.locator(".ds-tree")).to_have_count(2)  # a tree for each lane with a head, without a click
    expect(page.locator(".ds-detail p").first).not_to_be_empty()
    expect(page.locator("#ds-prompt textarea")).to_have_value(" the man said that he")


def test_runs_lanes_one_after_the_other_and_measures_the_speed_up(page: Page) -> None:
    run_to_end(page)
    expect_states(page, *["finished"] * 3)
    expect(page.locator(".ds-lane[data-method=hass] dd")).to_have_text(
        [re.compile(r"^\d+\.\d\d×$"), re.compile(r"^[\d.]+$"), re.compile(r"^[2-7]\.\d\d$")]
    )
    expect(page.locator(".ds-lane[data-method=hass] .ds-equal")).to_contain_text("Equal to plain decoding")
    expect(page.locator("#ds-status")).to_contain_text("Run ended")
    emitted = page.evaluate("draftscope.state.lanes[1].figures.tokens")
    expect(page.locator(".ds-lane[data-method=eagle] .ds-chip")).to_have_count(emitted + 1)


def test_scrubbing_moves_lanes_trees_and_times_together(page: Page) -> None:
    slider = page.locator(".ds-slider")
    slider.fill("4")
    expect(page.locator(".ds-readout")).to_contain_text("step 4 of")
    focus = page.locator('.ds-step[data-focus="true"]')
    expect(focus.locator("h3")).to_contain_text("step 4 of")
    expect(page.locator('.ds-lane[data-focus="true"] .ds-capsule.on')).to_have_attribute("data-step", "3")
    page.click(".ds-button[aria-label='Next step']")
    expect(page.locator(".ds-readout")).to_contain_text("step 5 of")
    # the other lanes stand where the same place of the text was emitted
    page.wait_for_function(
        """() => draftscope.state.lanes.every((lane) => {
          const step = draftscope.stepOf(lane), first = lane.starts[step], place = draftscope.state.place;
          return first <= place && place < first + lane.steps[step].out;
        })"""
    )


def test_stop_ends_within_a_step_and_keeps_what_was_made(page: Page, held_target: Event) -> None:
    page.click("#ds-run")
    expect(page.locator(".ds-lane[data-state=running] .ds-chip").nth(6)).to_be_attached()
    stop_running(page, held_target)
    page.wait_for_function("!draftscope.state.info.running")
    expect(page.locator("#ds-run")).to_be_enabled()
    expect_states(page, *["stopped"] * 3)
    expect(page.locator(".ds-verdicts")).to_contain_text("Stopped: Plain decoding, ")
    made = page.evaluate("draftscope.state.lanes[0].figures.tokens")
    assert 5 < made < 95
    expect(page.locator(".ds-lane").first.locator(".ds-chip")).to_have_count(made + 1)
    expect(page.locator("#ds-prompt textarea")).to_have_value(" the man said that he")
    assert page.evaluate("draftscope.state.lanes[0].finish") == "cancelled"


def test_a_wrong_request_says_so_keeps_the_prompt_and_leaves_the_page_usable(page: Page) -> None:
    prompt = page.locator("#ds-prompt textarea")
    prompt.fill("   ")
    page.click("#ds-run")
    expect(page.get_by_role("alert")).to_contain_text("the prompt is empty")
    expect(page.locator(".ds-lane")).to_have_count(3)  # the lanes that were there stay
    prompt.fill(" you are the first")
    expect(page.get_by_role("alert")).to_be_hidden()
    page.click("#ds-settings button")
    page.get_by_label("Tree depth").fill("1")
    page.get_by_label("Tree nodes").fill("59")
    page.click("#ds-run")
    expect(page.get_by_role("alert")).to_contain_text("tree_nodes 59 is more than the 10 candidates")
    expect(prompt).to_have_value(" you are the first")
    page.get_by_label("Tree nodes").fill("8")
    run_to_end(page)
    expect(page.get_by_role("alert")).to_be_hidden()
    assert page.evaluate("draftscope.state.lanes[1].tree") == [1, 10, 8]


def test_what_a_person_caused_comes_into_view(browser: Browser, server: Server) -> None:
    for page in opened(browser, server.url, width=390):
        expect(page.locator(".ds-lane .ds-strip").first).not_to_be_in_viewport()
        page.click("#ds-run")
        expect(page.locator(".ds-lane .ds-strip").first).to_be_in_viewport()
        page.wait_for_function("!draftscope.state.info.running")
        page.get_by_role("tab", name="Runs").scroll_into_view_if_needed()
        expect(page.locator(".ds-verdicts")).not_to_be_in_viewport()
        page.locator("#ds-prompt textarea").evaluate("box => { box.value = ''; box.dispatchEvent(new Event('input')) }")
        page.locator("#ds-run").evaluate("button => button.click()")  # a click of the driver would scroll by itself
        expect(page.get_by_role("alert")).to_be_in_viewport()


def test_the_settings_open_in_place_on_a_screen_that_is_too_low_for_them(browser: Browser, server: Server) -> None:
    for page in opened(browser, server.url, width=1280, height=420):
        server.models.target(server.models.source)
        page.reload()
        page.wait_for_function(DRAWN)
        header = page.locator("#ds-settings > button, #ds-settings .label-wrap").first
        before = header.bounding_box()
        header.click()
        expect(page.locator("#ds-settings")).to_contain_text(f"Loaded: {server.models.target(server.models.source).name}")
        seed = page.get_by_label("Seed").first
        seed.scroll_into_view_if_needed()
        expect(seed).to_be_in_viewport()
        after, box = header.bounding_box(), seed.bounding_box()
        assert before and after and box and after["x"] == before["x"], "the panel went into a second column"
        assert box["x"] + box["width"] < 400


def test_an_example_fills_the_prompt(page: Page) -> None:
    page.get_by_role("button", name="Arithmetic").click()
    expect(page.locator("#ds-prompt textarea")).to_have_value(
        "A baker makes 12 trays with 8 rolls each and sells 70 rolls. How many rolls are left? Show each step."
    )


def test_server_has_no_public_endpoint_but_the_documented_ones(server: Server, page: Page) -> None:
    told = page.request.get(server.url + "gradio_api/info").json()
    assert set(told["named_endpoints"]) <= {"/compare", "/methods", "/targets"}
    assert not told["unnamed_endpoints"]


def test_a_second_visitor_waits_is_told_so_and_can_stop_at_once(browser: Browser, server: Server, held_target: Event) -> None:
    for first in opened(browser, server.url):
        first.click("#ds-run")
        expect(first.locator(".ds-lane[data-state=running] .ds-chip").nth(3)).to_be_attached()
        for second in opened(browser, server.url):
            second.click("#ds-run")
            expect(second.get_by_role("alert")).to_contain_text("Waiting for the device: 1 earlier request")
            expect_states(second, *["waiting"] * 3)
            second.click("#ds-stop")
            expect(second.get_by_role("alert")).to_contain_text("Stopped before it began.")
            expect_states(second, *["finished"] * 3)  # the recorded run is back
            expect(second.locator("#ds-run")).to_be_enabled()
        stop_running(first, held_target)
        first.wait_for_function("!draftscope.state.info.running")


def test_a_lane_that_fails_says_why_and_the_others_go_on(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    propose = FeatureSession.propose

    def fails(self: FeatureSession, *arguments: object) -> object:
        if self.head.name == "eagle" and self.stable > 20:
            raise DraftscopeError("the head broke")
        return propose(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(FeatureSession, "propose", fails)
    run_to_end(page)
    expect_states(page, "finished", "failed", "finished")
    lane = page.locator(".ds-lane[data-method=eagle]")
    expect(lane.locator(".ds-equal")).to_contain_text("the head broke")
    expect(lane.locator(".ds-chip").nth(5)).to_be_attached()  # what was made is kept
    verdict = page.locator(".ds-verdicts")
    expect(verdict).to_contain_text("Failed: EAGLE.")
    expect(verdict).not_to_contain_text("plain decoding: EAGLE")  # half a run says nothing about its speed


def test_a_run_that_makes_nothing_leaves_the_earlier_lanes_in_place(page: Page) -> None:
    page.fill("#ds-prompt textarea", " the" * 1100)  # more than the tiny target's context
    page.click("#ds-run")
    expect(page.get_by_role("alert")).to_contain_text("the context of tiny holds 1024: shorten it")
    expect(page.locator("#ds-run")).to_be_enabled()
    expect(page.locator(".ds-kind")).to_have_text("Recorded run")
    expect_states(page, *["finished"] * 3)
    expect(page.locator(".ds-tree")).to_have_count(2)
    expect(page.locator("#ds-prompt textarea")).to_have_value(re.compile("^ the the"))
