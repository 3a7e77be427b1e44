"""Writing results as JSON, and keeping a folder of them small. No torch here."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


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
