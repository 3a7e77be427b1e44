"""Which released layout a head folder has, told from what is in it."""

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from decoding.errors import UsageError, first_line

Layout = Literal["feature", "medusa"]
WEIGHTS, PICKLED = "model.safetensors", "pytorch_model.bin"
MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")  # heads only (v1), the form without code first
MEDUSA_PREFIX = "medusa_head."
SHARDS = ("model*.safetensors", "pytorch_model*.bin")


def recognise(folder: Path) -> Layout:
    """The layout of a head folder.

    Raises:
        UsageError: it has none, or one that is known and can't be used, by name.
    """
    if any((folder / name).is_file() for name in MEDUSA_FILES):
        return "medusa"
    config = read_config(folder)
    kinds = {str(kind).lower() for kind in config.get("architectures") or ()} | {str(config.get("speculators_model_type", "")).lower()}
    names = tensor_names(folder)
    eagle3 = any(name.startswith("midlayer.") or name in ("d2t", "t2d") for name in names) or any("eagle3" in kind for kind in kinds)
    if eagle3:
        raise UsageError(
            f"{folder.name} is an EAGLE-3 head: it drafts from three layers of the target and has its own lm_head, which is not "
            "supported here; EAGLE-1/2, HASS and Medusa heads are"
        )
    if "medusa_num_heads" in config or any(name.startswith(MEDUSA_PREFIX) for name in names):
        return "medusa"
    if names and "fc.weight" not in names:
        if any(name.startswith("model.layers.") for name in names):
            raise UsageError(f"{folder.name} is a whole language model, not a draft head: its tensors start with 'model.'")
        raise UsageError(f"{folder.name} has no layout that is known here: its tensors are {', '.join(sorted(names)[:6])}, ...")
    return "feature"


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json.

    Raises:
        UsageError: no folder, no config, or not JSON.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise UsageError(f"{folder} is not a head: it has no config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} can't be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise UsageError(f"{path} holds no settings")
    return config


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the folder's weights: SafeTensors where there are any, whole or in parts.

    Raises:
        UsageError: there are none, or a part that the index names is missing.
    """
    for pattern, index in zip(SHARDS, ("model.safetensors.index.json", "pytorch_model.bin.index.json"), strict=True):
        if not (folder / index).is_file():
            found = sorted(folder.glob(pattern))
        else:
            try:
                named = json.loads((folder / index).read_text(encoding="utf-8"))["weight_map"].values()
                found = [folder / Path(name).name for name in sorted(set(named))]
            except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
                raise UsageError(f"{folder / index} is broken: {first_line(error)}") from error
        missing = [path.name for path in found if not path.is_file()]
        if missing:
            raise UsageError(f"{folder} is broken or not complete: {', '.join(missing)} is missing")
        if found:
            return found
    raise UsageError(f"{folder} is not a head: it has no {WEIGHTS} or {PICKLED}")


def tensor_names(folder: Path) -> set[str]:
    """Names of all tensors; of SafeTensors files the headers alone are read."""
    return {name for path in weight_files(folder) for name in (_opened(path).keys() if path.suffix == ".safetensors" else _unpickled(path))}


def read_weights(paths: list[Path], prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors whose names start with `prefix`, on the CPU. A pickle is read as plain tensors only: no code in it ever runs.

    Raises:
        UsageError: a file is cut, no weights file, or holds something else than named tensors.
    """
    out: dict[str, torch.Tensor] = {}
    for path in paths:
        if path.suffix == ".safetensors":
            file = _opened(path)
            out |= {name: file.get_tensor(name) for name in file.keys() if name.startswith(prefix)}  # noqa: SIM118
            continue
        found = _unpickled(path)
        out |= {name: tensor for name, tensor in found.items() if name.startswith(prefix)}
    return out


def _unpickled(path: Path) -> dict[str, torch.Tensor]:
    try:
        zipped = zipfile.is_zipfile(path)  # what torch writes since 2020; only that can be mapped instead of read
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:
        told = "it holds code or objects other than tensors" if "weights" in str(error).lower() else first_line(error)
        raise UsageError(f"{path} is broken or not a weights file: {told}") from error
    except (RuntimeError, OSError, EOFError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UsageError(f"{path} is broken or not a weights file: {first_line(error)}") from error
    if not isinstance(found, dict) or not all(isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in found.items()):
        raise UsageError(f"{path} holds something else than named tensors")
    return found


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, "pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise UsageError(f"{path} is broken or not a weights file: {first_line(error)}") from error


def misfits(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    """Every tensor that is missing, too much, or of another shape."""
    have, want = ({name: tuple(tensor.shape) for name, tensor in tensors.items()} for tensors in (found, wanted))
    wrong = [f"{name} is missing, expected {want[name]}" for name in want.keys() - have.keys()]
    wrong += [f"{name} {have[name]} is not part of such a head" for name in have.keys() - want.keys()]
    wrong += [f"{name} is {have[name]}, expected {want[name]}" for name in want.keys() & have.keys() if want[name] != have[name]]
    return sorted(wrong)
