"""What the page says of each method, and its one colour, used for lanes, trees and charts alike."""

from dataclasses import dataclass

from decoding.records import AUTOREGRESSIVE


@dataclass(frozen=True)
class Method:
    """How one method is shown. The colours lie apart for every kind of colour vision (tests/app/test_methods.py measures it);
    in charts, line style and symbol tell lanes apart as well."""

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
            "#6b7280",
            "#8e98a8",
            "No draft: one target forward for every token. The measure for all others.",
        ),
        Method(
            "eagle",
            "EAGLE",
            "#cb8600",
            "#fa9f1c",
            "One decoder layer guesses the target's next feature; trained on true features only.",
        ),
        Method(
            "hass",
            "HASS",
            "#2463df",
            "#3d9bff",
            "EAGLE's layer, trained on its own guesses too: it stays good deeper in the tree.",
        ),
        Method(
            "koala-eagle",
            "KOALA-EAGLE",
            "#12a18a",
            "#35d297",
            "Several layers in place of EAGLE's one, trained against an adversary: more room to guess well, each guess dearer.",
        ),
        Method("hass-koala", "HASS + KOALA", "#6a1590", "#ddaefa", "Several layers, trained on its own guesses: both ideas in one head."),
        Method(
            "medusa", "Medusa", "#4d3800", "#f0f07a", "Parallel heads, each guesses one position ahead from the same feature; a fixed tree."
        ),
        Method(
            "koala-medusa",
            "KOALA-Medusa",
            "#c8260d",
            "#f4503c",
            "Medusa heads with several distinct blocks each.",
        ),
    )
}
OTHER = Method("other", "Other", "#c2318f", "#ff8ad8", "A head whose recipe is not known here.")


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
