"""Chat templates, read from the tokenizer: what stands before, between and after the turns, and prompts as token ids."""

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from decoding.errors import UsageError

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


def encode(tokenizer: Any, text: str, *, plain: bool = False) -> list[int]:
    """Token ids of a text, no token added; `plain` keeps text that looks like a control token what it is: text."""
    return tokenizer(text, add_special_tokens=False, split_special_tokens=plain)["input_ids"]


def encode_prompt(tokenizer: Any, prompt: str | Sequence[Message]) -> list[int]:
    """A user's text, or a conversation, as the target expects it.

    Control tokens come from the template only. What a person typed is encoded as text, `<|im_end|>` included.

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
    if any("\ud800" <= character <= "\udfff" for content in contents for character in content):
        raise UsageError("the prompt is not valid text: it holds half of a surrogate pair")
    if not getattr(tokenizer, "chat_template", None):
        return tokenizer("\n\n".join(contents), split_special_tokens=True)["input_ids"]
    # every token that the tokenizer would not read as text, not only those it has a use for (all_special_tokens)
    control = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    if not any(token in content for token in control for content in contents):
        return encode(tokenizer, _rendered(tokenizer, messages, True))
    pieces = template_pieces(tokenizer, [message["role"] for message in messages])
    ids = encode(tokenizer, pieces[0])
    for content, piece in zip(contents, pieces[1:], strict=True):
        ids += encode(tokenizer, content, plain=True) + encode(tokenizer, piece)
    return ids
