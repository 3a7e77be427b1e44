"""Training text on disk: one dialogue a line, as token ids with the spans that the assistant wrote."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from decoding.errors import DraftscopeError, UsageError
from decoding.target import Target

DIALOGUES = "dialogues.jsonl"
META = "meta.json"
SCHEMA = "draftscope.text/1"


@dataclass
class Dialogue:
    """Token ids of a whole conversation; `spans` are the [start, end) of the assistant's tokens, stop tokens included."""

    kind: str
    temperature: float | None  # None: the answers are not the target's own
    ids: list[int]
    spans: list[tuple[int, int]]

    @property
    def answer_tokens(self) -> int:
        return sum(end - start for start, end in self.spans)

    def to_json(self) -> str:
        return json.dumps({"kind": self.kind, "temperature": self.temperature, "spans": self.spans, "ids": self.ids}, separators=(",", ":"))


def fingerprint(dialogue: Dialogue) -> str:
    """Same first user turn = same dialogue (what follows is the target's own)."""
    return hashlib.sha1(repr(dialogue.ids[: dialogue.spans[0][0]]).encode()).hexdigest()


def write_meta(folder: Path, target: Target) -> None:
    """Note whose text this is; refuse a folder that holds another target's."""
    own = {"schema": SCHEMA, "target": target.name, "vocab_size": target.vocab_size}
    path = folder / META
    if path.exists():
        _check_meta(folder, target)
    else:
        aside = path.with_suffix(".part")
        aside.write_text(json.dumps(own))
        aside.replace(path)


def _check_meta(folder: Path, target: Target) -> None:
    try:
        meta = json.loads((folder / META).read_text())
        found = (meta["schema"], meta["target"], meta["vocab_size"])
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{folder} holds no training text (no readable {META}): make some with 'python -m heads synthesize'") from error
    if found != (SCHEMA, target.name, target.vocab_size):
        raise UsageError(f"{folder} holds text of target {found[1]} ({found[2]} tokens), not of {target.name} ({target.vocab_size} tokens)")


def read_dialogues(folder: Path, target: Target, repair: bool = False) -> Iterator[Dialogue]:
    """The dialogues of a folder, in the order in which they were written.

    Args:
        repair: drop a last line that a kill cut short (the writer's own folder only).
    """
    _check_meta(folder, target)
    path = folder / DIALOGUES
    if not path.exists():
        return
    with path.open("r+b" if repair else "rb") as file:
        start = 0
        for number, line in enumerate(iter(file.readline, b""), 1):
            if not line.endswith(b"\n"):
                if repair:
                    file.truncate(start)
                return
            start += len(line)
            try:
                raw = json.loads(line)
                yield Dialogue(raw["kind"], raw["temperature"], raw["ids"], [tuple(span) for span in raw["spans"]])
            except (ValueError, KeyError, TypeError) as error:
                raise DraftscopeError(f"{path} line {number} is not a dialogue: {error}") from error
