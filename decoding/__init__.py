"""Speculative decoding: the target, trees, verification, the step loop, and records of what happened.

Names are resolved when they are first used, so that records and metrics can be read without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from decoding.engine import Generation, generate, stream
    from decoding.errors import DraftscopeError, UsageError
    from decoding.loading import load_target
    from decoding.records import Run, Settings, Step
    from decoding.target import Target

_HOME = {
    "Generation": "decoding.engine",
    "generate": "decoding.engine",
    "stream": "decoding.engine",
    "DraftscopeError": "decoding.errors",
    "UsageError": "decoding.errors",
    "Run": "decoding.records",
    "Settings": "decoding.records",
    "Step": "decoding.records",
    "Target": "decoding.target",
    "load_target": "decoding.loading",
}

__all__ = ["DraftscopeError", "Generation", "Run", "Settings", "Step", "Target", "UsageError", "generate", "load_target", "stream"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'decoding' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
