"""Packing what the browser's script is told."""

import json
import secrets
from collections.abc import Mapping
from typing import Any

from app.view import Message


def pack(message: Message, **more: Any) -> str:
    """A message as the script takes it: one string (Gradio would wrap plain data into reactive proxies), without a "<"."""
    return _sent({**message, **more})


def _sent(told: Mapping[str, Any]) -> str:
    return json.dumps(told, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


def refusal(text: str, failed: bool = True, ended: bool = False) -> str:
    """A packed message that shows a text above the lanes that are there; never the same twice, so that it always arrives.

    Args:
        ended: what was waiting or running is over.
    """
    return _sent({"kind": "keep", "note": text, "failed": failed, "ended": ended, "nonce": secrets.token_hex(4)})


def notice(text: str) -> Message:
    """A message without lanes."""
    return {
        "session": "empty",
        "kind": "live",
        "title": "",
        "prompt": "",
        "where": "",
        "settings": "",
        "note": text,
        "failed": False,
        "running": False,
        "link": "",
        "lanes": [],
    }


def selection(lane: str | None, step: int | None) -> Mapping[str, Any]:
    """Which lane and step (from 1) the view opens on."""
    return {"select": {"lane": lane or "", "step": step or 1}} if lane or step else {}
