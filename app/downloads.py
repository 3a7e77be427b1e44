"""Files of the runs on the page: each record as JSON, and one table of all steps."""

import csv
import io
import re
import shutil
import tempfile
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from decoding.records import AUTOREGRESSIVE, Run

MAX_KEPT = 64  # sessions whose files stay on disk

COLUMNS = (
    "lane",
    "method",
    "step",
    "context_length",
    "drafted",
    "accepted",
    "emitted",
    "start_ms",
    "draft_ms",
    "verify_ms",
    "accept_ms",
    "commit_ms",
    "record_ms",
)


class Downloads:
    """Writes the files when a run ends; the oldest go when there are too many."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._kept: OrderedDict[str, list[str]] = OrderedDict()

    def write(self, session: str, runs: Sequence[Run]) -> list[str]:
        """Paths of the files of a session; written once."""
        if session in self._kept:
            self._kept.move_to_end(session)
            return self._kept[session]
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="draftscope-records-"))
        folder = self._folder / re.sub(r"\W", "-", session)
        folder.mkdir(exist_ok=True)
        paths = []
        for index, run in enumerate(runs):
            name = re.sub(r"[^\w.-]", "-", Path(run.head or AUTOREGRESSIVE).name)
            paths.append(folder / f"{index + 1}-{name}.json")
            run.save(paths[-1])
        table = folder / "steps.csv"
        table.write_text(steps_csv(runs), encoding="utf-8")
        self._kept[session] = [str(path) for path in (*paths, table)]
        while len(self._kept) > MAX_KEPT:
            _, old = self._kept.popitem(last=False)
            shutil.rmtree(Path(old[0]).parent, ignore_errors=True)
        return self._kept[session]


def steps_csv(runs: Sequence[Run]) -> str:
    """One line for each step of each lane."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for run in runs:
        for step in run.steps:
            times = (step.start_ms, step.draft_ms, step.verify_ms, step.accept_ms, step.commit_ms, step.record_ms)
            counts = (step.index, step.context_length, len(step.node_ids), len(step.accepted), len(step.token_ids))
            writer.writerow([run.head or AUTOREGRESSIVE, run.method, *counts, *(f"{value:.3f}" for value in times)])
    return out.getvalue()
