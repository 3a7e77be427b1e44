"""Trees, tables, masks and their keyboard, in a real browser."""

from playwright.sync_api import Page, expect

HASS = '.ds-step[data-method="hass"]'


def state(page: Page, expression: str) -> object:
    return page.evaluate(f"(() => {{ const s = draftscope.state; return {expression} }})()")


def test_the_tree_draws_every_node_of_the_record_by_status(page: Page) -> None:
    drawn = page.locator(f"{HASS} .ds-node")
    step = page.evaluate("(() => { const l = draftscope.state.lanes[2]; return l.steps[draftscope.stepOf(l)] })()")
    assert drawn.count() == len(step["ids"]) + 2  # and the root and the bonus token
    assert page.locator(f"{HASS} .ds-node.is-a").count() == len(step["path"])
    assert page.locator(f"{HASS} .ds-node.is-u").count() == step["mark"].count("u")
    # shape tells them apart without colour: round, square, dashed, pointed
    assert page.locator(f"{HASS} .is-r rect.ds-box").first.get_attribute("rx") == "2"
    assert float(page.locator(f"{HASS} .is-a rect.ds-box").first.get_attribute("rx") or 0) > 5
    assert page.locator(f"{HASS} .is-bonus polygon").count() == 1


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
    expect(page.locator(f"{HASS} h3")).to_contain_text(f"step {step + 1} of")
    assert state(page, "s.place") == place
    expect(page.locator(f'{HASS} .ds-node[aria-selected="true"]')).to_have_count(1)
    lane = page.evaluate(
        "(() => { const l = draftscope.state.lanes[2]; return [l.steps[draftscope.state.step], l.starts[draftscope.state.step]] })()"
    )
    node = lane[0]["path"][place - lane[1]]
    expect(page.locator(f'{HASS} .ds-node[aria-selected="true"]')).to_have_attribute("data-node", str(node))
    expect(page.locator(".ds-chip.picked")).to_have_count(1)


def test_a_bar_of_the_latency_strip_selects_its_step(page: Page) -> None:
    strip = page.locator('.ds-lane[data-method="eagle"] .ds-strip')
    box = strip.bounding_box()
    assert box
    strip.click(position={"x": box["width"] - 2, "y": 10})
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
    page.keyboard.press("ArrowRight")
    first = page.evaluate("document.activeElement.dataset.node")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.dataset.node") != first
    page.keyboard.press("ArrowLeft")
    assert page.evaluate("document.activeElement.classList.contains('ds-node')")
    slider = page.locator(".ds-slider")
    slider.focus()
    before = state(page, "s.step")
    page.keyboard.press("ArrowRight")
    assert state(page, "s.step") == before + 1  # type: ignore[operator]


def test_the_table_says_the_same_as_the_tree(page: Page) -> None:
    page.get_by_text("Table", exact=True).click()
    rows = page.locator(f"{HASS} tbody tr")
    step = page.evaluate("(() => { const l = draftscope.state.lanes[2]; return l.steps[draftscope.stepOf(l)] })()")
    assert rows.count() == len(step["ids"])
    words = rows.locator("td:last-child").all_inner_texts()
    meaning = {"a": "✓ accepted", "r": "× rejected", "u": "unreached"}
    assert words == [meaning[mark] for mark in step["mark"]]
    rows.nth(3).click()
    page.keyboard.press("ArrowDown")
    expect(page.locator(f'{HASS} button[aria-pressed="true"]')).to_have_text("4")


def test_the_mask_shows_ancestors_only(page: Page) -> None:
    page.get_by_text("Mask", exact=True).click()
    figure = page.locator(f"{HASS} .ds-mask")
    expect(figure).to_contain_text("One target forward checks all")
    step = page.evaluate("(() => { const l = draftscope.state.lanes[2]; return l.steps[draftscope.stepOf(l)] })()")
    ancestors = 0
    for node in range(len(step["ids"])):
        above = step["up"][node]
        while above >= 0:
            ancestors, above = ancestors + 1, step["up"][above]
        ancestors += 1  # the root
    drawn = page.locator(f"{HASS} .ds-mask-on").get_attribute("d") or ""
    assert drawn.count("M") == ancestors


def test_unreached_nodes_can_be_hidden_and_trees_put_side_by_side_and_zoomed(page: Page) -> None:
    page.get_by_label("unreached nodes").uncheck()
    expect(page.locator(f"{HASS} .ds-node.is-u")).to_have_count(0)
    page.get_by_label("side by side").check()
    left, right = (page.locator(f'.ds-step[data-method="{name}"]').bounding_box() for name in ("eagle", "hass"))
    assert left and right and left["y"] == right["y"] and left["x"] < right["x"]
    before = page.locator(f"{HASS} svg.ds-tree").bounding_box()
    page.get_by_role("button", name="Larger").click()
    after = page.locator(f"{HASS} svg.ds-tree").bounding_box()
    assert before and after and after["height"] > before["height"]


def test_lanes_line_up_by_place_or_by_number(page: Page) -> None:
    page.locator(".ds-slider").fill("3")
    page.get_by_label("Line up the lanes by").select_option("number")
    assert page.evaluate("draftscope.state.lanes.map(draftscope.stepOf)") == [2, 2, 2]
    page.get_by_label("Line up the lanes by").select_option("text")
    steps = page.evaluate("draftscope.state.lanes.map(draftscope.stepOf)")
    assert steps[0] > steps[1] >= steps[2]


def test_play_moves_on_and_pauses(page: Page) -> None:
    page.locator(".ds-slider").fill("1")
    page.get_by_role("button", name="Play the steps").click()
    page.wait_for_function("draftscope.state.step >= 2", timeout=5_000)
    page.get_by_role("button", name="Pause").click()
    at = state(page, "s.step")
    page.wait_for_timeout(900)
    assert state(page, "s.step") == at


def test_terms_explain_themselves_on_focus(page: Page) -> None:
    term = page.locator(".ds-term", has_text="tau").first
    term.focus()
    expect(term.locator(".ds-tip")).to_be_visible()
    expect(term.locator(".ds-tip")).to_contain_text("bonus token included")
