"""Trees, tables, masks and their keyboard, in a real browser."""

import re

from playwright.sync_api import Page, expect

HASS = '.ds-step[data-method="hass"]'
STEP = "(() => { const l = draftscope.state.lanes[2]; return l.steps[draftscope.stepOf(l)] })()"


def state(page: Page, expression: str) -> object:
    return page.evaluate(f"(() => {{ const s = draftscope.state; return {expression} }})()")


def test_the_tree_draws_every_node_of_the_record_by_status(page: Page) -> None:
    step = page.evaluate(STEP)
    expect(page.locator(f"{HASS} .ds-node")).to_have_count(len(step["ids"]) + 2)  # and the root and the bonus token
    expect(page.locator(f"{HASS} .ds-node.is-a")).to_have_count(len(step["path"]))
    expect(page.locator(f"{HASS} .ds-node.is-u")).to_have_count(step["mark"].count("u"))
    # shape tells them apart without colour: round, square, dashed, pointed
    expect(page.locator(f"{HASS} .is-r rect.ds-box").first).to_have_attribute("rx", "2")
    expect(page.locator(f"{HASS} .is-a rect.ds-box").first).to_have_attribute("rx", re.compile(r"^(9|\d\d)"))
    expect(page.locator(f"{HASS} .is-bonus polygon")).to_have_count(1)


def test_a_node_is_explained_in_words(page: Page) -> None:
    page.locator(f"{HASS} .ds-node.is-a").first.click()
    expect(page.locator(f"{HASS} .ds-detail p")).to_contain_text("Accepted: it is the target's own choice here (p =")
    page.locator(f"{HASS} .ds-node.is-r").first.click()
    expect(page.locator(f"{HASS} .ds-detail p")).to_contain_text("Rejected: the target chose")
    page.locator(f"{HASS} .ds-node.is-u").first.click()
    expect(page.locator(f"{HASS} .ds-detail p")).to_contain_text("Unreached: its parent")
    page.locator(f"{HASS} .ds-node.is-bonus").click()
    expect(page.locator(f"{HASS} .ds-detail p")).to_contain_text("The bonus token")
    page.locator(f"{HASS} .ds-node.is-root").click()
    expect(page.locator(f"{HASS} .ds-detail p")).to_contain_text("The root")


def test_a_token_selects_its_step_and_its_node_everywhere(page: Page) -> None:
    chip = page.locator('.ds-lane[data-method="hass"] .ds-chip.acc').nth(9)
    step, place = int(chip.get_attribute("data-step") or 0), int(chip.get_attribute("data-place") or 0)
    chip.click()
    page.wait_for_function("place => draftscope.state.place === place", arg=place)
    expect(page.locator(f"{HASS} h3")).to_contain_text(f"step {step + 1} of")
    expect(page.locator(f'{HASS} .ds-node[aria-selected="true"]')).to_have_count(1)
    lane = page.evaluate(
        "(() => { const l = draftscope.state.lanes[2]; return [l.steps[draftscope.state.step], l.starts[draftscope.state.step]] })()"
    )
    node = lane[0]["path"][place - lane[1]]
    expect(page.locator(f'{HASS} .ds-node[aria-selected="true"]')).to_have_attribute("data-node", str(node))
    expect(page.locator(".ds-chip.picked")).to_have_count(1)


def test_a_bar_of_the_latency_strip_selects_its_step(page: Page) -> None:
    strip = page.locator('.ds-lane[data-method="eagle"] .ds-strip')
    strip.click(position={"x": strip.evaluate("strip => strip.clientWidth") - 2, "y": 10})
    steps = state(page, "s.lanes[1].steps.length")
    expect(page.locator(".ds-readout")).to_have_text(f"step {steps} of {steps} · EAGLE")


def test_the_keyboard_does_everything(page: Page) -> None:
    lane = page.locator('.ds-lane[data-method="eagle"] .ds-text')
    lane.focus()
    page.keyboard.press("Home")
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    expect(page.locator(".ds-readout")).to_contain_text("step 4 of")
    page.locator(f"{HASS} .ds-scroll").focus()
    page.keyboard.press("Home")  # the root
    expect(page.locator(f"{HASS} .ds-detail p")).to_contain_text("The root")
    focused = page.locator(f"{HASS} .ds-node:focus")
    page.keyboard.press("ArrowRight")
    expect(focused).not_to_have_attribute("data-node", "-1")
    first = focused.get_attribute("data-node") or ""
    page.keyboard.press("ArrowDown")
    expect(focused).not_to_have_attribute("data-node", first)
    page.keyboard.press("ArrowLeft")
    expect(focused).to_have_count(1)
    before = state(page, "s.step")
    page.locator(".ds-slider").press("ArrowRight")
    page.wait_for_function("before => draftscope.state.step === before + 1", arg=before)


def test_the_table_says_the_same_as_the_tree(page: Page) -> None:
    page.get_by_text("Table", exact=True).click()
    rows = page.locator(f"{HASS} tbody tr")
    meaning = {"a": "✓ accepted", "r": "× rejected", "u": "unreached"}
    expect(rows.locator("td:last-child")).to_have_text([meaning[mark] for mark in page.evaluate(STEP)["mark"]])
    rows.nth(3).click()
    page.keyboard.press("ArrowDown")
    expect(page.locator(f'{HASS} button[aria-pressed="true"]')).to_have_text("4")


def test_the_mask_shows_ancestors_only(page: Page) -> None:
    page.get_by_label("attention mask", exact=True).check()
    expect(page.locator(f"{HASS} .ds-tree")).to_be_visible()  # beside the tree, not in its place
    figure = page.locator(f"{HASS} .ds-mask")
    expect(figure).to_contain_text("One target forward checks all")
    step, ancestors = page.evaluate(STEP), 0
    for node in range(len(step["ids"])):
        above = step["up"][node]
        while above >= 0:
            ancestors, above = ancestors + 1, step["up"][above]
        ancestors += 1  # the root
    drawn = page.locator(f"{HASS} .ds-mask-on").get_attribute("d") or ""
    assert drawn.count("M") == ancestors
    page.locator(f"{HASS} .ds-node.is-a").first.click()
    expect(figure).to_contain_text("The framed row: the root and")
    expect(figure.locator(".ds-mask-row")).to_have_count(1)


def test_unreached_nodes_can_be_hidden_and_trees_put_side_by_side_and_zoomed(page: Page) -> None:
    page.get_by_label("unreached nodes").uncheck()
    expect(page.locator(f"{HASS} .ds-node.is-u")).to_have_count(0)
    page.get_by_label("side by side").check()
    page.wait_for_function(
        """() => {
          const place = (name) => document.querySelector(`.ds-step[data-method=${name}]`).getBoundingClientRect();
          const [left, right] = [place("eagle"), place("hass")];
          return left.y === right.y && left.x < right.x;
        }"""
    )
    height = page.locator(f"{HASS} svg.ds-tree").get_attribute("height") or ""
    page.get_by_role("button", name="Larger").click()
    page.wait_for_function(
        "([tree, height]) => document.querySelector(tree).height.baseVal.value > height", arg=[f"{HASS} svg.ds-tree", float(height)]
    )


def test_lanes_line_up_by_place_or_by_number(page: Page) -> None:
    page.locator(".ds-slider").fill("3")
    page.get_by_label("Line up the lanes by").select_option("number")
    expect(page.locator(".ds-step h3")).to_contain_text(["step 3 of"] * 3)
    page.get_by_label("Line up the lanes by").select_option("text")
    page.wait_for_function("(([plain, eagle, hass]) => plain > eagle && eagle >= hass)(draftscope.state.lanes.map(draftscope.stepOf))")


def test_play_moves_on_and_pauses(page: Page) -> None:
    page.locator(".ds-slider").fill("1")
    page.get_by_role("button", name="Play the steps").click()
    page.wait_for_function("draftscope.state.step >= 2")
    page.get_by_role("button", name="Pause").click()
    at = state(page, "s.step")
    page.wait_for_timeout(900)  # longer than one step is shown: nothing may move
    assert state(page, "s.step") == at


def test_terms_explain_themselves_on_focus(page: Page) -> None:
    term = page.locator(".ds-term", has_text="tau").first
    term.focus()
    expect(term.locator(".ds-tip")).to_be_visible()
    expect(term.locator(".ds-tip")).to_contain_text("bonus token included")


def test_a_rare_very_long_step_is_cut_in_the_strip_and_said(page: Page) -> None:
    page.evaluate(
        """() => {
          const { info, lanes } = draftscope.state;
          // every time is given: on a busy machine any step of the run that was measured may be far above the others
          const timed = (lane, long) => lane.steps.map((step, nth) => ({ ...step, ms: [nth === long ? 9000 : 20, 0, 0, 0, 0] }));
          draftscope.receive(JSON.stringify({ ...info, session: "held", lanes: lanes.map((lane, nth) => ({
            ...lane, at: 0, steps: timed(lane, nth === 2 ? 1 : null),
          })) }));
        }"""
    )
    expect(page.locator(".ds-lane[data-method=hass] .ds-strip-text")).to_contain_text("· 1 above the scale")
    expect(page.locator(".ds-lane[data-method=eagle] .ds-strip-text")).not_to_contain_text("above the scale")
    top = page.evaluate("document.querySelector('.ds-lane[data-method=hass] .ds-strip').viewBox.baseVal.height")
    assert top < 9000


def test_a_ratio_to_plain_decoding_that_was_disturbed_is_not_told(page: Page) -> None:
    verdict = page.locator(".ds-verdicts")
    for plain, words in ((40, "plain decoding"), (200, "No fair ratio: the machine was busy")):
        page.evaluate(
            """(plain) => {
              const { info, lanes } = draftscope.state;
              const timed = (lane) => lane.steps.map((step) => ({ ...step, ms: [5, lane.tree ? 45 : plain, 0, 0, 0] }));
              draftscope.receive(JSON.stringify({ ...info, session: `held ${plain}`, lanes: lanes.map((lane) => ({
                ...lane, at: 0, steps: timed(lane),
              })) }));
            }""",
            plain,
        )
        expect(verdict).to_contain_text(words)
        assert ("No fair ratio" in verdict.inner_text()) == (plain == 200)
        told = [figures.locator("dd").first.inner_text() for figures in page.locator(".ds-lane .ds-figures").all()]
        assert told[0] == "1.00×" and all((figure == "–") == (plain == 200) for figure in told[1:]), "the cards say otherwise"


def test_what_is_loading_is_told_and_no_lane_is_named_before_one_runs(page: Page) -> None:
    def receive(states: list[str], note: str) -> None:
        page.evaluate(
            """([states, note]) => {
              const { info, lanes } = draftscope.state;
              const held = lanes.map((lane, nth) => ({ ...lane, at: 0, steps: [], state: states[nth] }));
              draftscope.receive(JSON.stringify({ ...info, session: `held ${states}`, running: true, note, lanes: held }));
            }""",
            [states, note],
        )

    receive(["loading"] * 3, "Fetching the target (93 MB, once)")
    expect(page.locator(".ds-verdicts")).to_have_text("Getting ready …")
    expect(page.get_by_role("alert")).to_have_text("Fetching the target (93 MB, once)")
    receive(["finished", "loading", "waiting"], "")
    expect(page.locator(".ds-verdicts")).to_contain_text("Lane 2 of 3")
    receive(["done"] * 3, "")  # the last lane has ended, the request not quite
    expect(page.locator(".ds-verdicts")).not_to_contain_text("Getting ready")


def test_a_step_is_framed_without_empty_pieces(page: Page) -> None:
    """A frame that begins on a new line leaves nothing at the end of the line before."""
    widths = page.evaluate(
        "[...document.querySelectorAll('.ds-lane .ds-capsule')].flatMap(node => [...node.getClientRects()].map(part => part.width))"
    )
    assert len(widths) > 20 and min(widths) > 2


def test_playing_shows_that_it_can_be_paused(page: Page) -> None:
    play = page.locator(".ds-transport button").nth(2)
    play.click()
    expect(play).to_have_attribute("aria-label", "Pause")
    assert play.bounding_box()["width"] < 60
    play.click()
    expect(play).to_have_attribute("aria-label", "Play the steps")
