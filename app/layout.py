"""The page as Gradio parts: controls at the left, lanes at the right, tabs below them."""

import json
from dataclasses import dataclass

import gradio as gr

from app.models import Models
from app.operator import Operator
from app.prompts import Example, examples
from app.targets import catalogue_table, target_list
from decoding.records import Settings, TreeShape

HEADER = """<div class="ds-header"><h1>Draftscope</h1>
<p>A small <b>draft head</b> guesses several tokens ahead; the large <b>target</b> checks all guesses in one forward
and keeps those it would have written itself. The target's own text, in fewer forwards. Here you see every guess, why it was kept
or dropped, and where the time went.</p><div class="ds-root"></div></div>"""


@dataclass
class Parts:
    """The parts that handlers read or write."""

    token: gr.State
    look: list[gr.Checkbox]  # hidden: whether the reader's theme is dark and the window narrow, for the charts
    prompt: gr.Textbox
    examples: list[tuple[gr.Button, Example]]
    target: gr.Dropdown | gr.HTML
    memory: gr.Markdown
    methods: gr.CheckboxGroup | gr.Dropdown
    run: gr.Button
    stop: gr.Button
    settings: list[gr.components.Component]  # in the order of SETTINGS
    pool: gr.Markdown
    lanes: gr.HTML


TREE_SETTINGS = ("tree_depth", "tree_top_k", "tree_nodes")
SETTINGS = ("max_new_tokens", "temperature", "top_p", "top_k", "seed", *TREE_SETTINGS)


def drawing(view: str, value: object = None, template: str = '<div class="ds-root"></div>', **options: object) -> gr.HTML:
    """A part that the page's own script draws. Its template never shows the value: the script does, as text."""
    watched = "watch" if value is not None else "null"
    return gr.HTML(
        value=value,
        html_template=template,
        js_on_load=f"draftscope.mount(element, {json.dumps(view)}, props, {watched})",
        apply_default_css=False,
        **options,
    )


def method_names(models: Models, target: str) -> list[tuple[str, str]]:
    """(label, source) of the methods for a target: heads that were made for another one can't be picked."""
    return [(offer.label, offer.source) for offer in models.offers(target)]


def controls(models: Models, opening_prompt: str, operator: Operator) -> Parts:
    """The column at the left."""
    defaults = Settings()
    token, look = gr.State(""), [gr.Checkbox(visible=False), gr.Checkbox(visible=False)]
    prompt = gr.Textbox(
        opening_prompt,
        label="Prompt",
        lines=3,
        max_lines=8,
        placeholder="Ask the target something",
        elem_id="ds-prompt",
    )
    with gr.Row(elem_classes="ds-examples"):
        buttons = [(gr.Button(example.title, size="sm", min_width=60), example) for example in examples()]
    names, label = method_names(models, models.source), f"Methods ({operator.lanes_words})"
    chosen = [source for _, source in names[: operator.max_lanes]]
    if models.allow_custom:
        methods = gr.Dropdown(
            names,
            value=chosen,
            multiselect=True,
            allow_custom_value=True,
            label=label,
            elem_id="ds-methods",
        )
    else:
        methods = gr.CheckboxGroup(names, value=chosen, label=label, elem_id="ds-methods")
    with gr.Row():
        run = gr.Button("Run", variant="primary", elem_id="ds-run", min_width=100)
        stop = gr.Button("Stop", variant="stop", interactive=False, elem_id="ds-stop", min_width=100)
    with gr.Accordion("Target and settings", open=False, elem_id="ds-settings"):
        target = target_list(models)
        memory = gr.Markdown(models.memory_line(), elem_classes="ds-small")
        gr.HTML(catalogue_table(models), apply_default_css=False)
        fields = [
            gr.Slider(1, operator.max_new_tokens, value=min(96, operator.max_new_tokens), step=1, label="New tokens, at most"),
            gr.Slider(
                0,
                2,
                value=defaults.temperature,
                step=0.05,
                label="Temperature",
                info="0 = greedy: the text of plain decoding (in half precision up to near-ties)",
            ),
            gr.Slider(0.05, 1, value=defaults.top_p, step=0.05, label="Top-p"),
            gr.Number(defaults.top_k, label="Top-k", precision=0, info="0 = off"),
            gr.Number(defaults.seed, label="Seed", precision=0),
            gr.Number(None, label="Tree depth", precision=0, info="Levels drafted", placeholder="head's own"),
            gr.Number(None, label="Tree top-k", precision=0, info="Children per node", placeholder="head's own"),
            gr.Number(None, label="Tree nodes", precision=0, info="Nodes verified, root apart", placeholder="head's own"),
        ]
        pool = gr.Markdown(pool_line(None, None, None), elem_classes="ds-small")
    return Parts(token, look, prompt, buttons, target, memory, methods, run, stop, fields, pool, None)  # type: ignore[arg-type]


def pool_line(depth: float | None, top_k: float | None, nodes: float | None) -> str:
    """What the tree settings give, in words. Gradio sends 0 for a number field that is empty."""
    if not depth or not top_k:
        return "Empty tree fields (or 0) take the values that each head was tuned for."
    pool = TreeShape(int(depth), int(top_k), 1).pool
    chosen = "the head's own number" if not nodes else f"{int(nodes)}"
    return f"Depth {int(depth)} and top-k {int(top_k)} give {pool} candidates; {chosen} of them are verified."
