"""Head folders on disk: our own layout and the released EAGLE-1/2 and HASS ones (the same tensors, other leftovers).

`config.json` (Llama keys, "bias", "qkv_bias"; ours adds a "draftscope" section) and `model.safetensors`, else
`pytorch_model.bin` (read with weights_only=True: no code from a checkpoint ever runs).
"""

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from transformers import LlamaConfig

from decoding.errors import DraftscopeError, UsageError
from decoding.loading import native_bfloat16
from decoding.records import TreeShape
from decoding.target import Target
from heads.feature import FeatureHead, FeatureShape
from heads.layouts import misfits, read_config, read_weights, weight_files

SECTION = "draftscope"
INDEX = "model.safetensors.index.json"
EMBEDDING = "embed_tokens.weight"
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
    config, tensors = read_config(folder), read_weights(weight_files(folder))
    section = config.pop(SECTION, None) or {}
    bias_said, qkv_bias = config.pop("bias", True), bool(config.pop("qkv_bias", False))
    try:
        llama = LlamaConfig.from_dict({**config, "model_type": "llama"})
    except (TypeError, ValueError, KeyError) as error:
        raise UsageError(f"{folder / 'config.json'} is not a head's config: {error}") from error
    # a bias that the config denies is in the file all the same: released LLaMA-3 HASS heads were trained with it
    fc_bias = bool(bias_said) or "fc.bias" in tensors
    draft_vocab = tensors.pop(DRAFT_VOCAB, None)
    module = FeatureHead(FeatureShape(llama, fc_bias, qkv_bias or "layers.0.self_attn.q_proj.bias" in tensors))
    wanted = module.state_dict()
    copied = tensors.pop(EMBEDDING, None)  # the target's own: compared, then not needed
    shape = (llama.vocab_size, llama.hidden_size)
    wrong = misfits(tensors, wanted)
    if copied is not None and tuple(copied.shape) != shape:
        wrong.append(f"{EMBEDDING} is {tuple(copied.shape)}, expected {shape}")
    if wrong:
        raise UsageError(f"the tensors of {folder} do not fit its config: {'; '.join(wrong)}")
    module.to(tensors["fc.weight"].dtype).load_state_dict(tensors)
    return module, HeadMeta.from_section(section), draft_vocab


def check_target(name: str, hidden: int, vocab: int, draft_vocab: torch.Tensor | None, target: Target) -> None:
    """Raises UsageError where a head was made for another kind of target: all that differs, at once."""
    wrong = []
    if hidden != target.hidden_size:
        wrong.append(f"its hidden size is {hidden}, the target's {target.hidden_size}")
    if vocab != target.vocab_size:
        wrong.append(f"its vocabulary has {vocab} tokens, the target's {target.vocab_size}")
    if wrong:
        raise UsageError(f"head {name} does not fit target {target.name}: {'; '.join(wrong)}")
    check_draft_vocab(name, draft_vocab, target.vocab_size)


def draft_dtype(held: torch.dtype, target: Target) -> torch.dtype:
    """What a head drafts in: the target's dtype. A bfloat16 head of a float32 target stays as it is where the hardware computes
    in bfloat16: half the bytes are read, and what is drafted decides how much is accepted, never what is emitted."""
    stays = target.dtype == torch.float32 and held == torch.bfloat16 and native_bfloat16(str(target.device))
    return held if stays else target.dtype


def check_draft_vocab(name: str, draft_vocab: torch.Tensor | None, vocab_size: int) -> None:
    """Raises DraftscopeError where a draft vocabulary names tokens that the target does not have."""
    if draft_vocab is not None and (len(draft_vocab) == 0 or int(draft_vocab.max()) >= vocab_size or int(draft_vocab.min()) < 0):
        raise DraftscopeError(f"head {name} has a broken draft vocabulary: ids outside the target's {vocab_size} tokens")
