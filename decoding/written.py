"""Writing results as JSON, and keeping a folder of them small. No torch here."""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decoding.errors import DraftscopeError, UsageError


def check_place(path: Path | None) -> None:
    """Refuse, before long work, a place that no file can be written to; makes the folder that the file will be in.

    Raises:
        UsageError: naming it.
    """
    if path is not None and path.is_dir():
        raise UsageError(f"{path} is a folder: name the file to be written")
    if path is not None and any(above.exists() and not above.is_dir() for above in path.parents):
        raise UsageError(f"{path} is below something that is not a folder")
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=path.parent).close()  # rights and mode bits don't tell it: a disk may be mounted for reading
        except OSError as error:
            raise UsageError(f"{path} can't be written: {error.strerror or error}") from error


def save(results: Mapping[str, Any], path: Path) -> None:
    """Write a result as JSON, aside and then renamed.

    Raises:
        DraftscopeError: it can't be written, as on a full disk; what was there stays.
    """
    aside = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        os.replace(aside, path)
    except OSError as error:
        raise DraftscopeError(f"the result can't be written to {path}: {error.strerror or error}") from error


def drop_oldest(folder: Path, most: int) -> None:
    """Delete the folder's oldest JSON files until the others have `most` bytes at most."""
    held = sorted(((one.stat(), one) for one in folder.glob("*.json")), key=lambda held: -held[0].st_mtime_ns)
    total = 0
    for stat, path in held:
        total += stat.st_size
        if total > most:
            path.unlink(missing_ok=True)
