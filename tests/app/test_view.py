"""The page's view of runs: numbers agree with the metrics, words agree with the records."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.messages import pack
from app.view import Tally, fair, figures, held_against, lane_of, rounding_decided, session_of, step_view
from decoding.metrics import Lossless, measure
from decoding.records import Run, Step
from tests.app.made_up import long_run


def sampled_step(draws: list[float | None], status: list[str], probabilities: list[float], accepted: list[int]) -> Step:
    ids = list(range(10, 10 + len(draws)))
    return Step(
        index=0,
        root_id=1,
        node_ids=ids,
        parents=[-1] * len(ids),
        depths=[1] * len(ids),
        draft_logprobs=[-1.0] * len(ids),
        scores=[-1.0] * len(ids),
        target_probs=probabilities,
        status=status,
        draws=draws,
        accepted=accepted,
        bonus_id=5,
        token_ids=[*(ids[node] for node in accepted), 5],
        start_ms=0,
        draft_ms=1,
        verify_ms=1,
        accept_ms=1,
        commit_ms=1,
        context_length=3,
    )


def test_the_tally_of_a_running_lane_agrees_with_the_metrics_at_every_step() -> None:
    run, plain = long_run("a"), long_run(None)
    tally = Tally(prefill_ms=run.prefill_ms)
    for count, step in enumerate(run.steps[:40], 1):
        tally.add(step)
        so_far = run.model_copy(update={"steps": run.steps[:count], "output_ids": run.output_ids[: 1 + 3 * count]})
        assert tally.figures(measure(plain)) == pytest.approx(figures(so_far, plain))


def test_a_draw_is_held_against_what_the_rejected_siblings_left() -> None:
    step = sampled_step([0.9, 0.7, 0.3, None], ["rejected", "rejected", "accepted", "unreached"], [0.5, 0.25, 0.15, 0.1], [2])
    assert held_against(step) == [0.5, 0.5, 0.6, None]
    view = step_view(step)
    assert view["bar"] == [0.5, 0.5, 0.6, None] and view["mark"] == "rrau"


@given(st.lists(st.floats(0.001, 1), min_size=1, max_size=8))
def test_what_a_draw_is_held_against_is_a_probability(weights: list[float]) -> None:
    probabilities = [weight / sum(weights) for weight in weights]
    step = sampled_step([0.99] * len(weights), ["rejected"] * len(weights), probabilities, [])
    assert all(bar is not None and 0 <= bar <= 1 for bar in held_against(step))


def test_a_lane_holds_all_that_the_record_holds_and_plain_json() -> None:
    run = long_run("a")
    lane = lane_of(run, "0:a", long_run(None))
    assert [len(step["ids"]) for step in lane["steps"]] == [len(step.node_ids) for step in run.steps]
    assert sum(step["out"] for step in lane["steps"]) + 1 == len(run.output_ids)
    assert lane["first"] == run.first_id and lane["tree"] == [6, 10, 60]
    sent = json.loads(pack(session_of([long_run(None), run], "s", "recorded", "title")))
    assert sent["lanes"][1]["figures"]["speedup"] == pytest.approx(lane["figures"]["speedup"])
    used = {id_ for step in run.steps for id_ in (*step.node_ids, step.bonus_id)}
    assert used <= {int(key) for key in sent["lanes"][1]["texts"]}


def test_seconds_of_different_machines_are_not_divided() -> None:
    run, plain = long_run("a"), long_run(None)
    elsewhere = plain.model_copy(update={"environment": plain.environment.model_copy(update={"machine": "another"})})
    assert fair(run, plain) and not fair(run, elsewhere)
    assert lane_of(run, "k", elsewhere)["figures"]["speedup"] is None
    assert lane_of(run, "k", elsewhere)["equality"] is not None  # the texts are still comparable


def test_a_lane_without_plain_decoding_says_that_nothing_was_measured() -> None:
    lane = lane_of(long_run("a"), "k", None)
    assert lane["figures"]["speedup"] is None and lane["equality"] is None


@pytest.mark.parametrize(
    ("dtype", "margin", "tie"), [("bfloat16", 0.1, True), ("bfloat16", 1.0, False), ("float32", 0.1, False), ("float32", 1e-5, True)]
)
def test_only_what_rounding_can_swap_is_called_a_near_tie(dtype: str, margin: float, tie: bool) -> None:
    run = long_run("a")
    run = run.model_copy(update={"environment": run.environment.model_copy(update={"dtype": dtype})})
    assert rounding_decided(Lossless(False, 3, 3, 1, 2, margin), run) is tie


def test_made_up_runs_are_records() -> None:
    assert Run.from_json(long_run("a").to_json()) == long_run("a")
