"""How much memory there is, and how much a target's weights need. torch is imported only where a GPU is asked."""

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import psutil

from decoding.errors import UsageError
from decoding.known import Sizes, catalogue
from decoding.space import on_a_space

WEIGHTS = ("*.safetensors", "*.bin")
STORED = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "float8_e4m3fn": 1.0}  # bytes a weight
# bitsandbytes: 4-bit weights carry a scale per 64; embedding and lm_head stay in half precision (counted as 15 % of the weights)
HELD = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "8bit": 1.15, "4bit": 0.8}
QUANTIZED = ("8bit", "4bit")
CONTEXT = 4096  # tokens of a request, where nothing else is said
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


@dataclass(frozen=True)
class Needs:
    """Bytes that decoding with a target takes, by what they are for."""

    weights: int
    cache: int  # keys and values of one request
    head: int  # a one-layer FeatureHead of the target's sizes, with its keys and values
    tree: int  # what a verification holds: logits in two precisions, masks, activations
    rest: int = 500_000_000  # torch and its libraries

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.head + self.tree + self.rest

    def __str__(self) -> str:
        parts = {"weights": self.weights, "keys and values": self.cache, "head": self.head, "tree": self.tree, "torch": self.rest}
        return ", ".join(f"{name} {gigabytes(size)}" for name, size in parts.items())


def needs(target: Sizes, precision: str, context: int | None = None, nodes: int = 59) -> Needs:
    """What a target needs, from its sizes alone.

    Args:
        precision: of the weights (a key of HELD); keys, values and the head stay in 16 bits below float32.
        context: tokens of a request; None = all that the target takes, up to CONTEXT.
        nodes: of a draft tree.
    """
    context = min(target.context_length, CONTEXT) if context is None else context
    wide = 4 if precision == "float32" else 2
    hidden, rows, positions = target.hidden_size, nodes + 1, context + nodes + 1
    kv_width = 2 * target.kv_heads * target.head_dim
    layer = hidden * (2 * hidden + kv_width + 3 * target.intermediate_size)
    activations = rows * (8 * hidden + 3 * target.intermediate_size + kv_width)
    groups = max(1, hidden // (target.kv_heads * target.head_dim))
    return Needs(
        weights=int(target.parameters * HELD[precision]),
        cache=positions * target.layers * kv_width * wide,
        head=(2 * hidden * hidden + layer + positions * kv_width) * wide,
        tree=rows * target.vocab_size * (wide + 8) + groups * rows * positions * wide + activations * wide,
    )


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


def machine_words(cpu: int, gpus: tuple[int, ...]) -> str:
    """The memory of a machine, in words."""
    ram = f"{gigabytes(cpu)} of CPU memory"
    return f"{' + '.join(gigabytes(size) for size in gpus)} on GPUs and {ram}" if gpus else ram


def described(source: str) -> Sizes:
    """A target's sizes: the catalogue's, or those in a folder's config.json. Nothing is fetched.

    Raises:
        UsageError: neither, or a config without the sizes of a Llama-like model.
    """
    if (known := catalogue().target(source)) is not None:
        return known
    path = Path(source) / "config.json"
    if not path.is_file():
        raise UsageError(f"target {source!r} is not in the catalogue, and no folder with a config.json")
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        told = told.get("text_config", told)
        hidden, layers, vocab, wide = (told[name] for name in ("hidden_size", "num_hidden_layers", "vocab_size", "intermediate_size"))
        heads = told["num_attention_heads"]
        kv_heads, dim = told.get("num_key_value_heads") or heads, told.get("head_dim") or hidden // heads
        layer = hidden * (2 * heads * dim + 2 * kv_heads * dim + 3 * wide + 2)
        return Sizes(
            title=Path(source).resolve().name,
            parameters=vocab * hidden * (1 if told.get("tie_word_embeddings") else 2) + layers * layer + hidden,
            hidden_size=hidden,
            vocab_size=vocab,
            layers=layers,
            kv_heads=kv_heads,
            head_dim=dim,
            intermediate_size=wide,
            context_length=told["max_position_embeddings"],
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{path} does not tell the sizes of a Llama-like model") from error
