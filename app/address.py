"""Settings in the page's address: `?run=tides&lane=hass&step=5` or `?prompt=...&methods=a,b&temperature=0.7` opens the same view."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlencode

from app.layout import SETTINGS
from decoding.errors import UsageError
from decoding.records import Settings

MAX_PROMPT = 4000
WHOLE = frozenset(SETTINGS) - {"temperature", "top_p"}


@dataclass
class Address:
    """What an address asks for; None or empty where it does not say."""

    run: str | None = None
    lane: str | None = None
    step: int | None = None
    prompt: str | None = None
    methods: list[str] = field(default_factory=list)
    settings: dict[str, float] = field(default_factory=dict)

    def checked(self) -> Settings:
        """The settings as a run takes them; 0 leaves a tree field to the head.

        Raises:
            UsageError: one is out of range.
        """
        return Settings(**{name: value for name, value in self.settings.items() if value or not name.startswith("tree_")})


def read_address(query: Mapping[str, str]) -> Address:
    """Read an address.

    Raises:
        UsageError: a value that is no number or out of range; the message names it.
    """
    out = Address(run=query.get("run"), lane=query.get("lane"))
    if "step" in query:
        out.step = int(_number("step", query["step"], whole=True))
    if query.get("prompt"):
        out.prompt = query["prompt"][:MAX_PROMPT]
    out.methods = [name for name in query.get("methods", "").split(",") if name]
    out.settings = {name: _number(name, query[name], name in WHOLE) for name in SETTINGS if query.get(name)}
    out.checked()
    return out


def link(prompt: str, methods: Sequence[str], settings: Settings) -> str:
    """The query of an address that opens the page with this request."""
    asked: dict[str, object] = {"prompt": prompt[:MAX_PROMPT], "methods": ",".join(methods)}
    asked |= {name: getattr(settings, name) for name in SETTINGS if name in settings.model_fields_set}
    return urlencode(asked)


def _number(name: str, text: str, whole: bool) -> float:
    try:
        return int(text) if whole else float(text)
    except ValueError as error:
        raise UsageError(f"the address says {name}={text[:40]!r}: a {'whole ' if whole else ''}number was expected") from error
