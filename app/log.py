"""The server's log: one line of JSON an event, on stderr. A failure gets an id that the page shows and the log explains."""

import errno
import json
import logging
import os
import re
import secrets
import sys
import traceback
from datetime import datetime, timezone
from typing import Any

from decoding.errors import DraftscopeError, UsageError

LOGGER = logging.getLogger("draftscope")
TOKEN = re.compile(r"hf_[A-Za-z0-9]{6,}")  # a hub token
SECRETS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


def start(level: int = logging.INFO) -> None:
    """Write the log to stderr. Without this (in tests, as a library) Python's own logging decides."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    LOGGER.handlers, LOGGER.propagate = [handler], False
    LOGGER.setLevel(level)


def scrub(text: str) -> str:
    """A text without the hub's tokens: errors of libraries may quote the request that failed."""
    for name in SECRETS:
        if (value := os.environ.get(name)) and len(value) > 5:
            text = text.replace(value, "***")
    return TOKEN.sub("hf_***", text)


def event(name: str, level: int = logging.INFO, **fields: Any) -> None:
    """One line: {"time": ..., "event": name, fields}."""
    now = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    LOGGER.log(level, scrub(json.dumps({"time": now, "event": name, **fields}, default=str)))


def incident(error: BaseException) -> str:
    """Log a failure with everything that is known of it; the id under which it stands there."""
    number = secrets.token_hex(4)
    details = "".join(traceback.format_exception(error))
    event("failure", logging.ERROR, id=number, kind=type(error).__name__, message=str(error), details=details)
    return number


def told(error: BaseException) -> str:
    """A failure in the words for the page. What is not the visitor's own mistake is logged, and named by an id."""
    if isinstance(error, UsageError):
        return scrub(str(error))
    if isinstance(error, DraftscopeError):
        words = scrub(str(error))
    elif isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's, without importing torch
        words = "out of memory: a smaller tree, fewer tokens or a smaller target needs less"
    elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        words = "the server's disk is full"
    elif isinstance(error, FileNotFoundError):
        words = f"a file is missing on the server: {os.path.basename(str(error.filename or 'unknown'))}"
    else:
        words = f"something broke here that should not ({type(error).__name__})"
    return f"{words} [the log tells more under id {incident(error)}]"
