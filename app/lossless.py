"""The lossless check in words: each lane against plain decoding, equal or the first divergence."""

from collections.abc import Sequence
from html import escape

from app.methods import lane_label, method
from app.view import HALF, plain_of, rounding_decided, same_question
from decoding.metrics import lossless
from decoding.records import Run

CONTEXT = 10  # tokens shown before a divergence
GLYPHS = {" ": "·", "\n": "⏎", "\t": "⇥"}

INTRO = """<p>The head only <em>proposes</em>. What is emitted is always the target's own choice, so at temperature 0 every lane equals
plain decoding token for token, however bad its head is: in float32 exactly; in half precision up to near-ties, where the rounding of a
forward over many tokens can decide otherwise than that of a forward over one. With sampling a drafted token is accepted with exactly the
target's probability p (it is a fixed guess, so its own probability does not enter); if it is rejected, p without it is renormalised for
the next. The distribution of the text is then the target's own, whatever was drafted.</p>"""


def shown(text: str, limit: int = 40) -> str:
    """One token as safe HTML with visible whitespace."""
    if not text:
        return "∅"
    cut = text if len(text) <= limit else text[: limit - 1] + "…"
    return escape("".join(GLYPHS.get(char, char if char.isprintable() else f"U+{ord(char):04X}") for char in cut))


def lossless_panel(runs: Sequence[Run]) -> str:
    """The whole panel as HTML; every token is escaped."""
    plain = plain_of(runs)
    cards = "".join(_card(run, plain) for run in runs if run.head is not None)
    return f'<div class="ds-root ds-prose">{INTRO}<div class="ds-cards">{cards or "<p>No lane with a head.</p>"}</div></div>'


def _card(run: Run, plain: Run | None) -> str:
    name = escape(lane_label(run.method, run.head))
    sign, words = _verdict(run, plain)
    return (
        f'<section class="ds-card" data-method="{method(run.method).key}"><h3><span class="ds-swatch" aria-hidden="true"></span>{name}'
        f'<span class="ds-verdict">{sign}</span></h3>{words}</section>'
    )


def _verdict(run: Run, plain: Run | None) -> tuple[str, str]:
    if plain is None:
        return "not compared", "<p>Plain decoding was not run beside it.</p>"
    if run.settings.temperature > 0:
        return (
            "same distribution",
            "<p>Sampled: single texts may differ, their distribution may not. Set the temperature to 0 to compare token for token.</p>",
        )
    if not same_question(run, plain):
        return "not compared", "<p>The plain decoding here is of another prompt or target.</p>"
    result = lossless(run, plain)
    if result.equal:
        return "= equal", f"<p>All {result.compared} tokens that both have are the same.</p>"
    index = result.index or 0
    before = "".join(_chip(run.token_text(i)) for i in run.output_ids[max(0, index - CONTEXT) : index])
    mine = "(it ends here)" if result.run_id is None else shown(run.token_text(result.run_id))
    theirs = "(it ends here)" if result.plain_id is None else shown(plain.token_text(result.plain_id))
    gap = (
        ""
        if result.margin is None
        else f"<p>The target's two best logits there are <b>{result.margin:.4f}</b> apart. {_why(rounding_decided(result, run), run)}</p>"
    )
    sign = f"≈ near-tie at token {index + 1}" if rounding_decided(result, run) else f"≠ differs at token {index + 1}"
    return sign, (
        f'<p class="ds-context">{before}</p><dl class="ds-pair"><div><dt>plain decoding</dt><dd>{theirs}</dd></div>'
        f"<div><dt>this lane</dt><dd>{mine}</dd></div></dl>{gap}"
    )


def _chip(text: str) -> str:
    """A token of the context; a line may break before one that begins with a space."""
    return f'{"<wbr>" if text[:1].isspace() else ""}<span class="ds-chip plain">{shown(text)}</span>'


def _why(tie: bool, run: Run) -> str:
    if tie and run.environment.dtype in HALF:
        return (
            f"In {run.environment.dtype} a forward over a whole tree rounds a little differently from a forward over one token; "
            "with logits this close the rounding decides. Both texts are the target's own. "
            "Start with <code>--dtype float32</code> to see them equal."
        )
    if tie:
        return "A near-tie: the order of additions in a batched forward can decide it."
    return "That is more than rounding explains: please report it with the records from the Runs tab."
