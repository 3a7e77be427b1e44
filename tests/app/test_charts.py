"""Charts and panels: honest axes, words about these runs, escaped tokens."""

import re
from dataclasses import replace
from html import escape

import pytest

from app import results
from app.charts import CHARTS, Look, draw_all
from app.lossless import lossless_panel
from app.papers import papers_panel
from app.why import WHY, draw_why, means_by_depth
from decoding.records import Run
from decoding.tuned import Tuned, remember
from tests.app.made_up import long_run


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    return [long_run(None), long_run("a")]


@pytest.mark.parametrize("look", [Look(False), Look(True), Look(True, narrow=True)])
def test_every_chart_starts_at_zero_and_says_something(runs: list[Run], look: Look) -> None:
    charts = draw_all(runs, look)
    assert len(charts) == len(CHARTS)
    for chart in charts:
        figure = chart.figure.to_plotly_json()
        axes = [value for name, value in figure["layout"].items() if name.startswith("yaxis")]
        assert all(axis["rangemode"] == "tozero" or axis["range"][0] == 0 for axis in axes)
        assert figure["layout"]["paper_bgcolor"] == "rgba(0,0,0,0)"
        assert chart.words.endswith(".") and "HASS" in chart.words


def test_why_measures_break_even_on_these_runs(runs: list[Run]) -> None:
    charts = dict(zip(WHY, draw_why(runs, Look(False)), strict=True))
    # 25 ms for 3 tokens against 21 ms for 1: a step costs 1.19 plain steps
    assert "a step costs 1.19 plain steps and gives 3.00 tokens, so 2.52× as fast" in charts["Does it pay? Gain against cost"].words
    assert "do not hold it" in charts["Drift of the draft's features"].words


def test_what_was_accepted_beyond_the_end_of_the_text_gains_nothing(runs: list[Run]) -> None:
    plain, head = runs[0], runs[-1]
    last = head.steps[-1]
    cut = head.model_copy(update={"steps": [*head.steps[:-1], last.model_copy(update={"token_ids": last.token_ids[:1]})]})
    words = dict(zip(WHY, draw_why([plain, cut], Look(False)), strict=True))["Does it pay? Gain against cost"].words
    cost, given, gain = map(float, re.search(r"costs ([\d.]+) plain steps and gives ([\d.]+) tokens, so ([\d.]+)×", words).groups())
    assert given == pytest.approx((3 * len(head.steps) - 2) / len(head.steps), abs=0.006)
    assert given / cost == pytest.approx(gain, abs=0.02)


def test_the_tree_that_fits_the_machine_is_shown_with_its_curve(runs: list[Run], tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("DRAFTSCOPE_CACHE", str(tmp_path))
    name = "Which tree fits the machine"
    chart = dict(zip(WHY, draw_why(runs, Look(False)), strict=True))[name]
    assert not chart.figure.data and "python -m decoding tune" in chart.words
    where = runs[1].environment
    curve = [{"nodes": n, "depth": 2, "top_k": 3, "tau": 1 + n / 4, "ms_per_token": 30.0 + abs(n - 3)} for n in (1, 2, 3, 4)]
    told = {"head": runs[1].head, "target": runs[1].target, "dtype": where.dtype, "threads": 2, "plain_ms": 45.0}
    costs = {"tau": 1.75, "ms_per_token": 30.0, "verify_ms": {1: 30.0}, "draft_ms": {}}
    finals = [{**curve[2], "ms_per_token": 30.0}, {**curve[0], "ms_per_token": 36.0}]
    tuned = Tuned(**told, **costs, machine=where.machine, depth=2, top_k=3, nodes=3, curve=curve, finals=finals)
    remember("other machine", replace(tuned, machine="another", nodes=4))
    remember("this one", tuned)
    chart = dict(zip(WHY, draw_why(runs, Look(True)), strict=True))[name]
    line, mark = chart.figure.data
    assert list(line.y) == [32.0, 31.0, 30.0, 31.0] and (list(mark.x), list(mark.y)) == ([3, 1], [30.0, 36.0])
    assert mark.marker.size[0] > mark.marker.size[1], "the chosen one"
    assert "3 nodes at depth 2, top-k 3: 1.50× plain decoding" in chart.words
    assert chart.figure.layout.yaxis.rangemode == "tozero"
    remember("this one", replace(tuned, finals=[], acceptance_from="a Xeon"))  # chosen the short way
    chart = dict(zip(WHY, draw_why(runs, Look(True)), strict=True))[name]
    _, mark = chart.figure.data
    assert list(mark.y) == [32.0, 31.0, 30.0, 31.0] and list(mark.marker.size) == [7, 7, 14, 7]
    assert "1.50× plain decoding (expected: its tau is from a Xeon, only costs were measured here)" in chart.words


def test_charts_of_nothing_are_empty_and_do_not_fail() -> None:
    assert all(not chart.figure.data or chart.words is not None for chart in draw_all([], Look(False)))
    assert len(draw_why([], Look(True, narrow=True))) == len(WHY)


def test_means_by_depth_leave_out_what_was_hardly_seen(runs: list[Run]) -> None:
    steps = [step.model_copy(update={"overlap": [0.5, 0.25] if step.index < 2 else [0.5]}) for step in runs[1].steps]
    assert means_by_depth(runs[1].model_copy(update={"steps": steps}), "overlap") == [0.5, None]


def test_lossless_panel_says_equal_or_where_and_why(runs: list[Run]) -> None:
    plain, head = runs
    # not the same text: the made-up lanes differ at their second token
    told = lossless_panel([plain, head])
    assert "differs at token" in told and "this lane" in told
    evil = dict.fromkeys(range(250), "<img src=x onerror=alert(1)>")
    told = lossless_panel([plain.model_copy(update={"token_texts": evil}), head.model_copy(update={"token_texts": evil})])
    assert "<img" not in told and "&lt;img" in told
    assert "not compared" in lossless_panel([head])
    sampled = [run.model_copy(update={"settings": run.settings.model_copy(update={"temperature": 0.7})}) for run in runs]
    assert "same distribution" in lossless_panel(sampled)


def test_papers_panel_names_source_and_hardware(runs: list[Run]) -> None:
    told = papers_panel(runs)
    for part in ("2408.15766", "H800", "2503.01840", "RTX 3090", "2408.08146", "made up"):
        assert part in told
    shown = results.tables()
    assert shown
    for table in shown:  # what was measured, where, when and by which command
        assert all(escape(part) in told for part in (table.title, table.where, table.command)) and table.rows
        assert all(cell for row in table.rows for cell in row)
    assert "`" not in told and "times that of EAGLE " in told  # the page's own names, not the README's marks
    assert (results.UNTOLD in told) and results.NOTE in told
