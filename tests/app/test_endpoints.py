"""The API of the running app, through Gradio's own client."""

import itertools

import httpx
import pytest
from gradio_client import Client
from gradio_client.exceptions import AppError

from decoding import Run
from tests.app.conftest import Server


@pytest.fixture(scope="module")
def client(server: Server) -> Client:
    return Client(server.url, verbose=False)


def test_methods_and_targets(client: Client, server: Server) -> None:
    own, *others = client.predict(api_name="/targets")
    assert own["name"] == server.models.source and own["available"] and own["reason"] is None
    assert all(entry["available"] == (entry["reason"] is None) for entry in others)
    told = client.predict(api_name="/methods")
    assert [entry["label"] for entry in told] == ["Plain decoding", "eagle", "hass"]


def test_compare_streams_lanes_and_ends_with_records(client: Client, server: Server) -> None:
    hass = server.models.extra_heads[1]
    job = client.submit(prompt=" the man said that he", methods=[hass, "autoregressive"], max_new_tokens=40, api_name="/compare")
    items = list(job)
    assert {item["type"] for item in items[:-1]} == {"lanes"}
    runs = [Run.model_validate(raw) for raw in items[-1]["runs"]]
    assert [run.method for run in runs] == ["autoregressive", "hass"]
    assert runs[0].output_ids == runs[1].output_ids and len(runs[0].output_ids) == 40
    streamed = [item["lanes"][1]["token_ids"] for item in items[:-1]]
    assert streamed[-1] == runs[1].output_ids
    assert all(later[: len(earlier)] == earlier for earlier, later in itertools.pairwise(streamed))
    assert items[-2]["lanes"][1]["speed_up"] > 0


@pytest.mark.parametrize(
    ("name", "body", "status", "words"),
    [
        ("compare", {"prompt": " he", "methods": ["autoregressive"], "bogus": 1}, 422, "`bogus` is not a valid key-word argument"),
        ("compare", {"methods": ["autoregressive"]}, 422, "No value provided for required argument: prompt"),
        ("nonsense", {}, 404, "no such endpoint"),
    ],
)
def test_a_call_that_fits_no_endpoint_is_refused_in_words(server: Server, name: str, body: dict, status: int, words: str) -> None:
    answer = httpx.post(f"{server.url}gradio_api/call/v2/{name}", json=body)
    assert answer.status_code == status and words in answer.json()["error"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"prompt": "", "methods": ["autoregressive"]}, "prompt is empty"),
        ({"prompt": " he", "methods": ["nonsense"]}, "unknown method 'nonsense'"),
        ({"prompt": " he", "methods": ["autoregressive"], "target": "other/model"}, "unknown target 'other/model'"),
        ({"prompt": " he", "methods": ["autoregressive"], "temperature": -1}, "temperature"),
    ],
)
def test_wrong_requests_are_refused_in_words(client: Client, asked: dict, message: str) -> None:
    with pytest.raises(AppError, match=message):
        client.predict(**asked, api_name="/compare")
