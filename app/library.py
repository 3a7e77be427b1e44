"""Recorded runs: the shipped ones, and records that a person uploads."""

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from app.methods import METHODS
from decoding.errors import UsageError
from decoding.records import MAX_RECORD_BYTES, Run

RUNS = Path(__file__).resolve().parent.parent / "assets" / "runs"
SUFFIX = ".json.gz"
MAX_LANES = 4


@dataclass(frozen=True)
class Recording:
    """Runs of one prompt, recorded one after the other on one machine."""

    name: str
    title: str
    folder: Path


def recordings(folder: Path = RUNS) -> list[Recording]:
    """The shipped recordings, in the order of their index."""
    index = folder / "index.json"
    if not index.is_file():
        return []
    return [Recording(entry["name"], entry["title"], folder / entry["name"]) for entry in json.loads(index.read_text(encoding="utf-8"))]


@lru_cache(maxsize=16)
def load_recording(recording: Recording) -> tuple[Run, ...]:
    """The runs of a recording, plain decoding first.

    Raises:
        UsageError: a file of it is missing or broken.
    """
    runs = [load_packed(path) for path in sorted(recording.folder.glob(f"*{SUFFIX}"))]
    if not runs:
        raise UsageError(f"recording {recording.name!r} has no runs")
    order = list(METHODS)
    return tuple(sorted(runs, key=lambda run: order.index(run.method) if run.method in order else len(order)))


def lane_name(run: Run) -> str:
    """What an address and the lane list call a run of a recording."""
    return run.head or run.method


def pick(runs: Sequence[Run], wanted: Sequence[str] = (), lane: str | None = None) -> list[Run]:
    """The lanes of a recording that a view shows: the `wanted` ones, else the first four, `lane` among them.

    Raises:
        UsageError: none of that name, or more than a view holds.
    """
    names = [lane_name(run) for run in runs]
    if unknown := [name for name in wanted if name not in names]:
        raise UsageError(f"the recording has no lane {unknown[0][:60]!r}: it has {', '.join(names)}")
    if len(wanted) > MAX_LANES:
        raise UsageError(f"a view shows {MAX_LANES} lanes at most: take one away first")
    shown = list(wanted) or names[:MAX_LANES]
    if lane in names and lane not in shown:
        shown = [*shown[: MAX_LANES - 1], lane]
    return [run for run, name in zip(runs, names, strict=True) if name in shown]


def load_packed(path: Path) -> Run:
    """A gzipped record."""
    try:
        with gzip.open(path, "rb") as file:
            text = file.read(MAX_RECORD_BYTES + 1)
    except (OSError, EOFError) as error:
        raise UsageError(f"{path.name} can't be read: {error}") from error
    if len(text) > MAX_RECORD_BYTES:
        raise UsageError(f"{path.name} is larger than {MAX_RECORD_BYTES >> 20} MB: not a run record")
    return Run.from_json(text.decode("utf-8"), path.name)


def save_packed(run: Run, path: Path) -> None:
    """Write a gzipped record whose tree figures are rounded to six digits (a third of the size, no visible difference)."""
    record = json.loads(run.to_json())
    for step in record["steps"]:
        for name in ("draft_logprobs", "scores", "target_probs", "draws", "margins", "drift_cosine", "drift_distance", "overlap"):
            step[name] = [value if value is None else float(f"{value:.6g}") for value in step[name]]
    text = json.dumps(record, separators=(",", ":"), ensure_ascii=False)
    Run.from_json(text, path.name)  # what is written can be read
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.encode("utf-8"), mtime=0))


def load_uploaded(paths: list[str]) -> list[Run]:
    """Records that a person gives, checked.

    Raises:
        UsageError: too many, too large, broken, or of different prompts.
    """
    if not 1 <= len(paths) <= MAX_LANES:
        raise UsageError(f"{len(paths)} files given: a view shows 1 to {MAX_LANES} runs")
    runs = [load_packed(Path(path)) if path.endswith(".gz") else Run.load(path) for path in paths]
    if len({(run.target, tuple(run.prompt_ids)) for run in runs}) > 1:
        raise UsageError("the runs are of different prompts or targets: upload runs of one prompt together")
    return sorted(runs, key=lambda run: run.head is not None)
