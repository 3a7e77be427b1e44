"""The target: any causal language model that transformers loads, driven row by row with explicit masks and positions."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.convert_slow_tokenizer import bytes_to_unicode

from decoding.attention import use_grouped_attention
from decoding.cache import TreeCache
from decoding.embedded import NAME, embedded_path
from decoding.errors import DraftscopeError, UsageError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# byte-level BPE writes each byte as one printable character
_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}


@dataclass
class Target:
    """A loaded target and what decoding needs to know of it."""

    name: str
    model: PreTrainedModel
    tokenizer: Any | None
    stop_token_ids: frozenset[int]
    sharded: bool = False
    hidden_size: int = field(init=False)
    vocab_size: int = field(init=False)
    context_length: int = field(init=False)

    def __post_init__(self) -> None:
        config = self.model.config.get_text_config()
        self.hidden_size = config.hidden_size
        self.vocab_size = config.vocab_size
        self.context_length = config.max_position_embeddings
        self._window = getattr(config, "sliding_window", None)
        self._layer_types = set(getattr(config, "layer_types", None) or ())
        self._softcap = getattr(config, "final_logit_softcapping", None)

    @property
    def body(self) -> nn.Module:
        """The decoder stack: token ids in, features out."""
        return self.model.get_decoder()

    @property
    def embedding(self) -> nn.Module:
        return self.model.get_input_embeddings()

    @property
    def lm_head(self) -> nn.Linear:
        return self.model.get_output_embeddings()

    @property
    def device(self) -> torch.device:
        """Where features arrive and heads live (of a sharded target: the device of its `lm_head`)."""
        return self.lm_head.weight.device if not self.lm_head.weight.is_meta else self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def token_text(self, token_id: int) -> str:
        """Text of one token; bytes that are no text by themselves as <0xE2>; "" without a tokenizer."""
        if self.tokenizer is None:
            return f"<{token_id}>"
        piece = self.tokenizer.convert_ids_to_tokens(token_id)
        if piece is None:
            return f"<{token_id}>"
        if piece.startswith("\u2581"):  # sentencepiece writes a space as this block; decoding one token alone drops it
            return piece.replace("\u2581", " ")
        text = self.tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if "\ufffd" in text and all(character in _BYTES for character in piece):
            return "".join(f"<0x{_BYTES[character]:02X}>" for character in piece)
        return text

    def new_cache(self, capacity: int) -> TreeCache:
        return TreeCache(self.model.config.get_text_config().num_hidden_layers, capacity)

    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, visible: torch.Tensor | None, cache: TreeCache) -> torch.Tensor:
        """Run rows through the target and append them to the cache.

        Args:
            token_ids, positions: [rows].
            visible: [rows, cached + rows] bool, what each row sees; None for a causal prefill of an empty cache
                or a single row that sees everything.
            cache: the request's cache.

        Returns:
            Features [rows, hidden]: the last hidden state after the final norm.
        """
        out = self.body(
            input_ids=token_ids[None].to(self.embedding.weight.device),
            attention_mask=self._mask(visible, positions, cache),
            position_ids=positions[None],
            cache=cache,
            use_cache=True,
        )
        return out.last_hidden_state[0].to(self.device)

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocab]."""
        logits = self.lm_head(features)
        return logits if self._softcap is None else torch.tanh(logits / self._softcap) * self._softcap

    def _mask(self, visible: torch.Tensor | None, positions: torch.Tensor, cache: TreeCache) -> Any:
        """The 4-D mask transformers takes as it is; a sliding window, where the target has one, is cut into it here."""
        total = cache.length + len(positions)
        slides = self._window is not None and total > self._window
        if visible is None and not slides:
            return None
        if visible is None:
            visible = torch.ones(len(positions), total, dtype=torch.bool, device=positions.device).tril(cache.length)
        full = visible[None, None]
        if not slides:
            return full
        # cached rows stand at their own position; the rows of this forward at the positions that were given
        keys = torch.cat([torch.arange(cache.length, device=positions.device), positions])
        sliding = full & (positions[:, None] - keys[None] < self._window)
        if not self._layer_types:
            return sliding  # Mistral: every layer slides
        return {"full_attention": full, "sliding_attention": sliding}


def pick_device(device: str = "auto") -> str:
    """`auto` is CUDA where there is a GPU, else the CPU."""
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind = torch.device(device).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda"):
        raise UsageError(f"unknown device {device!r}: possible are auto, cpu, cuda and cuda:N")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UsageError("device 'cuda' was asked for, but torch sees no GPU here: use --device cpu")
    return device


def pick_dtype(dtype: str, device: str) -> torch.dtype:
    """`auto` is bfloat16 where the hardware computes in it (else float16 on a GPU, float32 on a CPU)."""
    if dtype != "auto":
        if dtype not in DTYPES:
            raise UsageError(f"unknown dtype {dtype!r}: possible are auto, {', '.join(DTYPES)}")
        return DTYPES[dtype]
    if device.startswith("cuda"):
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    abilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    native = abilities.get("amx_bf16") or abilities.get("avx512_bf16") or abilities.get("arm_bf16")
    return torch.bfloat16 if native else torch.float32


def load_target(source: str, device: str = "auto", dtype: str = "auto") -> Target:
    """Load a target.

    Args:
        source: "embedded", a folder, or a hub id.
        device: "auto", "cpu", "cuda" or "cuda:N"; "auto" spreads the target over several GPUs where there are several.
        dtype: "auto", "float32", "bfloat16" or "float16".

    Raises:
        UsageError: unknown source, device or dtype, or an architecture that can't be used.
        DraftscopeError: the files are there but can't be loaded.
    """
    picked = pick_device(device)
    kind = pick_dtype(dtype, picked)
    path = str(embedded_path()) if source == "embedded" else source
    if (
        source != "embedded"
        and not Path(path).is_dir()
        and (Path(path).exists() or len(Path(path).parts) != 2 or path.startswith((".", "/", "~")))
    ):
        raise UsageError(f"unknown target {source!r}: give 'embedded', a folder with config.json, or a hub id such as 'org/name'")
    sharded = device == "auto" and picked == "cuda" and torch.cuda.device_count() > 1
    try:
        config = AutoConfig.from_pretrained(path)
        model = AutoModelForCausalLM.from_pretrained(path, dtype=kind, device_map="auto" if sharded else picked)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise _unloadable(source, error) from error
    if model.get_output_embeddings() is None or config.is_encoder_decoder:
        raise UsageError(f"target {source!r} ({config.model_type}) is not a causal language model with an lm_head")
    model.eval().requires_grad_(False)
    use_grouped_attention(model)
    name = NAME if source == "embedded" else Path(path).resolve().name if Path(path).is_dir() else source
    return Target(name, model, _tokenizer(path), _stop_ids(path, model), sharded)


def _unloadable(source: str, error: Exception) -> DraftscopeError:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    kind = UsageError if isinstance(error, OSError) and not Path(source).is_dir() else DraftscopeError
    return kind(f"target {source!r} can't be loaded: {first}")


def _tokenizer(path: str) -> Any | None:
    """The target's tokenizer, or None where the folder has none (raw token ids still work)."""
    folder = Path(path)
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    if folder.is_dir() and not any((folder / name).exists() for name in names):
        return None
    return AutoTokenizer.from_pretrained(path)


def _stop_ids(path: str, model: PreTrainedModel) -> frozenset[int]:
    """All stop tokens of the generation config (such as `<|eot_id|>`), else the model config's."""
    try:
        stops = GenerationConfig.from_pretrained(path).eos_token_id
    except (OSError, json.JSONDecodeError):
        stops = None
    if stops is None:
        stops = model.config.get_text_config().eos_token_id
    return frozenset([stops] if isinstance(stops, int) else stops or [])
