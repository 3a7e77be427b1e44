"""Run records: what is written can be read, and what can't be trusted is refused by name, quickly."""

import copy
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from decoding.errors import UsageError
from decoding.records import MAX_RECORD_BYTES, Run, Settings, TreeShape
from tests.records import make_run, run_fields

PATHS = [[21, 22, 23], [24], [25, 26, 27]]


def refused(fields: Any) -> str:
    text = fields if isinstance(fields, str) else json.dumps(fields)
    with pytest.raises(UsageError) as failure:
        Run.from_json(text, "some.json")
    message = str(failure.value)
    assert message.startswith("some.json") and len(message.splitlines()) == 1 and len(message) < 1000
    return message


# What is written comes back


def test_save_and_load(tmp_path: Path) -> None:
    run = make_run(PATHS)
    run.save(tmp_path / "new folder" / "run.json")
    back = Run.load(tmp_path / "new folder" / "run.json")
    assert back == run and back.to_json() == run.to_json()
    assert back.token_text(11) == "<0xE2>" and back.token_text(404) == "<404>"
    raw = json.loads((tmp_path / "new folder" / "run.json").read_text(encoding="utf-8"))
    assert raw["schema"] == run.schema == "draftscope.run/1"
    assert raw["text"] == "déjà vu 🌳" and raw["steps"][0]["accepted"] == [0, 2]


def test_a_plain_run_and_a_run_stopped_before_its_first_token_come_back() -> None:
    for run in (make_run([[21], [22]], plain=True), make_run([], first_id=None, output_ids=[], finish_reason="cancelled")):
        assert Run.from_json(run.to_json()) == run


def test_a_failed_save_leaves_the_old_record_and_nothing_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "run.json"
    make_run(PATHS).save(path)
    before = path.read_bytes()

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(os, "replace", full_disk)
        with pytest.raises(OSError, match="No space left"):
            make_run([]).save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


finite = st.floats(0, 1e6, allow_nan=False)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
tokens = st.integers(0, (1 << 31) - 1)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.lists(tokens, min_size=1, max_size=6), max_size=5),
    st.dictionaries(tokens, texts, max_size=5),
    texts,
    finite,
    st.sampled_from(["stop", "length", "cancelled", "error"]),
)
def test_any_run_comes_back_as_it_was(paths: list[list[int]], told: dict[int, str], text: str, prefill: float, reason: str) -> None:
    fields = run_fields(paths, token_texts=told, text=text, prompt_text=text, finish_reason=reason)
    for step in fields["steps"]:
        step["start_ms"] += prefill
    run = Run.model_validate(fields | {"prefill_ms": prefill})
    assert Run.from_json(run.to_json()) == run


# What is broken is refused by name


def changed(*path: str | int, to: Any = None, drop: bool = False) -> dict[str, Any]:
    """The fields of a run with one of them changed."""
    fields = copy.deepcopy(run_fields(PATHS))
    *way, last = path
    place: Any = fields
    for key in way:
        place = place[key]
    if drop:
        del place[last]
    else:
        place[last] = to
    return fields


@pytest.mark.parametrize("field", ["target", "settings", "environment", "prompt_ids", "prefill_ms", "steps", "output_ids", "finish_reason"])
def test_a_missing_field_is_named(field: str) -> None:
    assert f"{field}: Field required" in refused(changed(field, drop=True))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (changed("prompt_ids", to=[]), "prompt_ids"),
        (changed("prompt_ids", 1, to=-4), "prompt_ids.1"),
        (changed("prompt_ids", 1, to=1 << 40), "prompt_ids.1"),
        (changed("prompt_ids", 1, to="x"), "prompt_ids.1"),
        (changed("finish_reason", to="bored"), "finish_reason"),
        (changed("environment", "threads", to=0), "environment.threads"),
        (changed("settings", "temperature", to=-1), "settings: setting temperature"),
        (changed("settings", "colour", to=1), "settings: setting unknown field 'colour', possible are max_new_tokens, seed"),
        (changed("surprise", to=1), "unknown field 'surprise'"),
        (changed("steps", 1, "surprise", to=1), "steps.1: unknown field 'surprise'"),
        (changed("token_texts", to={"x": "y"}), "token_texts: 'x': a token id was expected"),
        (changed("token_texts", to={"1": 2}), "token_texts: '1': text was expected"),
        (changed("steps", 2, "verify_ms", to=-1), "steps.2.verify_ms"),
        (changed("steps", 2, "verify_ms", to=1e300), "steps.2.verify_ms"),
        (changed("steps", 0, "target_probs", 1, to=1.5), "steps.0.target_probs.1"),
        (changed("steps", 0, "draft_logprobs", 1, to=0.5), "steps.0.draft_logprobs.1"),
        (changed("steps", 0, "status", 1, to="maybe"), "steps.0.status.1"),
        (changed("steps", 0, "scores", to=[]), "scores has 0 entries for 5 nodes"),
        (changed("steps", 0, "draws", to=[0.5]), "draws has 1 entries for 5 nodes"),
        (changed("steps", 0, "margins", to=[0.5]), "margins has 1 entries for 3 chosen tokens"),
        (changed("steps", 0, "token_ids", to=[]), "token_ids"),
        (changed("steps", 0, "token_ids", 0, to=99), "token_ids are not the accepted nodes' tokens"),
        (changed("steps", 0, "token_ids", to=[21, 22]), "steps.0.token_ids are cut"),
        (changed("steps", 0, "accepted", to=[0, 99]), "accepted.1 is 99"),
        (changed("steps", 0, "accepted", to=[0, -1]), "accepted.1 is -1"),
        (changed("steps", 0, "accepted", to=[0]), "status marks other nodes as accepted"),
        (changed("steps", 0, "accepted", to=[2, 0]), "accepted.0 is 2: not a path from the root"),
        (changed("steps", 1, "index", to=7), "steps.1.index is 7"),
        (changed("steps", 1, "root_id", to=7), "steps.1.root_id"),
        (changed("steps", 1, "context_length", to=7), "steps.1.context_length is 7, but 6 tokens"),
        (changed("steps", 1, "start_ms", to=3), "steps.1.start_ms is 3.0, but the work before it ended at 18.0"),
        (changed("output_ids", 0, to=7), "output_ids are not the tokens that first_id and the steps emitted"),
        (changed("first_id", to=None), "steps.0.root_id"),
        (changed("head", to=None), "method 'hass' does not go with head None"),
        (changed("method", to="autoregressive"), "does not go with head 'hass'"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_is_wrong_is_named(fields: dict[str, Any], named: str) -> None:
    assert named in refused(fields)


@pytest.mark.parametrize(
    ("parents", "named"),
    [
        ([0, -1, 0, 0, 2], "parents.0 is 0"),  # its own parent
        ([-1, -1, 3, 2, 2], "parents.2 is 3"),  # a loop of two
        ([-1, -1, 0, 0, 99], "parents.4 is 99"),
        ([-1, -2, 0, 0, 2], "parents.1 is -2"),
        ([-1, -1, 0, 0, -1], "depths.4 is 3"),
    ],
)
def test_loops_and_strays_in_a_tree_are_refused(parents: list[int], named: str) -> None:
    assert named in refused(changed("steps", 0, "parents", to=parents))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
@pytest.mark.parametrize("field", ["prefill_ms", "temperature", "margins", "scores", "draws", "target_probs", "drift_cosine", "overlap"])
def test_numbers_that_are_none_are_refused_everywhere(field: str, number: str) -> None:
    fields = run_fields(PATHS)
    marked = 0.123456
    if field == "temperature":
        fields["settings"][field] = marked
    elif field == "prefill_ms":
        fields[field] = marked
    else:
        step = fields["steps"][0]
        step[field] = [marked, *(step.get(field) or [None] * 5)[1:]]
    assert field in refused(json.dumps(fields).replace("0.123456", number))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON"),
        ("\x00", "is not JSON"),
        ('{"schema": "\\ud800"}', "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"a":' * 5000 + "1" + "}" * 5000, "is not JSON"),
        ('{"schema": "draftscope.run/1", "seed": ' + "9" * 20_000 + "}", "is not JSON"),
        ("null", "schema is None"),
        ("[]", "schema is None"),
        ("{}", "schema is None"),
        ('{"schema": "draftscope.run/2", "new": 1}', "schema is 'draftscope.run/2', expected 'draftscope.run/1'"),
        (json.dumps({"schema": "x" * 100_000}), "schema is 'xxx"),
        ('{"schema": ["draftscope.run/1"]}', "schema is ['draftscope.run/1']"),
    ],
)
def test_what_is_no_record_is_said_to_be_none(text: str, said: str) -> None:
    assert said in refused(text)


def test_a_record_cut_anywhere_is_refused() -> None:
    text = make_run(PATHS).to_json()
    for end in range(0, len(text) - 1, 97):
        assert "is not JSON" in refused(text[:end])


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00{}")
    big = tmp_path / "big.json"
    with big.open("wb") as file:
        file.truncate(MAX_RECORD_BYTES + 1)
    told = [
        (tmp_path / "none.json", "No such file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "binary.json", "not a text file"),
        (big, "64 MB"),
    ]
    for path, said in told:
        with pytest.raises(UsageError, match=said) as failure:
            Run.load(path)
        assert path.name in str(failure.value)


LARGE = 300_000
BOMBS: dict[str, Callable[[], dict[str, Any]]] = {
    "entries": lambda: changed("prompt_ids", to=["x"] * LARGE),
    "unknown fields": lambda: run_fields(PATHS) | {f"k{index}": 0 for index in range(LARGE)},
    "steps": lambda: changed("steps", to=[{}] * LARGE),
    "token texts": lambda: changed("token_texts", to={str(index): 0 for index in range(LARGE)}),
    "token ids": lambda: changed("token_texts", to={f"k{index}": "" for index in range(LARGE)}),
    "versions": lambda: changed("environment", "versions", to={str(index): 0 for index in range(LARGE)}),
    "nodes": lambda: changed("steps", 0, "node_ids", to=[-1] * LARGE),
    "stop tokens": lambda: changed("settings", "stop_token_ids", to=[-1] * LARGE),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_a_file_full_of_errors_costs_no_minutes(kind: str) -> None:
    """A list of every error takes a microsecond and a kilobyte for each: an upload could stop the page."""
    text = json.dumps(BOMBS[kind]())
    begun = time.process_time()
    refused(text)
    # listing 300,000 errors took 3 to 5 s
    assert time.process_time() - begun < 2


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
FIELDS = sorted(run_fields(PATHS))
STEP_FIELDS = sorted(run_fields(PATHS)["steps"][0])


@settings(max_examples=300, deadline=2000)
@given(st.sampled_from(FIELDS), json_values)
def test_any_value_in_any_field_is_accepted_or_refused_in_one_line(field: str, value: Any) -> None:
    check(json.dumps(changed(field, to=value)))


@settings(max_examples=300, deadline=2000)
@given(st.sampled_from(STEP_FIELDS), json_values | st.lists(st.integers(-3, 8), max_size=6))
def test_any_value_in_any_field_of_a_step_is_accepted_or_refused_in_one_line(field: str, value: Any) -> None:
    check(json.dumps(changed("steps", 0, field, to=value)))


@settings(max_examples=200, deadline=2000)
@given(st.text(max_size=60) | st.binary(max_size=60).map(lambda data: data.decode("latin-1")))
@example("\ud800")
@example("\ufeff{}")
def test_any_text_is_refused_in_one_line(text: str) -> None:
    refused(text)


def check(text: str) -> None:
    """Either refused in one line, or a run whose figures can be computed and that can be written again."""
    from decoding.metrics import lossless, measure

    try:
        run = Run.from_json(text, "some.json")
    except UsageError as error:
        assert str(error).startswith("some.json") and len(str(error).splitlines()) == 1
        return
    figures = measure(run)
    assert figures.decode_ms >= 0 and figures.steps == len(run.steps)
    assert lossless(run, run).equal
    assert Run.from_json(run.to_json()) == run


# Settings


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"max_new_tokens": 0}, "setting max_new_tokens: Input should be greater than or equal to 1"),
        ({"max_new_tokens": 1 << 20}, "setting max_new_tokens: Input should be less than or equal to 131072"),
        ({"max_new_tokens": 1.5}, "setting max_new_tokens"),
        ({"max_new_tokens": None}, "setting max_new_tokens"),
        ({"temperature": -0.1}, "setting temperature: Input should be greater than or equal to 0"),
        ({"temperature": float("nan")}, "setting temperature"),
        ({"temperature": float("inf")}, "setting temperature"),
        ({"top_p": 0}, "setting top_p: Input should be greater than 0"),
        ({"top_p": 1.01}, "setting top_p: Input should be less than or equal to 1"),
        ({"top_k": -1}, "setting top_k: Input should be greater than or equal to 0"),
        ({"seed": -1}, "setting seed: Input should be greater than or equal to 0"),
        ({"tree_depth": 0}, "setting tree_depth: Input should be greater than or equal to 1"),
        ({"tree_depth": 99}, "setting tree_depth: Input should be less than or equal to 16"),
        ({"tree_top_k": 65}, "setting tree_top_k: Input should be less than or equal to 64"),
        ({"tree_nodes": 513}, "setting tree_nodes: Input should be less than or equal to 512"),
        ({"stop_token_ids": [-1]}, "setting stop_token_ids.0"),
        (
            {"depth": 5},
            "setting unknown field 'depth', possible are max_new_tokens, seed, stop_token_ids, temperature, top_k, top_p, tree_depth",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_settings_out_of_range_are_named(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError) as failure:
        Settings(**values)
    assert said in str(failure.value) and "\n" not in str(failure.value)


def test_contradicting_tree_settings_are_told_with_what_is_possible() -> None:
    # one level of 10 nodes has 10 candidates; two levels have 10 + 10 * 10
    with pytest.raises(UsageError, match=r"tree_nodes 11 is more than the 10 candidates that tree_depth 1 and tree_top_k 10 give: lower"):
        Settings(tree_depth=1, tree_top_k=10, tree_nodes=11).resolved(TreeShape())
    with pytest.raises(UsageError, match="more than the 110 candidates"):
        Settings(tree_depth=2, tree_top_k=10, tree_nodes=111).resolved(TreeShape())
    assert Settings(tree_depth=2, tree_top_k=10, tree_nodes=110).resolved(TreeShape()).tree == (2, 10, 110)


def test_unset_tree_fields_take_the_heads_own() -> None:
    tuned = TreeShape(4, 6, 20)
    assert Settings().resolved(tuned).tree == tuned
    assert Settings(tree_nodes=8).resolved(tuned).tree == (4, 6, 8)
    assert Settings(tree_depth=1).resolved(tuned).tree == (1, 6, 6)  # the budget follows what was set by hand
    assert Settings().resolved(None).tree == TreeShape()


def test_settings_of_a_record_can_be_used_again() -> None:
    run = make_run(PATHS, settings=Settings(temperature=0.7, stop_token_ids=[3]).resolved(TreeShape(4, 6, 20)).model_dump())
    again = Run.from_json(run.to_json()).settings
    assert again == run.settings and again.resolved(TreeShape(9, 9, 9)).tree == (4, 6, 20)
