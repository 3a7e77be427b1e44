"""What this machine's CPU is and can do."""

import platform
from typing import Any

import torch


def abilities() -> dict[str, Any]:
    """What torch found out about the CPU; nothing where this torch does not tell."""
    return torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}


def name() -> str:
    """What the CPU calls itself."""
    return abilities().get("cpu_name") or platform.processor() or platform.machine()
