"""Which heads are shipped, and where."""

from pathlib import Path

from heads.checkpoint import SECTION
from heads.layouts import read_config

SHIPPED = Path(__file__).resolve().parent.parent / "assets" / "heads"


def catalogue(target: str | None = None) -> dict[str, Path]:
    """Names of the shipped heads and their folders, in the order in which the page offers them.

    Args:
        target: name of a target, to get only the heads made for it; None = all.
    """
    folders = sorted(folder for folder in SHIPPED.glob("*") if (folder / "config.json").is_file())
    return {folder.name: folder for folder in folders if target in (None, read_config(folder).get(SECTION, {}).get("target"))}
