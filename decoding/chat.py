"""Chat templates, read from the tokenizer: what stands before, between and after the turns, and prompts as token ids."""

import json
import re
import secrets
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer

from decoding.errors import UsageError
from decoding.prompts import check_text

Message = dict[str, str]
_MARK = "DRAFTSCOPE{}TURN"


def template_pieces(tokenizer: Any, roles: Sequence[str]) -> list[str]:
    """The template's own text around the turns: len(roles) + 1 pieces; the last one opens the assistant's answer
    when the last role is not the assistant's. Found by rendering marked turns, so no format is hard-coded."""
    messages = [{"role": role, "content": _MARK.format(index)} for index, role in enumerate(roles)]
    text = _rendered(tokenizer, messages, roles[-1] != "assistant")
    pieces = []
    for message in messages:
        before, found, text = text.partition(message["content"])
        if not found:
            raise UsageError("the target's chat template drops a turn: it can't be used for this conversation")
        pieces.append(before)
    return [*pieces, text]


def _rendered(tokenizer: Any, messages: Sequence[Message], opens_answer: bool) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opens_answer)
    except TemplateError as error:  # templates refuse what they were not made for: unknown roles, turns out of order
        raise UsageError(f"the target's chat template refuses this conversation: {error}") from error


def closing_ids(tokenizer: Any) -> list[int]:
    """The token that the chat template closes an answer with (`<|im_end|>`, `</s>`, ...); none where it has no template."""
    if not getattr(tokenizer, "chat_template", None):
        return []
    try:
        after = template_pieces(tokenizer, ["user", "assistant"])[-1]
    except UsageError:  # a template that does not show whole turns closes them in a way of its own
        return []
    found = _control(tokenizer).match(after.lstrip())
    return encode(tokenizer, found[0]) if found else []


def encode(tokenizer: Any, text: str, *, plain: bool = False) -> list[int]:
    """Token ids of a text, no token added; `plain` keeps text that looks like a control token what it is: text."""
    if plain and _typed(tokenizer, text):
        return _text_ids(tokenizer, text, True)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def encode_prompt(tokenizer: Any, prompt: str | Sequence[Message]) -> list[int]:
    """A user's text, or a conversation, as the target expects it.

    Control tokens come from the template only. What a person typed is encoded as text, `<|im_end|>` and `<think>` included.

    Raises:
        UsageError: an empty prompt, a message without role or content, or a target without a tokenizer.
    """
    if tokenizer is None:
        raise UsageError("this target has no tokenizer: give the prompt as a list of token ids")
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise UsageError('a conversation is a list of {"role": ..., "content": ...}, both text')
    if not messages or not messages[-1]["content"].strip():
        raise UsageError("the prompt is empty: type something for the target to answer")
    contents = [message["content"] for message in messages]
    for content in contents:
        check_text("prompt", content)
    templated = bool(getattr(tokenizer, "chat_template", None))
    typed = any(_typed(tokenizer, content) for content in contents)
    if not templated:  # a base model: the tokenizer's own opening (its BOS, say), then the text
        text = "\n\n".join(contents)
        return tokenizer("")["input_ids"] + _encode_apart(tokenizer, ["", ""], [text]) if typed else tokenizer(text)["input_ids"]
    rendered = _rendered(tokenizer, messages, True)
    if not typed:
        return encode(tokenizer, rendered)
    pieces = template_pieces(tokenizer, [message["role"] for message in messages])
    stripped = [content.strip() for content in contents]  # what many templates do
    return _encode_apart(tokenizer, pieces, stripped if _joined(pieces, stripped) == rendered else contents)


def _joined(pieces: Sequence[str], contents: Sequence[str]) -> str:
    return pieces[0] + "".join(content + piece for content, piece in zip(contents, pieces[1:], strict=True))


def _encode_apart(tokenizer: Any, pieces: Sequence[str], contents: Sequence[str]) -> list[int]:
    """Ids of pieces[0] + contents[0] + pieces[1] + ...: control tokens in the pieces are tokens, in the contents they are text.

    The text is cut at the pieces' control tokens, as the tokenizer itself does, and what lies between is encoded by its
    model alone, which knows no control tokens.
    """
    control = _control(tokenizer)
    ids: list[int] = []
    between = ""

    def flush() -> None:
        nonlocal between
        if between:
            ids.extend(_text_ids(tokenizer, between, not ids))
        between = ""

    for piece, content in zip(pieces, [*contents, ""], strict=True):
        for place, part in enumerate(control.split(piece)):
            if place % 2:
                flush()
                ids.extend(encode(tokenizer, part))
            else:
                between += part
        between += content
    flush()
    return ids


def _control(tokenizer: Any) -> re.Pattern[str]:
    """All that is matched before the model reads text, special or not (Qwen's `<think>` is not), the longest first, each
    with the blanks that it swallows."""
    tokens = sorted(tokenizer.added_tokens_decoder.values(), key=lambda token: len(token.content), reverse=True)
    each = [r"\s*" * token.lstrip + re.escape(token.content) + r"\s*" * token.rstrip for token in tokens if token.content]
    return re.compile(f"({'|'.join(each) or '(?!)'})")


def _typed(tokenizer: Any, text: str) -> bool:
    """Whether a text holds what looks like a control token, as it stands or as the tokenizer's normalizer makes it."""
    normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
    looks = (text, normalizer.normalize_str(text)) if normalizer else (text,)
    return any(_control(tokenizer).search(look) for look in looks)


def _text_ids(tokenizer: Any, text: str, first: bool) -> list[int]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise UsageError("the prompt holds a control token of the target, and its tokenizer can't read one as text: leave it out")
    opening, later = _without_added(backend.to_str())
    return (opening if first else later).encode(text, add_special_tokens=False).ids


def _without_pieces(model: dict[str, Any], control: set[str]) -> dict[str, Any]:
    """A tokenizer's model that does not find the control tokens among its own pieces: some vocabularies hold them as
    whole words. The piece for what is unknown stays, it stands for any text."""
    vocabulary, unknown = model["vocab"], model.get("unk_token")
    if isinstance(vocabulary, list):  # Unigram: a piece's place is its id, so it stays under a name that nobody types
        name = secrets.token_hex(16)
        kept: Any = [
            [name + piece, score] if piece in control and place != model["unk_id"] else [piece, score]
            for place, (piece, score) in enumerate(vocabulary)
        ]
        return model | {"vocab": kept}
    gone = control - {unknown}
    out = model | {"vocab": {piece: token_id for piece, token_id in vocabulary.items() if piece not in gone}}
    if "merges" in model:
        out["merges"] = [pair for pair in model["merges"] if gone.isdisjoint((*pair, "".join(pair)))]
    return out


@lru_cache(maxsize=2)
def _without_added(spec: str) -> tuple[Tokenizer, Tokenizer]:
    """A tokenizer's model with no added tokens: for the beginning of a text, and for what follows a control token there
    (sentencepiece puts its blank before the very first word only, unless told otherwise)."""
    read = json.loads(spec)
    control = {token["content"] for token in read["added_tokens"] if token["special"]}
    told = read | {"added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    told["model"] = _without_pieces(read["model"], control)
    opening = Tokenizer.from_str(json.dumps(told))
    steps = [told.get("pre_tokenizer") or {}, *(told.get("pre_tokenizer") or {}).get("pretokenizers", [])]
    for step in steps:
        if step.get("prepend_scheme") == "first":
            step["prepend_scheme"] = "never"
    return opening, Tokenizer.from_str(json.dumps(told))
