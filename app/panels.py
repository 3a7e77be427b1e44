"""The tabs below the lanes, and what fills them from a set of runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

import gradio as gr

from app.changes import changes_panel
from app.charts import CHARTS, Look, draw_all
from app.downloads import Downloads
from app.layout import drawing
from app.library import MAX_LANES, Recording, lane_name
from app.lossless import lossless_panel
from app.methods import lane_label
from app.papers import papers_panel
from app.why import WHY, draw_why
from decoding.records import Run

RECORDS = """<div class="ds-root ds-prose"><h3>A run is a file</h3>
<p>Everything that this page shows is drawn from run records: what was drafted, what the target said to each node, and how long
each phase took. Download them, or make them elsewhere (<code>python -m decoding run ... --trace out.json</code>), and open them here
again: 1 to 4 records of one prompt, as <code>.json</code> or <code>.json.gz</code>. “Copy link” above the lanes gives an address that
opens the same view.</p></div>"""


@dataclass
class Panels:
    """The parts of the tabs that runs fill."""

    plots: list[gr.Plot] = field(default_factory=list)
    words: list[gr.HTML] = field(default_factory=list)
    why_plots: list[gr.Plot] = field(default_factory=list)
    why_words: list[gr.HTML] = field(default_factory=list)
    lossless: gr.HTML = None  # type: ignore[assignment]
    changes: gr.HTML = None  # type: ignore[assignment]
    papers: gr.HTML = None  # type: ignore[assignment]
    files: gr.File = None  # type: ignore[assignment]
    gallery: gr.Radio = None  # type: ignore[assignment]
    shown: gr.CheckboxGroup = None  # type: ignore[assignment]
    upload: gr.UploadButton = None  # type: ignore[assignment]

    def outputs(self) -> list[gr.components.Component]:
        """Everything that `filled` gives values for."""
        return [*self.plots, *self.words, *self.why_plots, *self.why_words, self.lossless, self.changes, self.papers, self.files]


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
            panels.changes = gr.HTML(changes_panel([]), apply_default_css=False)
            panels.why_plots, panels.why_words = _charts(WHY)
            panels.papers = gr.HTML(apply_default_css=False)
        with gr.Tab("Runs", id="runs"):
            names = [(recording.title, recording.name) for recording in shipped]
            value = shipped[0].name if shipped else None
            panels.gallery = gr.Radio(
                names, value=value, label="Recorded runs: shown without weights and without a GPU", elem_id="ds-gallery"
            )
            panels.shown = gr.CheckboxGroup(label=f"Its lanes, up to {MAX_LANES}", visible=False, elem_id="ds-shown")
            with gr.Row():
                with gr.Column(min_width=380):
                    panels.files = gr.File(
                        label="Download what is shown: each run as JSON, all steps as CSV", file_count="multiple", interactive=False
                    )
                with gr.Column(min_width=380):
                    gr.HTML(RECORDS, apply_default_css=False)
                    panels.upload = gr.UploadButton(
                        f"Upload run records (1 to {MAX_LANES} files)",
                        file_count="multiple",
                        file_types=[".json", ".gz"],
                        elem_id="ds-upload",
                    )
    return panels


def lane_choice(runs: Sequence[Run], shown: Sequence[Run]) -> gr.CheckboxGroup:
    """The choice of lanes of a recording; hidden where all of them are shown anyway."""
    names = [(lane_label(run.method, run.head), lane_name(run)) for run in runs]
    return gr.CheckboxGroup(names, value=list(map(lane_name, shown)), visible=len(runs) > MAX_LANES)


def _charts(titles: dict) -> tuple[list[gr.Plot], list[gr.HTML]]:
    """The first chart alone, the others two in a row where there is room."""
    plots, words, names = [], [], list(titles)
    for row in (names[:1], *(names[at : at + 2] for at in range(1, len(names), 2))):
        with gr.Row(elem_classes="ds-pairs"):
            for title in row:
                with gr.Column(min_width=420, elem_classes="ds-chart"):
                    gr.HTML(f'<div class="ds-root"><h3>{escape(title)}</h3></div>', apply_default_css=False)
                    plots.append(gr.Plot(show_label=False))
                    words.append(gr.HTML(apply_default_css=False))
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
    out[panels.changes] = changes_panel(runs)
    out[panels.papers] = papers_panel(runs)
    out[panels.files] = downloads.write(session, runs)
    return out
