"""What each method changes, for someone who has read no paper, and what that did on the runs at hand."""

from collections.abc import Sequence
from html import escape

from app.methods import lane_label
from decoding.metrics import Metrics, measure
from decoding.records import Run

CARDS = (
    (
        "eagle",
        "EAGLE: the starting point",
        "The head is one decoder layer. From the target's <em>feature</em> (its last hidden state) and the newest token it guesses the "
        "next feature; the target's own <code>lm_head</code> turns that into a token. For depth 2 it must go on from its <em>own "
        "guess</em>, because the target has not run yet. In training it only ever saw true features. So it meets its own errors "
        "unprepared, and they add up with depth.",
    ),
    (
        "hass",
        "HASS: train as you will draft",
        "The same layer, trained over several alignment steps: in step 2 it gets the features that it guessed in step 1 in place of the "
        "true ones, and so on. What it sees in training is what it sees while drafting. A second loss looks at the target's top-K tokens, "
        "the only ones a tree can hold. Cost of a step: unchanged. Gain: acceptance falls less with depth.",
    ),
    (
        "koala-eagle",
        "KOALA: deeper, with an adversary",
        "K layers in place of one, and a discriminator that learns to tell the head's output from the target's while the head learns to "
        "deceive it. More room to guess well. Cost: each of the tree's levels runs K layers, so drafting takes longer. It pays only "
        "where more tokens are accepted, and enough of them to be worth the extra layers: see below whether they are.",
    ),
    (
        "medusa",
        "Medusa: all positions at once",
        "One small head for each future position, all fed with the same true feature. Drafting is one pass however deep the tree, and no "
        "feature is guessed, so none can drift. But the head for position 3 does not know what was guessed for position 2: its guesses "
        "fit the average continuation, and acceptance falls quickly with depth. The tree's shape is fixed in advance.",
    ),
)
# which lanes are held against which, and below which card: what changes between the two is that card's idea
PAIRS = (
    ("hass", "hass", "eagle"),
    ("hass", "hass-koala", "koala-eagle"),
    ("koala-eagle", "koala-eagle", "eagle"),
    ("koala-eagle", "hass-koala", "hass"),
    ("koala-eagle", "koala-medusa", "medusa"),
    ("medusa", "medusa", "eagle"),
)


def changes_panel(runs: Sequence[Run]) -> str:
    """The cards as HTML, each with what the lanes at hand measured."""
    lanes = {run.method: run for run in runs if run.head is not None and run.steps}
    cards = "".join(
        f'<section class="ds-card" data-method="{key}"><h3><span class="ds-swatch" aria-hidden="true"></span>{title}</h3>'
        f"<p>{words}</p>{_seen(key, lanes)}</section>"
        for key, title, words in CARDS
    )
    return f'<div class="ds-root ds-prose"><div class="ds-cards">{cards}</div></div>'


def _seen(card: str, lanes: dict[str, Run]) -> str:
    pairs = [(lanes[mine], lanes[base]) for key, mine, base in PAIRS if key == card and mine in lanes and base in lanes]
    return "".join(f'<p class="ds-seen"><b>On this run:</b> {escape(against(mine, base))}</p>' for mine, base in pairs)


def against(mine: Run, base: Run) -> str:
    """One lane held against another of the same prompt, in a sentence."""
    ours, theirs = measure(mine), measure(base)
    parts = [f"tau {ours.mean_acceptance_length:.2f} against {theirs.mean_acceptance_length:.2f}"]
    depths = [_given(figures) for figures in (ours, theirs)]
    if all(value is not None for value in depths):
        parts.append(f"depth 2 accepted after depth 1 in {depths[0]:.0%} against {depths[1]:.0%}")
    deep = [run.settings.tree.depth for run in (mine, base)]
    levels = [f" for {depth} level{'s' * (depth != 1)}" if deep[0] != deep[1] else "" for depth in deep]
    parts.append(f"drafting {_each(ours):.1f} ms a step{levels[0]} against {_each(theirs):.1f}{levels[1]}")
    if ours.ms_per_token and theirs.ms_per_token:
        gain = theirs.ms_per_token / ours.ms_per_token
        verdict = f"{gain:.2f}× as fast" if gain >= 1 else f"{gain:.2f}×, so slower"
        parts.append(f"{ours.ms_per_token:.1f} ms a token against {theirs.ms_per_token:.1f}, which is {verdict}")
    return f"{lane_label(mine.method, mine.head)} beside {lane_label(base.method, base.head)}: {', '.join(parts)}."


def _given(figures: Metrics) -> float | None:
    return figures.conditional_acceptance[1] if len(figures.conditional_acceptance) > 1 else None


def _each(figures: Metrics) -> float:
    return figures.phase_ms["draft"] / figures.steps
