"""What the papers report, beside what was measured here. Every figure with its source and hardware."""

import re
from collections.abc import Sequence
from html import escape

from app import results
from app.methods import METHODS, lane_label
from app.view import fair, figures, plain_of, where_line
from app.why import trained_heads
from decoding.records import Run

# (target, method, speed-up, tau), means over MT-bench, HumanEval and GSM8K, temperature 0, NVIDIA H800, batch 1
HASS_TABLE = (
    ("LLaMA2-Chat-7B", "EAGLE-2", 2.81, 4.61),
    ("LLaMA2-Chat-7B", "HASS", 3.24, 5.15),
    ("LLaMA2-Chat-13B", "EAGLE-2", 3.30, 5.16),
    ("LLaMA2-Chat-13B", "HASS", 3.65, 5.58),
    ("LLaMA3-Instruct-8B", "EAGLE-2", 2.83, 4.52),
    ("LLaMA3-Instruct-8B", "HASS", 3.09, 5.08),
    ("LLaMA3-Instruct-70B", "EAGLE-2", 3.37, 4.50),
    ("LLaMA3-Instruct-70B", "HASS", 4.05, 5.21),
)
# means over five datasets, temperature 0, RTX 3090
INDEPENDENT = (
    ("LLaMA3.1-Instruct-8B", "EAGLE-2", 3.23, 4.11),
    ("LLaMA3.1-Instruct-8B", "HASS", 3.42, 4.37),
    ("Vicuna-13B", "Medusa", 2.12, 2.51),
    ("Vicuna-13B", "EAGLE", 3.05, 3.96),
    ("Vicuna-13B", "EAGLE-2", 4.22, 4.83),
)
# Spec-Bench leaderboard: six task categories, greedy, float16, batch 1, RTX 3090
SPEC_BENCH = (("Vicuna-7B", "Medusa", 1.44, 2.32), ("Vicuna-7B", "EAGLE", 2.03, 3.57), ("Vicuna-7B", "EAGLE-2", 2.19, 4.35))


def papers_panel(runs: Sequence[Run]) -> str:
    """The papers' tables and the same figures of the runs at hand, as HTML."""
    return (
        f'<div class="ds-root ds-prose">{_heads()}{_shipped_results()}<h3>Measured on this run</h3>'
        + _measured(runs)
        + "<h3>As published</h3>"
        "<p>Other targets, other hardware: compare tau and the gain of one method over another, not the seconds.</p>"
        '<div class="ds-tables">'
        + _table(
            "HASS paper (arXiv 2408.15766, ICLR 2025), NVIDIA H800, batch 1, temperature 0, mean of MT-bench, HumanEval, GSM8K", HASS_TABLE
        )
        + _table("EAGLE-3 paper (arXiv 2503.01840, table 1), RTX 3090, temperature 0, mean of five datasets", INDEPENDENT)
        + _table("Spec-Bench leaderboard, RTX 3090, float16, greedy, mean of six categories", SPEC_BENCH)
        + "</div>"
        + "<p>KOALA (arXiv 2408.08146, abstract): latency speed-up +0.24 to +0.41, that is 10.57 % to 14.09 % faster than the "
        "original heads, on Vicuna 7B, 13B and 33B. The paper's hardware, number of layers and discriminator are not public; "
        "those of the heads here are our own choice.</p></div>"
    )


def _measured(runs: Sequence[Run]) -> str:
    plain = plain_of(runs)
    rows = []
    for run in runs:
        told = figures(run, plain if plain is not None and fair(run, plain) else None)
        speed = "1.00" if run.head is None else "–" if told["speedup"] is None else f"{told['speedup']:.2f}"
        rows.append((run.target, lane_label(run.method, run.head), speed, "–" if told["tau"] is None else f"{told['tau']:.2f}"))
    return _table(f"{where_line(runs[0].target, runs[0].environment)}; one prompt" if runs else "nothing", rows)


def _shipped_results() -> str:
    def named(row: Sequence[str]) -> tuple[str, ...]:
        """With the names that the page gives to methods, which stand between backticks."""
        return tuple(re.sub(r"`([^`]+)`", lambda key: lane_label(key[1], None) if key[1] in METHODS else key[1], cell) for cell in row)

    return "".join(
        _table(f"{one.title}. {one.where}", [named(row) for row in one.rows], named(one.names), one.command) for one in results.tables()
    )


def _heads() -> str:
    rows = [
        (
            lane_label(entry["method"], entry["name"]),
            entry["layers"] or "–",
            entry["align_steps"] or 1,
            "yes" if entry["adversary"] else "no",
            f"{entry['tokens_seen'] / 1e6:.1f} M" if entry["tokens_seen"] else "–",
            f"{entry['top1'][0]:.1%}",
            f"{entry['top1'][-1]:.1%}",
        )
        for entry in trained_heads()
    ]
    names = ("head", "layers or blocks", "alignment steps", "adversary", "tokens seen", "right at step 1", "right at the last")
    return _table("Training of the shipped heads, and how often their first guess is right on held-out text", rows, names) if rows else ""


def _table(
    caption: str, rows: Sequence[tuple], names: Sequence[str] = ("target", "method", "speed-up", "tau"), command: str | None = None
) -> str:
    """A table that scrolls under a caption that doesn't; columns of words stand left, figures right, lists of figures may wrap."""
    texts = [[f"{value:.2f}" if isinstance(value, float) else str(value).strip("`") for value in row] for row in rows]
    kinds = [_kind(column) for column in zip(*texts, strict=True)] or [""] * len(names)
    cells = "".join(
        "<tr>" + "".join(f"<td{kind}>{escape(text)}</td>" for kind, text in zip(kinds, row, strict=True)) + "</tr>" for row in texts
    )
    head = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for kind, name in zip(kinds, names, strict=True))
    named = escape(caption)
    told = f"<br><code>{escape(command)}</code>" if command else ""
    return (
        f'<figure class="ds-sheet"><figcaption>{named}{told}</figcaption>'
        f'<div class="ds-table" tabindex="0" role="region" aria-label="{named}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{cells}</tbody></table></div></figure>"
    )


def _kind(column: Sequence[str]) -> str:
    """The class of a column's cells: words, lists of figures, or (none) figures."""
    if not all(text[:1] in "0123456789+-–" for text in column):
        return ' class="is-word"'
    return ' class="is-list"' if any(", " in text and "[" not in text for text in column) else ""
