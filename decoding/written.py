"""Writing results as JSON. No torch here."""

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
