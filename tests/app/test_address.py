"""Settings in the address."""

from urllib.parse import parse_qs

import pytest

from app.address import link, read_address
from decoding.errors import UsageError
from decoding.records import Settings


def test_a_link_opens_the_same_request() -> None:
    settings = Settings(max_new_tokens=40, temperature=0.7, seed=3, tree_depth=4)
    query = {name: values[0] for name, values in parse_qs(link("a & b = ü?", ["autoregressive", "hass"], settings)).items()}
    address = read_address(query)
    assert address.prompt == "a & b = ü?" and address.methods == ["autoregressive", "hass"]
    assert address.settings == {"max_new_tokens": 40, "temperature": 0.7, "seed": 3, "tree_depth": 4}


def test_an_address_may_be_empty_or_about_a_recording() -> None:
    assert read_address({}).run is None
    address = read_address({"run": "tides", "lane": "hass", "step": "5", "__theme": "dark"})
    assert (address.run, address.lane, address.step) == ("tides", "hass", 5)


@pytest.mark.parametrize(("query", "message"), [
    ({"step": "five"}, "step='five'"),
    ({"temperature": "hot"}, "temperature='hot'"),
    ({"temperature": "-2"}, "temperature"),
    ({"max_new_tokens": "1.5"}, "whole number"),
])  # fmt: skip
def test_a_wrong_address_is_told(query: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_address(query)
