"""The catalogue (assets/catalogue.json): targets, the released heads known for them, chat formats by family. No torch here."""

import re
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

CATALOGUE = Path(__file__).resolve().parent.parent / "assets" / "catalogue.json"


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Family(_Entry):
    """How a kind of target is talked to; what a tokenizer brings itself counts more."""

    names: str  # a pattern of the names of its chat models, in lower case
    stops: tuple[str, ...]
    chat_template: str


class Sizes(_Entry):
    """What of a target's config decides how much memory it takes."""

    title: str
    parameters: int = Field(gt=0)
    hidden_size: int = Field(gt=0)
    vocab_size: int = Field(gt=0)
    layers: int = Field(gt=0)
    kv_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    context_length: int = Field(gt=0)


class KnownTarget(Sizes):
    """A target of the catalogue."""

    source: str  # what load_target takes
    licence: str | None  # None: not known here
    gated: bool
    tested: bool  # whether these very weights ran here


class KnownHead(_Entry):
    """A released head of the catalogue."""

    source: str  # what load_head takes
    target: str
    method: str
    layout: str
    bytes: int | None  # on disk; None: not known here
    licence: str | None
    tested: bool


class Catalogue(_Entry):
    """All of it."""

    about: str
    families: dict[str, Family]
    targets: tuple[KnownTarget, ...]
    heads: tuple[KnownHead, ...]

    def target(self, source: str) -> KnownTarget | None:
        """The entry of a target: by hub id (any revision), or by the name of a folder that holds it."""
        name = source.partition("@")[0]
        last = Path(name).name.lower()
        return next((entry for entry in self.targets if name == entry.source or last == entry.source.partition("/")[2].lower()), None)

    def heads_for(self, source: str) -> list[KnownHead]:
        """The released heads made for a target."""
        known = self.target(source)
        return [head for head in self.heads if known is not None and head.target == known.source]


@cache
def catalogue() -> Catalogue:
    """The catalogue, read once."""
    return Catalogue.model_validate_json(CATALOGUE.read_text(encoding="utf-8"))


def family_of(source: str) -> Family | None:
    """The chat format of a target, by the name of its repository or folder; None where the name tells nothing."""
    name = Path(source.partition("@")[0]).name.lower()
    return next((family for family in catalogue().families.values() if re.search(family.names, name)), None)
