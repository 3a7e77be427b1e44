"""What the page says of each method, and its one colour, used for lanes, trees and charts alike."""

from dataclasses import dataclass

from decoding.records import AUTOREGRESSIVE


@dataclass(frozen=True)
class Method:
    """How one method is shown. The colours are Okabe and Ito's, made lighter for the dark theme."""

    key: str
    label: str
    light: str
    dark: str
    about: str  # one sentence for someone who has read no paper


METHODS = {
    method.key: method
    for method in (
        Method(
            AUTOREGRESSIVE,
            "Plain decoding",
            "#667085",
            "#98a2b3",
            "No draft: one target forward for every token. The measure for all others.",
        ),
        Method(
            "eagle",
            "EAGLE",
            "#d98200",
            "#f0b03f",
            "One decoder layer guesses the target's next feature; trained on true features only.",
        ),
        Method(
            "hass",
            "HASS",
            "#0072b2",
            "#5ab4ec",
            "EAGLE's layer, trained on its own guesses too: it stays good deeper in the tree.",
        ),
        Method(
            "koala-eagle",
            "KOALA-EAGLE",
            "#00896a",
            "#35c9a3",
            "Several layers instead of one: better guesses, each a little dearer.",
        ),
        Method("hass-koala", "HASS + KOALA", "#b0568f", "#e596c7", "Several layers, trained on its own guesses: both ideas in one head."),
        Method(
            "medusa", "Medusa", "#7a6f00", "#d8cc3c", "Parallel heads, each guesses one position ahead from the same feature; a fixed tree."
        ),
        Method(
            "koala-medusa",
            "KOALA-Medusa",
            "#c04a00",
            "#ff8f57",
            "Medusa heads with several distinct blocks each.",
        ),
    )
}
OTHER = Method("other", "Other", "#7f4bc4", "#b997ee", "A head whose recipe is not known here.")


def method(key: str) -> Method:
    """The method called `key`; a neutral entry for one that the page does not know."""
    return METHODS.get(key, OTHER)


def lane_label(key: str, head: str | None) -> str:
    """What a lane is called: the method, and the head's own name where that says more."""
    known = method(key)
    if head is None or head == key:
        return known.label
    return f"{known.label} · {head}" if known is not OTHER else head


def colour_sheet() -> str:
    """CSS variables `--m-<method>` for both themes: the style sheet and the drawings read the colours from here."""
    entries = (*METHODS.values(), OTHER)
    light = "".join(f"--m-{entry.key}:{entry.light};" for entry in entries)
    dark = "".join(f"--m-{entry.key}:{entry.dark};" for entry in entries)
    lanes = "".join(f'[data-method="{entry.key}"]{{--lane:var(--m-{entry.key})}}' for entry in entries)
    return f":root{{{light}}}.dark{{{dark}}}{lanes}"
