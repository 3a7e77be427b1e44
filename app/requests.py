"""Requests of visitors: asked for, running, ended and not yet drawn."""

import secrets
import threading
from collections import OrderedDict

from app.comparison import Comparison
from app.device import Device, Job
from decoding.records import Run

MAX_ASKED = 512
MAX_FINISHED = 32


class Requests:
    """Each request by its token: what was asked, its job once its visitor follows it, its runs until they are drawn."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._lock = threading.Lock()
        self._asked: OrderedDict[str, Comparison] = OrderedDict()  # not begun
        self._jobs: dict[str, Job] = {}
        self._visitors: dict[str, str | None] = {}  # Gradio's session of each job
        self._finished: OrderedDict[str, list[Run]] = OrderedDict()

    def open(self, comparison: Comparison) -> None:
        """Keep a request until its visitor's page follows it; its session is its token.

        Raises:
            UsageError: no more work is taken.
        """
        self.device.check()
        with self._lock:
            self._asked[comparison.request.session] = comparison
            while len(self._asked) > MAX_ASKED:
                self._asked.popitem(last=False)

    def start(self, token: str, visitor: str | None = None) -> Job | None:
        """Queue a request, once; None where there is none (it was refused, or stopped already).

        Raises:
            UsageError: no more work is taken.
        """
        with self._lock:
            if (comparison := self._asked.pop(token, None)) is None:
                return None
            job = self._jobs[token] = self.device.submit(comparison)
            self._visitors[token] = visitor
            return job

    def active(self, token: str) -> bool:
        return token in self._asked or token in self._jobs

    def stop(self, token: str) -> bool:
        """Stop a request; True where it was not yet followed: nobody else tells its end then."""
        with self._lock:
            if self._asked.pop(token, None) is not None:
                return True
            job = self._jobs.get(token)
        if job is not None:
            job.stop()
        return False

    def leave(self, visitor: str | None) -> None:
        """Stop what a visitor has running or waiting."""
        with self._lock:
            jobs = [self._jobs[token] for token, who in self._visitors.items() if who == visitor]
        for job in jobs:
            job.stop()

    def close(self, token: str, drawn: bool) -> None:
        """The visitor's page has stopped following.

        Args:
            drawn: it will ask for the runs: keep them until then. A page that is gone won't.
        """
        with self._lock:
            self._visitors.pop(token, None)
            if (job := self._jobs.pop(token, None)) is None:
                return
            if drawn:
                self._finished[token] = job.work.runs
            while len(self._finished) > MAX_FINISHED:
                self._finished.popitem(last=False)

    def take(self, token: str) -> list[Run]:
        """The runs of an ended request, once."""
        with self._lock:
            return self._finished.pop(token, [])


def new_token() -> str:
    return secrets.token_hex(8)
