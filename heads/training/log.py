"""Training metrics: JSON lines always, TensorBoard events where that package is installed."""

import json
import sys
from pathlib import Path
from typing import Any

METRICS, EVENTS = "metrics.jsonl", "tensorboard"


class Log:
    """Writes entries of one training; an entry is {"step": n, name: number | list of numbers by draft step | dict}."""

    def __init__(self, folder: Path, step: int) -> None:
        """Go on at `step`: entries of later steps are from a run that was killed after its last checkpoint."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / METRICS
        if self.path.exists():
            kept = [line for line in self.path.read_text().splitlines() if _step(line) <= step]
            aside = self.path.with_suffix(".part")
            aside.write_text("".join(line + "\n" for line in kept))
            aside.replace(self.path)
        try:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(folder / EVENTS), purge_step=step + 1)
        except ImportError:
            print(f"no TensorBoard events (pip install tensorboard); all metrics are in {self.path}", file=sys.stderr)
            self.board = None

    def write(self, entry: dict[str, Any]) -> None:
        """Append an entry."""
        with self.path.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        if self.board is not None:
            for name, value in _scalars("", entry):
                self.board.add_scalar(name, value, entry["step"])

    def close(self) -> None:
        """Finish the event file."""
        if self.board is not None:
            self.board.close()


def _step(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return float("inf")  # cut short by a kill


def _scalars(name: str, value: Any) -> list[tuple[str, float]]:
    if isinstance(value, dict):
        return [pair for key, entry in value.items() if key != "step" for pair in _scalars(f"{name}/{key}".lstrip("/"), entry)]
    if isinstance(value, list):
        return [pair for index, entry in enumerate(value, 1) for pair in _scalars(f"{name}/{index}", entry)]
    return [(name, float(value))] if isinstance(value, int | float) else []
