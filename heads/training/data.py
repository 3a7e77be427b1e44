"""Training text on disk: one dialogue a line, as token ids with the spans that the assistant wrote."""

import hashlib
import json
import lzma
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from decoding.errors import DraftscopeError, UsageError
from decoding.target import Target

DIALOGUES = "dialogues.jsonl"
PACKED = "dialogues-*.jsonl.xz"
PACKED_DIALOGUES = 20_000  # in one file: some 5 MB
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
    """The dialogues of a folder: the packed ones, then those written since, in the order in which they were written.

    Args:
        repair: drop a last line that a kill cut short (the writer's own folder only).
    """
    _check_meta(folder, target)
    for path in sorted(folder.glob(PACKED)):
        try:
            with lzma.open(path, "rb") as file:
                for number, line in enumerate(file, 1):
                    yield _dialogue(line, path, number)
        except (lzma.LZMAError, EOFError) as error:
            raise DraftscopeError(f"{path} is damaged: {error}") from error
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
            yield _dialogue(line, path, number)


def _dialogue(line: bytes, path: Path, number: int) -> Dialogue:
    try:
        raw = json.loads(line)
        return Dialogue(raw["kind"], raw["temperature"], raw["ids"], [tuple(span) for span in raw["spans"]])
    except (ValueError, KeyError, TypeError) as error:
        raise DraftscopeError(f"{path} line {number} is not a dialogue: {error}") from error


class Summary:
    """What a text is made of."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.temperatures: Counter[str] = Counter()
        self.lengths: list[int] = []

    def add(self, dialogue: Dialogue) -> None:
        self.kinds[dialogue.kind] += dialogue.answer_tokens
        self.temperatures[str(dialogue.temperature)] += dialogue.answer_tokens
        self.lengths.append(dialogue.answer_tokens)

    @property
    def answer_tokens(self) -> int:
        return sum(self.lengths)

    def to_json(self) -> dict:
        """Dialogues, answer tokens in all, by kind and by sampling temperature, answer tokens of a dialogue."""
        lengths = sorted(self.lengths) or [0]
        return {
            "dialogues": len(self.lengths),
            "answer_tokens": self.answer_tokens,
            "by_kind": dict(self.kinds.most_common()),
            "by_temperature": dict(sorted(self.temperatures.items())),
            "answer_length": {name: lengths[len(lengths) * part // 10] for name, part in (("p10", 1), ("median", 5), ("p90", 9))},
        }


def pack(sources: Iterable[Path], out: Path, target: Target) -> dict:
    """Put text folders together in compressed files, each dialogue once: a text that can be passed on.

    Args:
        out: a new folder, or a packed one: what it lacks is added to it, in further files.

    Returns:
        A summary of all that `out` holds then, with the duplicates that were dropped.
    """
    summary, seen, duplicates, lines = Summary(), set(), 0, []
    parts = len(list(out.glob(PACKED)))
    if (out / DIALOGUES).exists():
        raise UsageError(f"{out} holds text that is not packed: give it as a source, and --out another folder")
    for dialogue in read_dialogues(out, target) if parts else ():
        seen.add(fingerprint(dialogue))
        summary.add(dialogue)
    for source in sources:
        for dialogue in read_dialogues(source, target):
            mark = fingerprint(dialogue)
            if mark in seen:
                duplicates += 1
                continue
            seen.add(mark)
            summary.add(dialogue)
            lines.append(dialogue.to_json() + "\n")
    if not lines:
        raise UsageError("there is no new dialogue in these folders")
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_meta(out, target)
        for part, start in enumerate(range(0, len(lines), PACKED_DIALOGUES), parts):
            path = out / PACKED.replace("*", f"{part:03d}")
            aside = path.with_suffix(".part")
            aside.write_bytes(lzma.compress("".join(lines[start : start + PACKED_DIALOGUES]).encode(), preset=9))
            aside.replace(path)
    except OSError as error:
        raise DraftscopeError(f"can't write into {out}: {error.strerror or error}") from error
    return {**summary.to_json(), "duplicates_dropped": duplicates}
