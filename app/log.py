"""The server's log: one line of JSON an event, on stderr. A failure gets an id that the page shows and the log explains."""

import json
import logging
import secrets
import sys
import traceback
from datetime import datetime, timezone
from typing import Any

LOGGER = logging.getLogger("draftscope")


def start(level: int = logging.INFO) -> None:
    """Write the log to stderr. Without this (in tests, as a library) Python's own logging decides."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    LOGGER.handlers, LOGGER.propagate = [handler], False
    LOGGER.setLevel(level)


def event(name: str, level: int = logging.INFO, **fields: Any) -> None:
    """One line: {"time": ..., "event": name, fields}."""
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    LOGGER.log(level, json.dumps({"time": now, "event": name, **fields}, ensure_ascii=True, default=str))


def incident(error: BaseException) -> str:
    """Log a failure with everything that is known of it; the id under which it stands there."""
    number = secrets.token_hex(4)
    details = "".join(traceback.format_exception(error))
    event("failure", logging.ERROR, id=number, kind=type(error).__name__, message=str(error), details=details)
    return number
