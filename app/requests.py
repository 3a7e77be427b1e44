"""Requests that were asked for and not ended: Stop reaches a running one and one that still waits in the queue."""

import secrets
import threading
from collections import OrderedDict

from decoding.records import Run

MAX_REQUESTS = 512
MAX_FINISHED = 32


class Requests:
    """Tokens of requests, who may still be stopped, and the runs of those that ended until they are drawn."""

    def __init__(self) -> None:
        self._events: OrderedDict[str, threading.Event] = OrderedDict()
        self._claimed: set[str] = set()
        self._finished: OrderedDict[str, list[Run]] = OrderedDict()

    def open(self) -> str:
        """A new token."""
        token = secrets.token_hex(8)
        self._events[token] = threading.Event()
        while len(self._events) > MAX_REQUESTS:
            self._events.popitem(last=False)
        return token

    def claim(self, token: str) -> bool:
        """True once for each token: a request runs once."""
        if token not in self._events or token in self._claimed:
            return False
        self._claimed.add(token)
        return True

    def active(self, token: str) -> bool:
        return token in self._events

    def waiting(self, token: str) -> int:
        """How many other requests have not ended."""
        return len(self._events.keys() - {token})

    def stop(self, token: str) -> bool:
        """Stop a request; True where it had not begun: it is gone then, at once."""
        if token in self._events and token not in self._claimed:
            del self._events[token]
            return True
        if token in self._events:
            self._events[token].set()
        return False

    def stopped(self, token: str) -> bool:
        event = self._events.get(token)
        return event is None or event.is_set()

    def close(self, token: str, runs: list[Run]) -> None:
        """The request ended with these runs."""
        self._events.pop(token, None)
        self._claimed.discard(token)
        self._finished[token] = runs
        while len(self._finished) > MAX_FINISHED:
            self._finished.popitem(last=False)

    def take(self, token: str) -> list[Run]:
        """The runs of an ended request, once."""
        return self._finished.pop(token, [])
