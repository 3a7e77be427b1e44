"""Choosing a target: a list whose entries that can't be had here are greyed out with the reason, and the catalogue as a table."""

from html import escape

import gradio as gr

from app.models import Models
from app.offers import TargetOffer
from decoding.known import KnownHead, catalogue
from decoding.memory import CONTEXT, gigabytes

# the list is drawn anew whenever its value changes, so the listener sits on what stays
LISTEN = """element.addEventListener("change", (event) => {
  if (event.target.tagName !== "SELECT") return;
  props.value = event.target.value;
  trigger("change");
});"""


def _literal(text: str) -> str:
    """Text for an HTML template of Gradio: neither markup, nor a template's own marks."""
    marked = escape(text)
    for mark in "$`{}\\":
        marked = marked.replace(mark, f"&#{ord(mark)};")
    return marked


def target_list(models: Models) -> gr.Dropdown | gr.HTML:
    """The targets of this server as one input; its value is what load_target takes."""
    offers = models.target_offers()
    if models.allow_custom:
        names = [(offer.title, offer.source) for offer in offers if offer.reason is None]
        return gr.Dropdown(names, value=models.source, label="Target", allow_custom_value=True, elem_id="ds-target")
    options = "".join(_option(offer) for offer in offers)
    template = f'<div class="ds-field"><span aria-hidden="true">Target</span><select aria-label="Target">{options}</select></div>'
    return gr.HTML(value=models.source, html_template=template, js_on_load=LISTEN, apply_default_css=False, elem_id="ds-target")


def _option(offer: TargetOffer) -> str:
    disabled = " disabled" if offer.reason else ""
    # a comparison of strings inside the template, with both sides as plain characters
    chosen = "${value === decodeURIComponent('" + "".join(f"%{byte:02x}" for byte in offer.source.encode()) + "') ? ' selected' : ''}"
    return f'<option value="{_literal(offer.source)}"{disabled}{chosen}>{_literal(_line(offer))}</option>'


def _line(offer: TargetOffer) -> str:
    notes = [offer.note] if offer.note else []
    if offer.gated:
        notes.append("gated: log in with hf auth login")
    return offer.title + (f" ({offer.reason})" if offer.reason else f" ({', '.join(notes)})" if notes else "")


def catalogue_table(models: Models) -> str:
    """All known targets and heads as an HTML table, in a fold."""
    rows = []
    for offer in models.target_offers():
        memory = f"{gigabytes(offer.needs.total)}: {offer.needs}" if offer.needs else "known once it is loaded"
        facts = [offer.title, memory, offer.licence or "see its page", "yes" if offer.gated else "no", "yes" if offer.tested else "no"]
        heads = "<br>".join(escape(_head_line(head)) for head in catalogue().heads_for(offer.source)) or "shipped ones, or your own"
        rows.append("<tr>" + "".join(f"<td>{escape(fact)}</td>" for fact in facts) + f"<td>{heads}</td></tr>")
    names = ("Target", "Memory", "Licence", "Gated", "Tested here", "Released heads")
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    return (
        "<details class='ds-small'><summary>Known targets and heads</summary>"
        f"<p>Memory is computed from the sizes of a target, for one request of up to {CONTEXT:,} tokens, a tree of 59 nodes and a "
        "one-layer head. Tested here: these very weights ran here. For the others the layout was tested, on small "
        "models of the same kind.</p>"
        f"<div class='ds-scroll' tabindex='0' role='region' aria-label='Known targets and heads'><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div></details>"
    )


def _head_line(head: KnownHead) -> str:
    return f"{head.source} ({head.method}{f', {gigabytes(head.bytes)}' if head.bytes else ''})"
