"""Plotly figures of runs, each with a sentence that says what it shows for these very runs. Axes start at zero."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from app.methods import Method, lane_label, method
from decoding.metrics import PHASES, Metrics, measure
from decoding.records import Run

DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up")
PAIR = 340  # height of charts that stand side by side
PATTERNS = {"draft": "", "verify": "", "accept": "/", "commit": "x", "record": "."}


@dataclass(frozen=True)
class Chart:
    """A figure and what it shows, in words."""

    figure: go.Figure
    words: str


@dataclass(frozen=True)
class Drawn:
    """A run as charts need it: measured once, named, coloured for the theme."""

    run: Run
    figures: Metrics
    name: str
    colour: str

    @property
    def with_head(self) -> bool:
        return self.run.head is not None


class Look:
    """Plotly's template for one theme and width: transparent paper, quiet grid, the reader's own font."""

    def __init__(self, dark: bool, narrow: bool = False) -> None:
        self.dark, self.narrow = dark, narrow
        self.ink = "#f0f2f5" if dark else "#101828"
        self.quiet = "#b6c0ce" if dark else "#475467"
        self.grid = "#2c3441" if dark else "#e4e7ec"
        self.target = "#75829a" if dark else "#98a2b3"
        self.minor = {"accept": self.quiet, "commit": self.quiet, "record": self.grid}

    def colour(self, entry: Method) -> str:
        return entry.dark if self.dark else entry.light

    def phase(self, name: str, lane: Drawn) -> dict:
        """How a phase is filled: the head's own work in its colour, the target's in grey, the rest hatched."""
        fill = lane.colour if name == "draft" else self.target if name == "verify" else self.minor[name]
        return {"color": fill, "pattern": self.hatch(name), "line": {"width": 0}}

    def hatch(self, name: str) -> dict:
        """A phase's pattern: light on the dark fills of accept and commit, dark on that of record."""
        return {"shape": PATTERNS[name], "fgcolor": self.ink if name == "record" else self.grid, "size": 5}

    def finish(self, figure: go.Figure, height: int, **layout: object) -> go.Figure:
        axis = {
            "gridcolor": self.grid,
            "linecolor": self.grid,
            "automargin": True,
            "zeroline": False,
            "title": {"standoff": 8, "font": {"size": 12.5}},
        }
        figure.update_layout(
            height=height,
            margin={"l": 8, "r": 12, "t": 34, "b": 8},
            paper_bgcolor="rgba(0,0,0,0)",
            plot_bgcolor="rgba(0,0,0,0)",
            font={"color": self.ink, "size": 13, "family": "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"},
            legend={"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "bgcolor": "rgba(0,0,0,0)", "traceorder": "normal"},
            hoverlabel={"font": {"size": 13}},
            bargap=0.12,
            dragmode=False,  # a finger on a chart scrolls the page
            modebar={
                "remove": ["zoom", "pan", "select", "lasso", "zoomIn", "zoomOut", "autoScale", "resetScale"],
                "bgcolor": "rgba(0,0,0,0)",
            },
            **layout,
        )
        figure.update_xaxes(**axis)
        figure.update_yaxes(**axis, rangemode="tozero", showline=True)
        return figure


def marked(lane: Drawn, index: int) -> dict:
    """How a lane's line with points looks."""
    return marked_as(lane.name, lane.colour, index)


def marked_as(name: str, colour: str, index: int) -> dict:
    """A line with points: colour, dash and symbol together tell lines apart."""
    return {
        "name": name,
        "mode": "lines+markers",
        "line": {"color": colour, "width": 2.5, "dash": DASHES[index % 4]},
        "marker": {"symbol": SYMBOLS[index % 4], "size": 9, "color": colour},
    }


def drawn(runs: Sequence[Run], look: Look) -> list[Drawn]:
    """Runs that have a step, measured and coloured."""
    return [Drawn(run, measure(run), lane_label(run.method, run.head), look.colour(method(run.method))) for run in runs if run.steps]


def draw_all(runs: Sequence[Run], look: Look) -> list[Chart]:
    """The five charts of a set of lanes, in the order of CHARTS."""
    lanes = drawn(runs, look)
    return [draw(lanes, look) for draw in CHARTS.values()]


def latency(lanes: list[Drawn], look: Look) -> Chart:
    """Time of every step by phase, one row for each lane, all on one scale."""
    figure = make_subplots(
        rows=max(1, len(lanes)), cols=1, shared_xaxes=True, vertical_spacing=0.06, subplot_titles=[lane.name for lane in lanes]
    )
    top = max((step.end_ms - step.start_ms for lane in lanes for step in lane.run.steps), default=1.0)
    for row, lane in enumerate(lanes, 1):
        numbers = [step.index + 1 for step in lane.run.steps]
        for name in PHASES:
            values = [getattr(step, f"{name}_ms") for step in lane.run.steps]
            figure.add_bar(
                x=numbers, y=values, name=name, marker=look.phase(name, lane), showlegend=False, row=row, col=1,
                hovertemplate=f"step %{{x}}<br>{name} %{{y:.2f}} ms<extra>{lane.name}</extra>",
            )  # fmt: skip
    heads = [lane for lane in lanes if lane.with_head]
    for name in PHASES:  # one legend for all rows
        shade: dict = {"color": heads[0].colour if name == "draft" and heads else look.minor.get(name, look.target)}
        label = {"draft": "draft (in the lane's colour)", "verify": "verify (target)"}.get(name, name)
        figure.add_bar(x=[None], y=[None], name=label, marker={**shade, "pattern": look.hatch(name)})
    look.finish(figure, 130 + 120 * len(lanes), barmode="stack")
    figure.update_yaxes(range=[0, top * 1.05], title_text="ms")
    figure.update_xaxes(title_text="step", row=len(lanes), col=1)
    figure.update_annotations(font_size=13, x=0, xanchor="left")
    figure.update_layout(legend_y=1.06)
    return Chart(figure, _latency_words(lanes))


def _latency_words(lanes: list[Drawn]) -> str:
    parts = []
    for lane in lanes:
        figures = lane.figures
        each = figures.decode_ms / figures.steps
        draft, verify = (share(figures.phase_ms[name], figures.decode_ms) for name in ("draft", "verify"))
        if lane.with_head:
            parts.append(f"a step of {lane.name} {each:.1f} ms ({draft} drafting, {verify} the target's forward)")
        else:
            parts.append(f"a step of plain decoding takes {each:.1f} ms")
    return sentence(parts)


def share(part: float, whole: float) -> str:
    """A percentage; of nothing it is zero."""
    return f"{part / whole if whole else 0:.0%}"


def tokens_over_time(lanes: list[Drawn], look: Look) -> Chart:
    """Tokens emitted against the run's own clock, the prefill included."""
    figure = go.Figure()
    for index, lane in enumerate(lanes):
        times, counts = [lane.run.prefill_ms / 1000], [1]
        for step in lane.run.steps:
            times.append(step.end_ms / 1000)
            counts.append(counts[-1] + len(step.token_ids))
        line = {"color": lane.colour, "width": 2.5, "dash": DASHES[index % 4], "shape": "hv"}
        template = f"%{{y}} tokens after %{{x:.2f}} s<extra>{lane.name}</extra>"
        figure.add_scatter(x=times, y=counts, name=lane.name, mode="lines", line=line, hovertemplate=template)
    look.finish(figure, PAIR)
    figure.update_xaxes(title_text="seconds, prefill included", rangemode="tozero")
    figure.update_yaxes(title_text="tokens")
    ranked = sorted((lane for lane in lanes if lane.figures.tokens_per_second), key=lambda lane: -(lane.figures.tokens_per_second or 0))
    parts = [f"{lane.name} {lane.figures.tokens_per_second:.1f}" for lane in ranked]
    words = f"Steeper is faster; a jump is one step that emitted several tokens. Tokens per second: {', '.join(parts)}."
    return Chart(figure, words if parts else "")


def histogram(lanes: list[Drawn], look: Look) -> Chart:
    """How many steps accepted 0, 1, 2, ... drafted tokens (bonus not counted)."""
    figure = go.Figure()
    heads = [lane for lane in lanes if lane.with_head]
    for index, lane in enumerate(heads):
        counts = lane.figures.acceptance_histogram
        total = sum(counts.values()) or 1
        lengths = list(range(max(counts, default=0) + 1))
        marker = {"color": lane.colour, "pattern": {"shape": ("", "/", "x", ".")[index % 4], "fgcolor": look.ink, "size": 6}}
        template = f"%{{y:.0%}} of the steps accept %{{x}}<extra>{lane.name}</extra>"
        figure.add_bar(x=lengths, y=[counts.get(n, 0) / total for n in lengths], name=lane.name, marker=marker, hovertemplate=template)
    look.finish(figure, PAIR, barmode="group")
    figure.update_xaxes(title_text="accepted tokens in a step", dtick=1)
    figure.update_yaxes(title_text="share of the steps", tickformat=".0%")
    parts = []
    for lane in heads:
        figures = lane.figures
        steps = len(figures.accepted_lengths) or 1
        parts.append(
            f"{lane.name} accepts nothing in {share(figures.acceptance_histogram.get(0, 0), steps)} of its steps and "
            f"{figures.accepted / steps:.2f} of {figures.drafted / steps:.0f} drafted nodes on average "
            f"(tree use {share(figures.accepted, figures.drafted)}; tau {figures.mean_acceptance_length or 0:.2f} with the bonus token)"
        )
    return Chart(figure, sentence(parts) or NO_HEAD)


def panels(titles: Sequence[str], look: Look) -> go.Figure:
    """Panels side by side, or one below the other where there is no room."""
    if look.narrow:
        return make_subplots(rows=len(titles), cols=1, vertical_spacing=0.16, subplot_titles=titles)
    return make_subplots(rows=1, cols=len(titles), horizontal_spacing=0.08, subplot_titles=titles)


def place(number: int, look: Look) -> dict[str, int]:
    """Row and column of a panel, counted from 1."""
    return {"row": number, "col": 1} if look.narrow else {"row": 1, "col": number}


def by_depth(lanes: list[Drawn], look: Look) -> Chart:
    """Acceptance at each depth: of all steps, and given that the depth before was accepted (n-alpha)."""
    titles = ["of all steps", "if the depth before was (n-alpha)"]
    figure = panels(titles, look)
    heads = [lane for lane in lanes if lane.with_head]
    for index, lane in enumerate(heads):
        for number, values in ((1, lane.figures.acceptance_by_depth), (2, lane.figures.conditional_acceptance)):
            figure.add_scatter(
                x=list(range(1, len(values) + 1)), y=values, legendgroup=lane.name, showlegend=number == 1, **marked(lane, index),
                hovertemplate=f"depth %{{x}}: %{{y:.0%}}<extra>{lane.name}</extra>", **place(number, look),
            )  # fmt: skip
    look.finish(figure, 560 if look.narrow else PAIR)
    figure.update_layout(legend_y=1.12, margin_t=60)
    figure.update_annotations(font_size=13)
    figure.update_xaxes(title_text="depth in the tree", dtick=1)
    figure.update_yaxes(range=[0, 1.02], tickformat=".0%")
    parts = []
    for lane in heads:
        given = [value for value in lane.figures.conditional_acceptance if value is not None]
        if len(given) > 1:
            parts.append(f"with {lane.name}, depth 1 is accepted in {given[0]:.0%} of the steps, and depth 2 in {given[1]:.0%} of those")
    return Chart(figure, sentence(parts) or NO_HEAD)


def cost(lanes: list[Drawn], look: Look) -> Chart:
    """Milliseconds for each emitted token, by phase."""
    figure = go.Figure()
    names = [lane.name for lane in lanes]
    for name in PHASES:
        values = [lane.figures.phase_ms_per_token.get(name, 0.0) for lane in lanes]
        fills = [look.phase(name, lane)["color"] for lane in lanes]
        marker = {"color": fills, "pattern": look.hatch(name)}
        template = f"{name} %{{x:.2f}} ms per token<extra>%{{y}}</extra>"
        figure.add_bar(y=names, x=values, name=name, orientation="h", marker=marker, hovertemplate=template)
    look.finish(figure, 110 + 46 * len(lanes) if look.narrow else PAIR, barmode="stack", showlegend=False)
    figure.update_xaxes(title_text="ms per emitted token", rangemode="tozero")
    figure.update_yaxes(autorange="reversed")
    parts = [f"{lane.figures.ms_per_token:.1f} ms with {lane.name}" for lane in lanes if lane.figures.ms_per_token]
    words = f"A token costs {', '.join(parts)}." if parts else ""
    heavy = [lane for lane in lanes if lane.with_head and lane.figures.phase_ms["draft"] > lane.figures.phase_ms["verify"]]
    if heavy:
        words += f" Drafting takes longer than the target's forward with {', '.join(lane.name for lane in heavy)}: try a smaller tree."
    return Chart(figure, words + " A head pays where drafting and checking cost less than the forwards that it saves.")


NO_HEAD = "No lane with a draft head has run."
CHARTS: dict[str, Callable[[list[Drawn], Look], Chart]] = {
    "Time of each step": latency,
    "Tokens over time": tokens_over_time,
    "Accepted tokens per step": histogram,
    "Acceptance by depth": by_depth,
    "Cost of a token": cost,
}


def sentence(parts: list[str]) -> str:
    """Clauses as one sentence."""
    if not parts:
        return ""
    text = "; ".join(parts)
    return text[0].upper() + text[1:] + "."
