"""Writing files whole and results as JSON, and keeping a folder of them small. No torch here."""

import json
import os
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from decoding.errors import DraftscopeError, UsageError


def check_place(path: Path | None) -> None:
    """Refuse, before long work, a place that no file can be written to. Leaves nothing there.

    Raises:
        UsageError: naming it.
    """
    if path is None:
        return
    if path.is_dir():
        raise UsageError(f"{path} is a folder: name the file to be written")
    above = next(folder for folder in path.parents if folder.exists())
    if not above.is_dir():
        raise UsageError(f"{path} is below something that is not a folder")
    try:
        tempfile.TemporaryFile(dir=above).close()  # mode bits don't tell it: a disk may be mounted for reading
    except OSError as error:
        raise UsageError(f"{path} can't be written: {error.strerror or error}") from error


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """What fails within, as on a full disk, is told in one line.

    Raises:
        DraftscopeError: naming the file.
    """
    try:
        yield
    except OSError as error:
        raise DraftscopeError(f"the result can't be written to {path}: {error.strerror or error}") from error


def write_text(path: Path, text: str, mode: int = 0o666) -> None:
    """Write a file aside and rename it: never half a file. What was there stays until then, nothing is left beside it.

    Args:
        mode: who may read and write it, less what the process's umask takes.

    Raises:
        OSError: it can't be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.parent / f".{path.name}.{uuid.uuid4().hex}.part"
    try:
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(aside, path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def save(results: Mapping[str, Any], path: Path) -> None:
    """Write a result as JSON.

    Raises:
        DraftscopeError: it can't be written; what was there stays.
    """
    with writing(path):
        write_text(path, json.dumps(results, indent=1) + "\n")


def drop_oldest(folder: Path, most: int) -> None:
    """Delete the folder's oldest JSON files until the others have `most` bytes at most."""
    held = sorted(((one.stat(), one) for one in folder.glob("*.json")), key=lambda held: -held[0].st_mtime_ns)
    total = 0
    for stat, path in held:
        total += stat.st_size
        if total > most:
            path.unlink(missing_ok=True)
