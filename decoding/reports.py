"""What every written measurement says of itself, and how it is written."""

import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

from decoding.engine import environment
from decoding.records import Settings
from decoding.target import Target


def heading(kind: str, program: str, target: Target, settings: Settings) -> dict[str, Any]:
    """The fields that a result begins with: what it is, when, by which command, on what.

    Args:
        kind: such as "bench".
        program: the package whose command line measured it.
    """
    return {
        "schema": f"draftscope.{kind}/1",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python -m", program, *sys.argv[1:]]),
        "target": target.name,
        "environment": environment(target).model_dump(),
        "settings": settings.model_dump(),
    }


def where(results: Mapping[str, Any]) -> str:
    """A result's machine and settings as the first line of a table."""
    env = results["environment"]
    return (
        f"{results['target']} on {env['machine']} ({env['dtype']}, {env['threads']} threads), {results['prompts']} prompts, "
        f"temperature {results['settings']['temperature']}"
    )
