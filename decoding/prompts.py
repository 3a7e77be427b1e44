"""Prompt files: JSON lines {"id", "category", "turns": [...]}."""

import json
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from decoding.errors import UsageError


def check_text(name: str, text: str) -> None:
    """Raises UsageError where a text can't be written anywhere."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise UsageError(f"the {name} is not valid text: it holds half of a surrogate pair")


class Prompt(NamedTuple):
    """One question of a benchmark; measuring uses its first turn."""

    id: str
    category: str
    text: str
    source: str  # name of its file


def read_prompts(paths: list[Path], limit: int | None = None) -> list[Prompt]:
    """The prompts of some files, the first `limit` of each.

    Raises:
        UsageError: a file that can't be read, holds no prompts, or has a line of another kind (named); two files of one name.
    """
    twice = [stem for stem, times in Counter(path.stem for path in paths).items() if times > 1]
    if twice:
        raise UsageError(f"two prompt files are called {twice[0]}: figures are told by name, so give one of them another")
    prompts: list[Prompt] = []
    for path in paths:
        try:
            lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"prompt file {path} can't be read: {getattr(error, 'strerror', None) or 'not a text file'}") from error
        if not lines:
            raise UsageError(f"prompt file {path} is empty")
        for number, line in enumerate(lines[:limit], 1):
            try:
                raw = json.loads(line)
                for key in ("id", "turns"):
                    if key not in raw:
                        raise ValueError(f"it has no {key!r}")
                prompts.append(Prompt(str(raw["id"]), str(raw.get("category", "")), raw["turns"][0], path.stem))
                if not isinstance(raw["turns"][0], str):
                    raise TypeError("its first turn is no text")
            except (ValueError, KeyError, IndexError, TypeError) as error:
                raise UsageError(f'{path} line {number} is not a prompt {{"id", "category", "turns": [...]}}: {error}') from error
    return prompts
