"""Choosing a target on the page: what does not fit this machine is greyed out, heads come with their target."""

import re
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from app import offers
from app.models import Models
from app.targets import catalogue_table, target_list
from tests.app.conftest import Server, opened, serve


@pytest.fixture(scope="module")
def small_machine() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offers, "cpu_bytes", lambda: 34_000_000_000)
        patch.setattr(offers, "gpu_bytes", lambda: ())
        patch.setattr(offers, "_computes_in_half", lambda: True)
        patch.setattr(offers, "_free_disk", lambda: 1 << 50)
        yield


@pytest.fixture(scope="module")
def small_server(server: Server, small_machine: None) -> Iterator[Server]:
    yield from serve(server.models, server.runs)


@pytest.fixture
def small_page(browser: Browser, small_server: Server) -> Iterator[Page]:
    yield from opened(browser, small_server.url)


def test_targets_that_do_not_fit_are_greyed_out_with_the_reason(small_page: Page, small_server: Server) -> None:
    small_page.get_by_text("Target and settings").click()
    chosen = small_page.get_by_label("Target", exact=True)
    expect(chosen).to_have_value(small_server.models.source)
    large = chosen.locator("option[value='lmsys/vicuna-13b-v1.3']")
    expect(large).to_be_disabled()
    expect(large).to_contain_text(re.compile(r"needs \d+\.\d GB of memory, this machine has 34\.0 GB of CPU memory; would fit: "))
    expect(chosen.locator("option[value='meta-llama/Llama-2-7b-chat-hf']")).to_contain_text("gated: log in")
    expect(small_page.locator("#ds-settings")).to_contain_text("Known targets and heads")


def test_heads_come_with_their_target(small_page: Page, small_server: Server) -> None:
    small_page.get_by_text("Target and settings").click()
    chosen, methods = small_page.get_by_label("Target", exact=True), small_page.locator("#ds-methods label")
    expect(methods).to_have_text(["Plain decoding", "eagle", "hass"])
    chosen.select_option("lmsys/vicuna-7b-v1.3")
    expect(methods).to_have_text(["Plain decoding", "EAGLE · EAGLE-Vicuna-7B-v1.3", "Medusa · medusa-vicuna-7b-v1.3"])
    chosen.select_option(small_server.models.source)
    expect(methods).to_have_text(["Plain decoding", "eagle", "hass"])
    expect(methods.locator("input:checked")).to_have_count(3)
    small_page.click("#ds-run")
    expect(small_page.locator(".ds-state")).to_have_text(["finished"] * 3, timeout=60_000)
    expect(small_page.locator("#ds-settings")).to_contain_text("Loaded: tiny")


def test_a_name_is_text_in_the_list(small_machine: None) -> None:
    hostile = "</option><script>alert(1)</script>${alert(2)}{{x}}'"
    template = target_list(Models(hostile)).html_template
    assert "<script>" not in template and "${alert" not in template and "{{x" not in template
    assert "&lt;script&gt;" in template
    assert "<script>" not in catalogue_table(Models(hostile))


def test_with_free_choice_any_name_can_be_typed(small_machine: None) -> None:
    free = target_list(Models(allow_custom=True))
    assert free.allow_custom_value
    sources = [source for _, source in free.choices]
    assert "lmsys/vicuna-7b-v1.3" in sources and "lmsys/vicuna-33b-v1.3" not in sources
