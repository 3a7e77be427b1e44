"""What the operator of a server allows and wants: limits that hold for the page and the API alike, and what is kept."""

import os
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from decoding.errors import UsageError
from decoding.records import Settings

PREFIX = "DRAFTSCOPE_"


def positive(kind: type) -> Callable[[str], Any]:
    """An argument's type: a number above zero."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < 1e9:
            raise ArgumentTypeError(f"{text[:40]!r}: a {'whole ' if kind is int else ''}number above 0 was expected")
        return value

    return read


def _limit(default: float, words: str) -> Any:
    return field(default=default, metadata={"words": words, "type": positive(type(default))})


@dataclass(frozen=True)
class Operator:
    """Each field is an argument of `python app.py` and an environment variable (`DRAFTSCOPE_MAX_NEW_TOKENS`, ...)."""

    max_new_tokens: int = _limit(512, "new tokens of one lane, at most")
    max_prompt_chars: int = _limit(20_000, "characters of a prompt, at most")
    max_lanes: int = _limit(4, "methods that one request may compare")
    max_tree_nodes: int = _limit(128, "nodes of a draft tree, at most")
    max_tree_depth: int = _limit(16, "levels of a draft tree, at most")
    max_tree_top_k: int = _limit(64, "children of a node of a draft tree, at most")
    max_run_seconds: float = _limit(600.0, "a request that holds the device longer is stopped")
    max_waiting: int = _limit(32, "requests that may wait or run; further ones are refused")
    max_upload_mb: int = _limit(64, "size of one uploaded file, at most")
    save_runs: Path | None = field(default=None, metadata={"words": "folder that keeps the record of every run", "type": Path})
    max_saved_mb: int = _limit(2048, "size of the records kept there, all together; the oldest give way")
    keep_trees: bool = field(
        default=False, metadata={"words": "keep the heads' trees: do not look, while nobody runs anything, for those that fit this machine"}
    )
    log_prompts: bool = field(default=False, metadata={"words": "write the prompts of runs into the log"})

    @classmethod
    def of(cls, arguments: Namespace) -> "Operator":
        """From parsed arguments."""
        return cls(**{one.name: getattr(arguments, one.name) for one in fields(cls)})

    @classmethod
    def add_arguments(cls, parser: ArgumentParser) -> None:
        """One option for each field."""
        for one in fields(cls):
            assert one.default is not MISSING
            name, words = f"--{one.name.replace('_', '-')}", one.metadata["words"]
            if isinstance(one.default, bool):
                parser.add_argument(name, action="store_true", help=words)
            else:
                shown = "" if one.default is None else f" (default: {one.default:g})"
                kind = one.metadata["type"]
                parser.add_argument(name, type=kind, default=one.default, metavar="DIR" if kind is Path else "N", help=words + shown)

    @property
    def lanes_words(self) -> str:
        """How many methods a request may name."""
        return ("one", "one or two")[self.max_lanes - 1] if self.max_lanes < 3 else f"2 to {self.max_lanes}"

    def check(self, prompt: str, methods: Sequence[str], settings: Settings) -> None:
        """Refuse what costs more than the operator allows.

        Raises:
            UsageError: naming the thing and what is possible.
        """
        if len(prompt) > self.max_prompt_chars:
            raise UsageError(f"the prompt has {len(prompt)} characters: this server takes {self.max_prompt_chars} at most")
        if not 1 <= (count := len(set(methods))) <= self.max_lanes:
            told = "" if self.max_lanes == 1 else ", plain decoding among them to measure the speed-up"
            raise UsageError(f"{count} methods chosen: choose {self.lanes_words}{told}")
        self.check_settings(settings)

    def check_settings(self, settings: Settings) -> None:
        """`check` for settings alone: a head's own tree is known once it is loaded."""
        for name in ("max_new_tokens", "tree_nodes", "tree_depth", "tree_top_k"):
            most = getattr(self, name if name.startswith("max_") else f"max_{name}")
            if name in settings.model_fields_set and getattr(settings, name) > most:
                raise UsageError(f"setting {name} is {getattr(settings, name)}: this server allows {most} at most")


def from_environment(parser: ArgumentParser) -> list[str]:
    """The arguments that environment variables stand for: `DRAFTSCOPE_TARGET=x` is `--target x`; a flag is set by 1; an
    option that may be repeated takes several values, a space between them."""
    out: list[str] = []
    for action in parser._actions:
        option = next((name for name in action.option_strings if name.startswith("--")), None)
        value = os.environ.get(PREFIX + action.dest.upper()) if option and action.dest != "help" else None
        if not value or (action.nargs == 0 and value.lower() in ("0", "false", "no")):
            continue
        if action.nargs == 0:
            out.append(str(option))
        else:
            for one in value.split() if isinstance(action.default, list) else [value]:
                out += [str(option), one]
    return out
