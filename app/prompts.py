"""Example prompts: short, of different kinds, written for this page."""

import json
from dataclasses import dataclass
from pathlib import Path

PROMPTS = Path(__file__).resolve().parent.parent / "assets" / "prompts" / "examples.jsonl"


@dataclass(frozen=True)
class Example:
    """A prompt beside the prompt box."""

    name: str
    title: str
    prompt: str


def examples(path: Path = PROMPTS) -> list[Example]:
    """The examples, in the order of the page."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    return [Example(line["id"], line["category"], line["turns"][0]) for line in lines]
