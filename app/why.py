"""Why HASS and KOALA draft better, shown on the runs at hand: drift, overlap, break-even, and how the heads were trained."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import plotly.graph_objects as go

from app.charts import DASHES, NO_HEAD, PAIR, SYMBOLS, Chart, Drawn, Look, drawn, marked, marked_as, panels, place, sentence
from app.methods import METHODS, lane_label, method
from app.offers import SHIPPED
from decoding.records import Run
from decoding.tuned import chosen_for

MIN_SEEN = 3  # a mean over fewer steps than this says nothing


def draw_why(runs: Sequence[Run], look: Look) -> list[Chart]:
    """The charts of this part, in the order of WHY."""
    lanes = drawn(runs, look)
    return [draw(lanes, look) for draw in WHY.values()]


def means_by_depth(run: Run, name: str) -> list[float | None]:
    """Mean of a per-position list of the steps at each depth of the guess (entry 0 of a step proposes depth 1)."""
    columns: list[list[float]] = []
    for step in run.steps:
        for depth, value in enumerate(getattr(step, name)):
            if value is not None:
                while len(columns) <= depth:
                    columns.append([])
                columns[depth].append(value)
    return [fmean(values) if len(values) >= MIN_SEEN else None for values in columns]


def drift(lanes: list[Drawn], look: Look) -> Chart:
    """Cosine and distance between the head's own feature and the target's, by depth."""
    titles = ["cosine (1 = the same)", "distance (0 = the same)"]
    figure, parts = _by_depth(lanes, look, {"drift_cosine": "cosine %{y:.3f}", "drift_distance": "distance %{y:.1f}"}, titles)
    figure.update_yaxes(range=[0, 1.02], **place(1, look))
    words = (
        "From depth 2 on a head builds on its own guesses instead of the target's true features; this is how far they drift. "
        "What counts is whether such a feature still names the right token: see the next chart. "
    )
    told = _fall(parts, "the cosine goes from {first:.2f} at depth 1 to {last:.2f} at depth {depth}")
    return Chart(figure, words + told + _without(lanes, parts))


def overlap(lanes: list[Drawn], look: Look) -> Chart:
    """Shared mass of the head's and the target's distribution, by depth."""
    figure, parts = _by_depth(lanes, look, {"overlap": "overlap %{y:.0%}"}, [])
    figure.update_yaxes(title_text="shared probability", range=[0, 1.02], tickformat=".0%")
    words = "What drift costs: the share of probability on which head and target agree. "
    return Chart(
        figure, words + _fall(parts, "it goes from {first:.0%} at depth 1 to {last:.0%} at depth {depth}") + _without(lanes, parts)
    )


Means = list[tuple[str, list[float | None]]]


def _by_depth(lanes: list[Drawn], look: Look, names: dict[str, str], titles: list[str]) -> tuple[go.Figure, Means]:
    """One panel for each of the step's lists in `names` (with its hover text); the means of the first one come back."""
    figure, parts = panels(titles or [""], look), []
    for index, lane in enumerate(lane for lane in lanes if lane.with_head):
        for number, (name, hover) in enumerate(names.items(), 1):
            values = means_by_depth(lane.run, name)
            if not any(value is not None for value in values):
                continue
            if number == 1:
                parts.append((lane.name, values))
            figure.add_scatter(
                x=list(range(1, len(values) + 1)), y=values, legendgroup=lane.name, showlegend=number == 1, **marked(lane, index),
                hovertemplate=f"guess for depth %{{x}}: {hover}<extra>{lane.name}</extra>", **place(number, look),
            )  # fmt: skip
    look.finish(figure, 560 if look.narrow and titles else PAIR)
    if titles:
        figure.update_layout(legend_y=1.12, margin_t=60)
    figure.update_annotations(font_size=13)
    figure.update_xaxes(title_text="depth of the guess", dtick=1)
    return figure, parts


def _fall(parts: Means, form: str) -> str:
    said = []
    for name, values in parts:
        seen = [(depth, value) for depth, value in enumerate(values, 1) if value is not None]
        if len(seen) > 1:
            said.append(f"{name}: {form.format(first=seen[0][1], last=seen[-1][1], depth=seen[-1][0])}")
    return sentence(said)


def _without(lanes: list[Drawn], parts: Means) -> str:
    """Why a lane with a head has no line, in words."""
    heads = [lane for lane in lanes if lane.with_head and lane.name not in dict(parts)]
    if not heads:
        return "" if parts else NO_HEAD
    medusa = [lane.name for lane in heads if "medusa" in lane.run.method]
    others = [lane.name for lane in heads if "medusa" not in lane.run.method]
    said = f" {' and '.join(medusa)} guess every position from one true feature: no own features, so nothing to drift." if medusa else ""
    return said + (f" The runs of {', '.join(others)} do not hold it: press Run to measure it." if others else "")


def break_even(lanes: list[Drawn], look: Look) -> Chart:
    """Tokens per step against the cost of a step in steps of plain decoding; on the line a head neither gains nor loses.

    What the last step accepted beyond the end of the text is not in the text: tau has it, the tokens here do not.
    """
    plain = next((lane for lane in lanes if not lane.with_head), None)
    figure = go.Figure()
    if plain is None or not plain.figures.decode_ms:
        look.finish(figure, 320)
        return Chart(figure, "Plain decoding was not run, so nothing can be divided by it.")
    unit = plain.figures.decode_ms / plain.figures.steps
    points = [(lane, lane.figures.decode_ms / lane.figures.steps / unit, lane.figures.tokens / lane.figures.steps) for lane in lanes]
    far = max([3.0, *(cost * 1.25 for _, cost, _ in points), *(given * 0.9 for _, _, given in points)])
    for gain in (1, 1.5, 2, 3):
        line = {"color": look.quiet, "width": 2} if gain == 1 else {"color": look.target, "width": 1, "dash": "dot"}
        figure.add_scatter(x=[0, far], y=[0, far * gain], mode="lines", showlegend=False, hoverinfo="skip", line=line)
    top = max([3.0, *(given * 1.25 for _, _, given in points)])
    for gain in (1, 1.5, 2, 3):
        x, y = (far, far * gain) if far * gain <= top else (top / gain, top)
        text = "break-even" if gain == 1 else f"{gain:g}×"
        figure.add_annotation(
            x=x,
            y=y,
            text=text,
            showarrow=False,
            xanchor="right",
            yanchor="top",
            xshift=-8,
            yshift=-4,
            font={"size": 12, "color": look.quiet},
        )
    for index, (lane, cost, given) in enumerate(points):
        figure.add_scatter(
            x=[cost], y=[given], name=lane.name, mode="markers", marker={"color": lane.colour, "size": 15, "symbol": SYMBOLS[index % 4]},
            hovertemplate=f"a step costs %{{x:.2f}} plain steps<br>and gives %{{y:.2f}} tokens<extra>{lane.name}</extra>",
        )  # fmt: skip
    look.finish(figure, PAIR)
    figure.update_xaxes(title_text="cost of a step, in steps of plain decoding", range=[0, far])
    figure.update_yaxes(title_text="tokens per step", range=[0, top])
    parts = []
    for lane, cost, given in points:
        if lane.with_head:
            gain = given / cost
            verdict = f"{gain:.2f}× as fast" if gain >= 1 else f"a loss, {gain:.2f}×"
            parts.append(f"{lane.name}: a step costs {cost:.2f} plain steps and gives {given:.2f} tokens, so {verdict}")
    return Chart(figure, "A head pays where its point lies above the line. " + sentence(parts))


def trees(lanes: list[Drawn], look: Look) -> Chart:
    """What each number of nodes was measured to give on this kind of machine, and the tree that was chosen."""
    figure, parts, missing, plain = go.Figure(), [], [], 0.0
    for index, lane in enumerate(lane for lane in lanes if lane.with_head):
        found = chosen_for(lane.run)
        if found is None:
            missing.append(lane.name)
            continue
        points = sorted(found.curve, key=lambda point: point["nodes"])
        hover = "%{x} nodes, depth %{customdata[0]}, top-k %{customdata[1]}: %{y:.1f} ms a token, tau %{customdata[2]:.2f}"
        figure.add_scatter(
            x=[point["nodes"] for point in points], y=[point["ms_per_token"] for point in points], name=lane.name, mode="lines",
            customdata=[(point["depth"], point["top_k"], point["tau"]) for point in points],
            line={"color": lane.colour, "width": 2.5, "dash": DASHES[index % 4]}, hovertemplate=f"{hover}<extra>{lane.name}</extra>",
        )  # fmt: skip
        tried = found.finals or points  # the short way runs every tree a few steps, and none to its end
        figure.add_scatter(
            x=[point["nodes"] for point in tried], y=[point["ms_per_token"] for point in tried], mode="markers",
            customdata=[(point["depth"], point["top_k"], point["tau"]) for point in tried],
            marker={"color": lane.colour, "size": [14 if point["nodes"] == found.nodes else 7 for point in tried],
                    "symbol": SYMBOLS[index % 4]},
            showlegend=False, hovertemplate=f"{'run: ' if found.finals else ''}{hover}<extra>{lane.name}</extra>",
        )  # fmt: skip
        plain = max(plain, found.plain_ms)
        used = lane.run.settings.tree
        other = "" if used == found.tree else f" (this run used {used.depth}/{used.top_k}/{used.nodes})"
        told = f"{found.nodes} nodes at depth {found.depth}, top-k {found.top_k}: {found.speed_up:.2f}× plain decoding"
        short = f" (expected: its tau is from {found.acceptance_from}, only costs were measured here)" if found.acceptance_from else ""
        parts.append(f"{lane.name}: {told}{short}{other}")
    if parts:
        figure.add_hline(y=plain, line={"color": look.quiet, "dash": "dot"}, annotation_text="a token of plain decoding")
    look.finish(figure, PAIR if parts else 320)
    figure.update_xaxes(title_text="nodes of the tree", rangemode="tozero")
    figure.update_yaxes(title_text="ms a token", rangemode="tozero")
    words = (
        "More nodes catch more tokens and cost a slower verification. Lines: what is expected from one wide tree's record and the "
        "cost of each part; marks: the best of them, run in turns with plain decoding; the large mark is the choice. "
        "Where the two disagree, the marks are the measurement and the line was a guess. "
    )
    if missing:
        missing_words = f" Nothing was tuned for {', '.join(missing)} on the machine of these runs: python -m decoding tune --head NAME."
    else:
        missing_words = ""
    return Chart(figure, (words + sentence(parts) if parts else NO_HEAD if not missing else "") + missing_words)


def training(_: list[Drawn], look: Look) -> Chart:
    """First guesses of the shipped heads on held-out text, by draft step."""
    figure, parts = go.Figure(), []
    for index, entry in enumerate(trained_heads()):
        values, name = entry["top1"], lane_label(entry["method"], entry["name"])
        style = marked_as(name, look.colour(method(entry["method"])), index)
        hover = f"draft step %{{x}}: right %{{y:.1%}} of the time<extra>{name}</extra>"
        figure.add_scatter(x=list(range(1, len(values) + 1)), y=values, hovertemplate=hover, **style)
        parts.append(f"{name} keeps {values[-1] / values[0]:.0%} of its first-step accuracy at step {len(values)}")
    look.finish(figure, 320)
    figure.update_xaxes(title_text="draft step", dtick=1)
    figure.update_yaxes(title_text="first guess right", tickformat=".0%")
    return Chart(figure, "Each head measured on dialogues of the target that were kept out of its training. " + sentence(parts))


def trained_heads(folder: Path = SHIPPED) -> list[dict[str, Any]]:
    """What the shipped heads' configs say of their training and of the held-out text; heads without figures are left out."""
    out = []
    for path in folder.glob("*/config.json"):
        told = json.loads(path.read_text(encoding="utf-8"))
        section = told.get("draftscope") or {}
        held = (section.get("results") or {}).get("held_out") or {}
        if held.get("top1"):
            facts = {name: section.get(name) for name in ("method", "align_steps", "adversary", "tokens_seen")}
            layers = told.get("num_hidden_layers") or told.get("medusa_num_layers")
            out.append({"name": path.parent.name, "layers": layers, "top1": held["top1"], "top4": held.get("top4"), **facts})
    order = list(METHODS)
    return sorted(out, key=lambda entry: (order.index(entry["method"]) if entry["method"] in order else len(order), entry["name"]))


WHY: dict[str, Callable[[list[Drawn], Look], Chart]] = {
    "Drift of the draft's features": drift,
    "Agreement of the two distributions": overlap,
    "Does it pay? Gain against cost": break_even,
    "Which tree fits the machine": trees,
    "What training changed": training,
}
