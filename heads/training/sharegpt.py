"""Conversations in ShareGPT's format (or as `messages`) as training text, with the assistant's spans found from the chat template."""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

from tqdm import tqdm

from decoding.chat import Message, encode, template_pieces
from decoding.errors import UsageError
from decoding.target import Target
from heads.training.data import Dialogue

KIND = "sharegpt"
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "system": "system"}


def read_sharegpt(path: Path, target: Target) -> Iterator[Dialogue]:
    """The conversations of a file: a JSON list, or one JSON object a line.

    Raises:
        UsageError: not such a file, or a target without a chat template.
    """
    if target.tokenizer is None or not getattr(target.tokenizer, "chat_template", None):
        raise UsageError(f"target {target.name} has no chat template: conversations can't be written as it expects them")
    renderer = _Renderer(target)
    skipped: Counter[str] = Counter()
    records = _records(path)
    for number, record in enumerate(tqdm(records, unit="conversation", desc=path.name, file=sys.stderr), 1):
        try:
            messages = _messages(record)
        except (TypeError, KeyError, AttributeError) as error:
            raise UsageError(
                f'{path} entry {number} is no conversation: expected {{"conversations": [{{"from": ..., "value": ...}}]}}'
            ) from error
        reason = _unusable(messages)
        if reason is None:
            try:
                yield renderer.dialogue(messages)
                continue
            except UsageError:
                reason = "refused by the chat template"
        skipped[reason] += 1
    if skipped:
        told = ", ".join(f"{count} {reason}" for reason, count in skipped.most_common())
        print(f"{path}: {sum(skipped.values())} of {len(records)} conversations left out ({told})", file=sys.stderr)


def _records(path: Path) -> list[Any]:
    try:
        text = path.read_text(encoding="utf-8")
        if text.lstrip().startswith("["):
            return json.loads(text)
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} can't be read as JSON or JSON lines: {error}") from error


def _messages(record: Any) -> list[Message]:
    turns = record["conversations"] if "conversations" in record else record["messages"]
    found = []
    for turn in turns:
        role = ROLES.get(turn["from"] if "from" in turn else turn["role"], "unknown")
        # templates trim what stands between their marks; so does this, that the text is found again
        found.append({"role": role, "content": (turn["value"] if "value" in turn else turn["content"]).strip()})
    while found and found[0]["role"] == "assistant":
        found.pop(0)  # as the references do
    while found and found[-1]["role"] != "assistant":
        found.pop()
    return found


def _unusable(messages: list[Message]) -> str | None:
    """Why a conversation can't be used, or None."""
    talk = [message["role"] for message in messages if message["role"] != "system"]
    if not talk:
        return "without an answer"
    if talk != ["user", "assistant"] * (len(talk) // 2) or any(message["role"] == "system" for message in messages[1:]):
        return "with turns out of order"
    if any("\ud800" <= character <= "\udfff" for message in messages for character in message["content"]):
        return "with broken text"
    return None


class _Renderer:
    """Writes conversations as the target's chat template does."""

    def __init__(self, target: Target) -> None:
        self.tokenizer, self.stops = target.tokenizer, target.stop_token_ids
        self.pieces = lru_cache(maxsize=64)(lambda roles: template_pieces(self.tokenizer, roles))
        # tokens that the tokenizer would not read as text
        self.control = {token.content for token in self.tokenizer.added_tokens_decoder.values() if token.special}

    def dialogue(self, messages: list[Message]) -> Dialogue:
        """Token ids, and as spans the assistant's contents with the stop token that ends each."""
        pieces = self.pieces(tuple(message["role"] for message in messages))
        contents = [message["content"] for message in messages]
        joined = None
        if self.tokenizer.is_fast and not any(token in content for token in self.control for content in contents):
            joined = self._joined(messages, pieces)
        return joined or self._apart(messages, pieces)

    def _joined(self, messages: list[Message], pieces: list[str]) -> Dialogue | None:
        """Tokenised in one go, as a prompt is; None where a token reaches over the border of an answer."""
        text, borders = pieces[0], []
        for message, piece in zip(messages, pieces[1:], strict=True):
            if message["role"] == "assistant":
                borders.append((len(text), len(text) + len(message["content"])))
            text += message["content"] + piece
        out = self.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids, offsets = out["input_ids"], out["offset_mapping"]
        starts = {start: index for index, (start, end) in reversed(list(enumerate(offsets))) if end > start}
        ends = {end: index + 1 for index, (start, end) in enumerate(offsets) if end > start}
        spans = []
        for start, end in borders:
            if start not in starts or end not in ends:
                return None
            spans.append(self._with_stop(ids, starts[start], ends[end]))
        return Dialogue(KIND, None, ids, spans)

    def _apart(self, messages: list[Message], pieces: list[str]) -> Dialogue:
        """Tokenised piece by piece; what people typed stays text, control tokens included."""
        ids = encode(self.tokenizer, pieces[0])
        spans = []
        for message, piece in zip(messages, pieces[1:], strict=True):
            start = len(ids)
            ids += encode(self.tokenizer, message["content"], plain=True)
            end = len(ids)
            ids += encode(self.tokenizer, piece)
            if message["role"] == "assistant":
                spans.append(self._with_stop(ids, start, end))
        return Dialogue(KIND, None, ids, spans)

    def _with_stop(self, ids: list[int], start: int, end: int) -> tuple[int, int]:
        return (start, end + 1) if end < len(ids) and ids[end] in self.stops else (start, end)
