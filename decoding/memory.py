"""How much memory there is, and how much a target's weights need. torch is imported only where a GPU is asked."""

import json
import os
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import psutil

from decoding.space import on_a_space

WEIGHTS = ("*.safetensors", "*.bin")
STORED = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "float8_e4m3fn": 1.0}  # bytes a weight
# bitsandbytes: 4-bit weights carry a scale per 64; embedding and lm_head stay in half precision (counted as 15 % of the weights)
HELD = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "8bit": 1.15, "4bit": 0.8}
_CGROUP = Path("/sys/fs/cgroup")


def weights_bytes(folder: Path, precision: str) -> int:
    """About how many bytes the weights in `folder` take once they are loaded in `precision`."""
    files = next((found for pattern in WEIGHTS if (found := list(folder.glob(pattern)))), [])
    stored = sum(file.stat().st_size for file in files)
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        config = {}
    kept = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return int(stored * HELD[precision] / STORED.get(kept, 2.0))


def free_bytes(device: str) -> int:
    """Bytes that can still be taken on "cpu" or a "cuda" device."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.mem_get_info(torch.device(device))[0]
    return min(psutil.virtual_memory().available, *_limits())


def cpu_bytes() -> int:
    """All the memory that this process may take."""
    return min(psutil.virtual_memory().total, *_limits(used=False))


@cache
def gpu_bytes() -> tuple[int, ...]:
    """The memory of each NVIDIA GPU, as its driver says (torch would take seconds to be asked)."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or shutil.which("nvidia-smi") is None:
        return ()
    asked = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout
        return tuple(int(line) << 20 for line in told.split())
    except (OSError, ValueError, subprocess.SubprocessError):
        return ()  # a driver that does not answer: what needs a GPU is refused when it is loaded


def _limits(used: bool = True) -> list[int]:
    """What a container leaves of the machine: its control group's limit, and what Spaces say in MEMORY (such as 16Gi)."""
    found = []
    told = re.fullmatch(r"(\d+)\s*Gi?", os.environ.get("MEMORY", ""))
    if told and on_a_space():
        found.append((int(told[1]) << 30) - (psutil.Process().memory_info().rss if used else 0))
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        if limit.isdigit():
            found.append(int(limit) - (int((_CGROUP / "memory.current").read_text()) if used else 0))
    except OSError:
        pass  # no control group here
    return [max(0, value) for value in found] or [1 << 62]


def gigabytes(size: float) -> str:
    """A size in words."""
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.0f} MB"
