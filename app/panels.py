"""The tabs below the lanes, and what fills them from a set of runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

import gradio as gr

from app.charts import CHARTS, Look, draw_all
from app.downloads import Downloads
from app.layout import drawing
from app.library import Recording
from app.lossless import lossless_panel
from app.papers import CHANGES, papers_panel
from app.why import WHY, draw_why
from decoding.records import Run


@dataclass
class Panels:
    """The parts of the tabs that runs fill."""

    plots: list[gr.Plot] = field(default_factory=list)
    words: list[gr.HTML] = field(default_factory=list)
    why_plots: list[gr.Plot] = field(default_factory=list)
    why_words: list[gr.HTML] = field(default_factory=list)
    lossless: gr.HTML = None  # type: ignore[assignment]
    papers: gr.HTML = None  # type: ignore[assignment]
    files: gr.File = None  # type: ignore[assignment]
    gallery: gr.Radio = None  # type: ignore[assignment]
    upload: gr.UploadButton = None  # type: ignore[assignment]

    def outputs(self) -> list[gr.components.Component]:
        """Everything that `filled` gives values for."""
        return [*self.plots, *self.words, *self.why_plots, *self.why_words, self.lossless, self.papers, self.files]


def tabs(shipped: Sequence[Recording]) -> Panels:
    """Lay the tabs out."""
    panels = Panels()
    with gr.Tabs(elem_id="ds-tabs", overflow_behavior="wrap"):
        with gr.Tab("Step by step", id="steps"):
            drawing("steps", elem_id="ds-steps")
        with gr.Tab("Charts", id="charts"):
            panels.plots, panels.words = _charts(CHARTS)
        with gr.Tab("Race", id="race"):
            drawing("race", elem_id="ds-race")
        with gr.Tab("Lossless", id="lossless"):
            panels.lossless = gr.HTML(apply_default_css=False)
        with gr.Tab("Why HASS, why KOALA", id="why"):
            gr.HTML(CHANGES, apply_default_css=False)
            panels.why_plots, panels.why_words = _charts(WHY)
            panels.papers = gr.HTML(apply_default_css=False)
        with gr.Tab("Runs", id="runs"):
            names = [(recording.title, recording.name) for recording in shipped]
            value = shipped[0].name if shipped else None
            panels.gallery = gr.Radio(
                names, value=value, label="Recorded runs: shown without weights and without a GPU", elem_id="ds-gallery"
            )
            with gr.Row():
                panels.files = gr.File(
                    label="Download what is shown: each run as JSON, all steps as CSV", file_count="multiple", interactive=False
                )
                panels.upload = gr.UploadButton(
                    "Upload run records (1 to 4 JSON files of one prompt)",
                    file_count="multiple",
                    file_types=[".json", ".gz"],
                    elem_id="ds-upload",
                )
    return panels


def _charts(titles: dict) -> tuple[list[gr.Plot], list[gr.HTML]]:
    """The first chart alone, the others two in a row where there is room."""
    plots, words, names = [], [], list(titles)
    for row in (names[:1], *(names[at : at + 2] for at in range(1, len(names), 2))):
        with gr.Row(elem_classes="ds-pairs"):
            for title in row:
                with gr.Column(min_width=420, elem_classes="ds-chart"):
                    gr.HTML(f'<div class="ds-root"><h3>{escape(title)}</h3></div>', apply_default_css=False)
                    words.append(gr.HTML(apply_default_css=False))
                    plots.append(gr.Plot(show_label=False))
    return plots, words


def filled(panels: Panels, runs: Sequence[Run], session: str, look: Look, downloads: Downloads) -> dict:
    """Values of all parts of the tabs for a set of runs."""
    out: dict = {}
    for plots, words, charts in (
        (panels.plots, panels.words, draw_all(runs, look)),
        (panels.why_plots, panels.why_words, draw_why(runs, look)),
    ):
        for plot, text, chart in zip(plots, words, charts, strict=True):
            out[plot] = gr.Plot(chart.figure, visible=bool(chart.figure.data))
            out[text] = f'<div class="ds-root"><p class="ds-note">{escape(chart.words)}</p></div>'
    out[panels.lossless] = lossless_panel(runs)
    out[panels.papers] = papers_panel(runs)
    out[panels.files] = downloads.write(session, runs)
    return out
