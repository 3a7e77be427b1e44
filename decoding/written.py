"""Writing results as JSON, and keeping a folder of them small. No torch here."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decoding.errors import UsageError


def check_place(path: Path | None) -> None:
    """Refuse, before long work, a place that no file can be written to.

    Raises:
        UsageError: naming it.
    """
    if path is not None and path.is_dir():
        raise UsageError(f"{path} is a folder: name the file to be written")
    if path is not None and any(above.exists() and not above.is_dir() for above in path.parents):
        raise UsageError(f"{path} is below something that is not a folder")


def save(results: Mapping[str, Any], path: Path) -> None:
    """Write a result as JSON, aside and then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(path.name + ".part")
    aside.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    os.replace(aside, path)


def drop_oldest(folder: Path, most: int) -> None:
    """Delete the folder's oldest JSON files until the others have `most` bytes at most."""
    held = sorted(((one.stat(), one) for one in folder.glob("*.json")), key=lambda held: -held[0].st_mtime_ns)
    total = 0
    for stat, path in held:
        total += stat.st_size
        if total > most:
            path.unlink(missing_ok=True)
