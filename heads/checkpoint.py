"""Head folders on disk: our own layout and the released EAGLE-1/2 and HASS ones (the same tensors, other leftovers).

`config.json` (Llama keys, "bias", "qkv_bias"; ours adds a "draftscope" section) and `model.safetensors`, else
`pytorch_model.bin` (read with weights_only=True: no code from a checkpoint ever runs).
"""

import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import LlamaConfig

from decoding.errors import DraftscopeError, UsageError
from decoding.records import TreeShape
from heads.feature import FeatureHead, FeatureShape

SECTION = "draftscope"
WEIGHTS, PICKLED, INDEX = "model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"
SMALL, SMALL_SHARD = 200_000_000, 9_000_000  # bytes: small heads live in repositories and Spaces, which refuse files over 10 MB
DRAFT_VOCAB = "draft_vocab"


@dataclass
class HeadMeta:
    """What a head's config says of its making."""

    method: str
    target: str
    align_steps: int = 1
    adversary: bool = False
    tokens_seen: int | None = None
    training: dict[str, Any] = field(default_factory=dict)
    tree: TreeShape | None = None
    results: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_section(cls, section: dict[str, Any]) -> "HeadMeta":
        """From a config's "draftscope" section; what a released head does not say stays at its default."""
        known = {name: section[name] for name in cls.__dataclass_fields__ if section.get(name) is not None}
        tree = known.pop("tree", None)
        return cls(**{"method": "eagle", "target": "", **known}, tree=TreeShape(**tree) if tree else None)


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


def read_tensors(folder: Path, *names: str) -> dict[str, torch.Tensor]:
    """All tensors of a head folder's first weights file that is there, on the CPU; a pickle only as plain tensors."""
    names = names or (WEIGHTS, INDEX, PICKLED)
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        raise UsageError(f"{folder} is not a head: it has no {' or '.join(names)}")
    try:
        if path.name == INDEX:
            shards = sorted(set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()))
            tensors = {name: tensor for shard in shards for name, tensor in load_file(folder / Path(shard).name).items()}
        elif path.suffix == ".safetensors":
            tensors = load_file(path)
        else:
            tensors = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError, KeyError, AttributeError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(f"{path} is broken or not a weights file: {reason}") from error
    if not isinstance(tensors, dict) or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
        raise UsageError(f"{path} holds something else than named tensors")
    return tensors


def save_feature_head(
    folder: Path, module: FeatureHead, meta: HeadMeta, draft_vocab: torch.Tensor | None = None, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write a head folder, aside and then renamed. The target's embedding and `lm_head` are not copied into it."""
    config = {
        **module.shape.llama.to_dict(),
        "architectures": ["LlamaForCausalLM"],
        "bias": module.shape.fc_bias,
        "qkv_bias": module.shape.qkv_bias,
    }
    save_folder(folder, module.state_dict(), config, meta, draft_vocab, dtype)


def save_folder(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    config: dict[str, Any],
    meta: HeadMeta,
    draft_vocab: torch.Tensor | None,
    dtype: torch.dtype,
    **section: Any,
) -> None:
    """Write config and tensors aside, then rename them into place; `section` adds to the "draftscope" section."""
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors.items()}
    if draft_vocab is not None:
        tensors[DRAFT_VOCAB] = draft_vocab.to("cpu", torch.int64)
    own = {**asdict(meta), "tree": meta.tree._asdict() if meta.tree else None, **section}
    config = {**config, "dtype": str(dtype).removeprefix("torch."), SECTION: own}
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.", suffix=".part"))
    try:
        size = sum(tensor.nbytes for tensor in tensors.values())
        save_torch_state_dict(tensors, aside, max_shard_size=SMALL_SHARD if size < SMALL else "5GB")
        (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        folder.mkdir(exist_ok=True)
        written = {file.name for file in aside.iterdir()}
        for file in aside.iterdir():
            file.chmod(0o644)
            os.replace(file, folder / file.name)
        for stale in {*folder.glob("model*.safetensors"), folder / INDEX}:  # of a head that was cut into other files
            if stale.name not in written:
                stale.unlink(missing_ok=True)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def load_feature_head(folder: Path) -> tuple[FeatureHead, HeadMeta, torch.Tensor | None]:
    """Read a FeatureHead from our own or a released EAGLE-1/2 or HASS folder.

    Returns:
        The head (float32 or the file's dtype), what is known of its making, and its draft vocabulary
        ([tokens] ascending target token ids) or None.

    Raises:
        UsageError: whatever does not fit, all at once, by tensor name and shape.
    """
    config, tensors = read_config(folder), read_tensors(folder)
    section = config.pop(SECTION, None) or {}
    bias_said, qkv_bias = config.pop("bias", True), bool(config.pop("qkv_bias", False))
    try:
        llama = LlamaConfig.from_dict({**config, "model_type": "llama"})
    except (TypeError, ValueError, KeyError) as error:
        raise UsageError(f"{folder / 'config.json'} is not a head's config: {error}") from error
    # the file decides over the config: released LLaMA-3 HASS heads carry a bias that their config denies
    fc_bias = "fc.bias" in tensors if "fc.weight" in tensors else bool(bias_said)
    tensors.pop("embed_tokens.weight", None)  # the target's own; a copy of it in the file is not needed
    draft_vocab = tensors.pop(DRAFT_VOCAB, None)
    module = FeatureHead(FeatureShape(llama, fc_bias, qkv_bias or "layers.0.self_attn.q_proj.bias" in tensors))
    _check_fit(folder, module, tensors)
    module.to(tensors["fc.weight"].dtype).load_state_dict(tensors)
    return module, HeadMeta.from_section(section), draft_vocab


def _check_fit(folder: Path, module: FeatureHead, tensors: dict[str, torch.Tensor]) -> None:
    wanted = {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    wrong = [f"{name} is missing" for name in wanted.keys() - found.keys()]
    wrong += [f"{name} {found[name]} is not part of such a head" for name in found.keys() - wanted.keys()]
    wrong += [f"{name} is {found[name]}, expected {wanted[name]}" for name in wanted.keys() & found.keys() if wanted[name] != found[name]]
    if wrong:
        raise UsageError(f"the tensors of {folder} do not fit its config: {'; '.join(sorted(wrong))}")


def check_target(name: str, module: FeatureHead, draft_vocab: torch.Tensor | None, hidden_size: int, vocab_size: int, target: str) -> None:
    """Raises UsageError where a head was made for another kind of target."""
    llama = module.shape.llama
    if llama.hidden_size != hidden_size:
        raise UsageError(f"head {name} does not fit target {target}: its hidden size is {llama.hidden_size}, the target's {hidden_size}")
    if llama.vocab_size != vocab_size:
        raise UsageError(
            f"head {name} does not fit target {target}: its vocabulary has {llama.vocab_size} tokens, the target's {vocab_size}"
        )
    check_draft_vocab(name, draft_vocab, vocab_size)


def check_draft_vocab(name: str, draft_vocab: torch.Tensor | None, vocab_size: int) -> None:
    """Raises DraftscopeError where a draft vocabulary names tokens that the target does not have."""
    if draft_vocab is not None and (len(draft_vocab) == 0 or int(draft_vocab.max()) >= vocab_size or int(draft_vocab.min()) < 0):
        raise DraftscopeError(f"head {name} has a broken draft vocabulary: ids outside the target's {vocab_size} tokens")
