"""The operator's limits: one place for the page and the API, set by arguments or by environment variables."""

import os
from dataclasses import dataclass, field, fields
from typing import Any

from decoding.errors import UsageError
from decoding.records import Settings

PREFIX = "DRAFTSCOPE_"


def _limit(default: float, words: str) -> Any:
    return field(default=default, metadata={"words": words})


@dataclass(frozen=True)
class Limits:
    """What one request may cost, and how many may wait."""

    max_new_tokens: int = _limit(512, "new tokens of one lane")
    max_prompt_chars: int = _limit(20_000, "characters of a prompt")
    max_lanes: int = _limit(4, "methods that one request may compare")
    max_tree_nodes: int = _limit(128, "nodes of a draft tree")
    max_tree_depth: int = _limit(16, "levels of a draft tree")
    max_run_seconds: float = _limit(600, "seconds that one request may hold the device")
    max_waiting: int = _limit(32, "requests that may wait or run; further ones are refused")
    max_upload_mb: int = _limit(64, "MB of one uploaded file")

    @classmethod
    def of(cls, given: dict[str, Any]) -> "Limits":
        """The given limits, else those of the environment (`DRAFTSCOPE_MAX_NEW_TOKENS`, ...), else the defaults.

        Raises:
            UsageError: a value that is no positive number; the message names it.
        """
        values: dict[str, float] = {}
        for one in fields(cls):
            asked, name = given.get(one.name), f"--{one.name.replace('_', '-')}"
            if asked is None:
                asked, name = os.environ.get(PREFIX + one.name.upper()), PREFIX + one.name.upper()
            if asked is None:
                continue
            try:
                values[one.name] = type(one.default)(asked)
            except ValueError:
                raise UsageError(f"{name} is {str(asked)[:40]!r}: a number was expected") from None
            if not 0 < values[one.name] < 1e9:
                raise UsageError(f"{name} is {asked}: a positive number was expected")
        return cls(**values)  # type: ignore[arg-type]

    def check(self, prompt: str, methods: tuple[str, ...], settings: Settings) -> None:
        """Refuse what costs more than the operator allows.

        Raises:
            UsageError: naming the thing and what is possible.
        """
        if len(prompt) > self.max_prompt_chars:
            raise UsageError(f"the prompt has {len(prompt)} characters: this server takes {self.max_prompt_chars} at most")
        if len(set(methods)) > self.max_lanes:
            raise UsageError(f"{len(set(methods))} methods chosen: this server compares {self.max_lanes} at most")
        for name, most in (
            ("max_new_tokens", self.max_new_tokens),
            ("tree_nodes", self.max_tree_nodes),
            ("tree_depth", self.max_tree_depth),
        ):
            if name in settings.model_fields_set and getattr(settings, name) > most:
                raise UsageError(f"setting {name} is {getattr(settings, name)}: this server allows {most} at most")
