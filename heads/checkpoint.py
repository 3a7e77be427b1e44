"""Head folders on disk: our own layout and the released EAGLE-1/2 and HASS ones (the same tensors, other leftovers).

`config.json` (Llama keys, "bias", "qkv_bias"; ours adds a "draftscope" section) and `model.safetensors`, else
`pytorch_model.bin` (read with weights_only=True: no code from a checkpoint ever runs).
"""

import json
import os
import pickle
import shutil
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from decoding.errors import DraftscopeError, UsageError
from decoding.records import TreeShape
from heads.feature import FeatureHead, FeatureShape

SECTION = "draftscope"
WEIGHTS, PICKLED = "model.safetensors", "pytorch_model.bin"
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


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a head folder, on the CPU; safetensors first, a pickle only as plain tensors."""
    safe, pickled = folder / WEIGHTS, folder / PICKLED
    path = safe if safe.is_file() else pickled
    if not path.is_file():
        raise UsageError(f"{folder} is not a head: it has neither {WEIGHTS} nor {PICKLED}")
    try:
        tensors = load_file(path) if path == safe else torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, OSError, EOFError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(f"{path} is broken or not a weights file: {reason}") from error
    if not isinstance(tensors, dict) or not all(isinstance(value, torch.Tensor) for value in tensors.values()):
        raise UsageError(f"{path} holds something else than named tensors")
    return tensors


def save_feature_head(
    folder: Path, module: FeatureHead, meta: HeadMeta, draft_vocab: torch.Tensor | None = None, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write a head folder, aside and then renamed. The target's embedding and `lm_head` are not copied into it."""
    shape = module.shape
    tensors = {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in module.state_dict().items()}
    if draft_vocab is not None:
        tensors[DRAFT_VOCAB] = draft_vocab.to("cpu", torch.int64)
    config = {
        **shape.llama.to_dict(),
        "architectures": ["LlamaForCausalLM"],
        "bias": shape.fc_bias,
        "qkv_bias": shape.qkv_bias,
        "dtype": str(dtype).removeprefix("torch."),
        SECTION: {**asdict(meta), "tree": meta.tree._asdict() if meta.tree else None},
    }
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.", suffix=".part"))
    try:
        save_file(tensors, aside / WEIGHTS, metadata={"format": "pt"})
        (aside / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        for file in aside.iterdir():
            file.chmod(0o644)
        folder.mkdir(exist_ok=True)
        for file in aside.iterdir():
            os.replace(file, folder / file.name)
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
    tree = section.get("tree")
    meta = HeadMeta(
        method=section.get("method", "eagle"),
        target=section.get("target", ""),
        align_steps=section.get("align_steps", 1),
        adversary=section.get("adversary", False),
        tokens_seen=section.get("tokens_seen"),
        training=section.get("training", {}),
        tree=TreeShape(**tree) if tree else None,
        results=section.get("results", {}),
    )
    return module, meta, draft_vocab


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
        raise UsageError(f"head {name} does not fit target {target}: its vocabulary has {llama.vocab_size} tokens, the target's {vocab_size}")
    if draft_vocab is not None and (len(draft_vocab) == 0 or int(draft_vocab.max()) >= vocab_size or int(draft_vocab.min()) < 0):
        raise DraftscopeError(f"head {name} has a broken draft vocabulary: ids outside the target's {vocab_size} tokens")
