"""The figures, against steps counted by hand."""

import subprocess
import sys

import pytest

from decoding.metrics import lossless, measure, speed_up
from tests.records import make_run

# accepted nodes 2, 0, 3, 1; every path ends with its bonus token
PATHS = [[21, 22, 23], [24], [25, 26, 27, 28], [29, 30]]


def test_a_run_counted_by_hand() -> None:
    figures = measure(make_run(PATHS))
    assert (figures.steps, figures.tokens, figures.accepted) == (4, 10, 6)
    assert figures.drafted == 5 + 1 + 7 + 3
    assert figures.mean_acceptance_length == 1 + 6 / 4
    assert figures.draft_acceptance_rate == 6 / 16
    assert figures.acceptance_histogram == {0: 1, 1: 1, 2: 1, 3: 1}
    # steps of 8 ms: 10 tokens in 32 ms, without the prefill's 10 ms and its first token
    assert (figures.prefill_ms, figures.decode_ms) == (10, 32)
    assert figures.tokens_per_second == 10 / 0.032
    assert figures.ms_per_token == 3.2
    assert figures.phase_ms == {"draft": 4, "verify": 16, "accept": 8, "commit": 2, "record": 2}
    assert sum(figures.phase_ms_per_token.values()) == pytest.approx(figures.ms_per_token)


def test_acceptance_by_depth_both_ways() -> None:
    figures = measure(make_run(PATHS))
    # accepted 2, 0, 3, 1 with trees 3, 1, 4, 2 deep
    assert figures.acceptance_by_depth == [3 / 4, 2 / 4, 1 / 4, 0]
    # depth 2: of the 3 steps that accepted depth 1, all had a depth 2; 2 accepted it; depth 3: 1 of 2; depth 4: 0 of 1
    assert figures.conditional_acceptance == [3 / 4, 2 / 3, 1 / 2, 0]


def test_a_depth_that_only_some_trees_reach_counts_only_those_given_the_one_before() -> None:
    paths = [[21, 22], [23, 24]]
    shallow = make_run(paths).model_dump()
    step = shallow["steps"][1]  # its tree ends at depth 1, where its node was accepted
    for name in ("node_ids", "parents", "depths", "draft_logprobs", "scores", "target_probs", "status"):
        step[name] = step[name][:2]
    figures = measure(type(make_run(paths)).model_validate(shallow))
    assert figures.reachable == (2, 1)
    assert figures.acceptance_by_depth == [1, 0] and figures.conditional_acceptance == [1, 0]
    never = measure(make_run([[21], [22]]))
    assert never.acceptance_by_depth == [0] and never.conditional_acceptance == [0]


def test_tau_counts_what_was_accepted_where_the_last_step_is_cut() -> None:
    cut = measure(make_run(PATHS, emit_last=1))
    assert cut.tokens == 9
    assert cut.mean_acceptance_length == measure(make_run(PATHS)).mean_acceptance_length == 2.5
    assert cut.tokens_per_second == 9 / 0.032  # speed counts what came out


def test_plain_decoding_is_one() -> None:
    figures = measure(make_run([[21], [22], [23]], plain=True))
    assert figures.mean_acceptance_length == 1.0
    assert (figures.drafted, figures.accepted, figures.tokens) == (0, 0, 3)
    assert figures.draft_acceptance_rate is None
    assert figures.acceptance_by_depth == [] and figures.conditional_acceptance == [] and figures.acceptance_histogram == {}


def test_a_run_without_steps_has_no_ratios_instead_of_a_division_by_zero() -> None:
    figures = measure(make_run([]))
    assert (figures.steps, figures.tokens, figures.decode_ms) == (0, 0, 0)
    ratios = [figures.mean_acceptance_length, figures.draft_acceptance_rate, figures.tokens_per_second, figures.ms_per_token]
    assert ratios == [None] * 4 and figures.phase_ms_per_token == {}
    assert speed_up(figures, measure(make_run(PATHS))) is None
    assert measure([]).mean_acceptance_length is None


def test_several_runs_are_totals_first_ratios_after() -> None:
    both = measure([make_run(PATHS), make_run([[31]] * 12)])
    assert (both.steps, both.tokens, both.accepted) == (16, 22, 6)
    assert both.mean_acceptance_length == 1 + 6 / 16  # not the mean of 2.5 and 1
    assert both.tokens_per_second == 22 / (16 * 0.008)
    assert both.prefill_ms == 20


def test_speed_up_is_a_ratio_of_measured_speeds() -> None:
    run, plain = measure(make_run(PATHS)), measure(make_run([[21]] * 10, plain=True))
    assert speed_up(run, plain) == pytest.approx((10 / 32) / (10 / 70))
    assert speed_up(plain, plain) == 1


SAME = [[21, 22, 23], [24], [25, 26]]
PLAIN = [[21], [22], [23], [24], [25], [26]]


def test_lossless_equal() -> None:
    found = lossless(make_run(SAME), make_run(PLAIN, plain=True))
    assert found.equal and found.compared == 7 and found.index is None


def test_lossless_names_the_first_difference_and_the_gap_there() -> None:
    plain = make_run([[21], [22], [88], [24], [25], [26]], plain=True).model_dump()
    for place, step in enumerate(plain["steps"]):
        step["margins"] = [float(place)]
    found = lossless(make_run(SAME), make_run([]).model_validate(plain))
    assert (found.equal, found.index, found.plain_id, found.run_id) == (False, 3, 88, 23)
    assert found.margin == 2.0 and not found.near_tie  # the third step of plain decoding chose the fourth token


@pytest.mark.parametrize(("gap", "near"), [(0.0, True), (0.1, True), (0.5, False)])
def test_a_near_tie_is_called_one(gap: float, near: bool) -> None:
    plain = make_run([[99]], plain=True).model_dump()
    plain["steps"][0]["margins"] = [gap]
    assert lossless(make_run([[21]]), make_run([]).model_validate(plain)).near_tie is near


def test_a_difference_in_the_first_token_has_no_gap() -> None:
    plain = make_run([[21]], plain=True).model_dump()
    plain["first_id"] = plain["steps"][0]["root_id"] = 6
    plain["output_ids"][0] = 6
    found = lossless(make_run([[21]]), make_run([]).model_validate(plain))
    assert (found.index, found.plain_id, found.run_id, found.margin, found.near_tie) == (0, 6, 5, None, False)


@pytest.mark.parametrize("reason", ["cancelled", "error"])
def test_an_unfinished_run_is_compared_as_far_as_it_came(reason: str) -> None:
    plain = make_run(PLAIN, plain=True)
    part = make_run(SAME[:1], finish_reason=reason)
    assert lossless(part, plain).equal and lossless(part, plain).compared == 4
    assert not lossless(make_run([[21, 99]], finish_reason=reason), plain).equal
    whole, early = make_run(SAME), make_run(PLAIN[:2], plain=True, finish_reason=reason)
    assert lossless(whole, early).equal and lossless(whole, early).compared == 3


def test_a_finished_run_of_another_length_is_not_equal() -> None:
    plain = make_run(PLAIN, plain=True)
    found = lossless(make_run(SAME[:1]), plain)
    assert (found.equal, found.compared, found.index) == (False, 4, 4)
    assert not lossless(make_run(SAME), make_run(PLAIN[:2], plain=True)).equal
    # a cancelled run can only be shorter: one that went on after plain decoding had stopped is wrong
    assert not lossless(make_run(SAME, finish_reason="cancelled"), make_run(PLAIN[:2], plain=True)).equal


def test_records_and_metrics_are_read_without_torch_or_gradio() -> None:
    program = "import sys, decoding.metrics, decoding.records, decoding; decoding.Run, decoding.Settings; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "decoding.metrics" in loaded
    assert not {"torch", "gradio", "transformers", "numpy", "heads", "app"} & set(loaded)
