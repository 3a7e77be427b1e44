"""Loading a target: where from, in which precision, onto which devices."""

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, GenerationConfig, PreTrainedConfig
from transformers.utils import is_bitsandbytes_available, logging

from decoding import hub, processor
from decoding.attention import use_grouped_attention
from decoding.chat import closing_ids
from decoding.embedded import NAME, embedded_path
from decoding.errors import DraftscopeError, UsageError, first_line
from decoding.hub import Progress, silent
from decoding.known import family_of
from decoding.memory import QUANTIZED, free_bytes, gigabytes, weights_bytes
from decoding.space import on_zero_gpu
from decoding.target import Target

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# what reading files that were cut, mixed up or made for something else ends in
BROKEN = (OSError, ValueError, KeyError, TypeError, RuntimeError, ImportError, MemoryError, EOFError, SafetensorError, UnpicklingError)
NO_CODE = {"trust_remote_code": False}  # said, for transformers asks on the terminal where nothing is said
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


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


def pick_precision(dtype: str, device: str) -> str:
    """A name of DTYPES or QUANTIZED. `auto` is bfloat16 where the hardware computes in it (else float16 on a GPU, float32 on a CPU)."""
    if dtype in QUANTIZED:
        if not device.startswith("cuda"):
            raise UsageError(f"{dtype} weights (bitsandbytes) need an NVIDIA GPU: on a CPU use float32 or bfloat16")
        if not is_bitsandbytes_available():
            raise UsageError(f"{dtype} weights need the package bitsandbytes: pip install bitsandbytes")
        return dtype
    if dtype != "auto":
        if dtype not in DTYPES:
            raise UsageError(f"unknown dtype {dtype!r}: possible are auto, {', '.join(DTYPES)}, and on a GPU {' and '.join(QUANTIZED)}")
        return dtype
    if device.startswith("cuda"):
        return "bfloat16" if native_bfloat16(device) else "float16"
    return "bfloat16" if native_bfloat16(device) else "float32"


@cache
def native_bfloat16(device: str) -> bool:
    """Whether the hardware computes in bfloat16, rather than makes do."""
    if device.startswith("cuda"):
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return any(processor.abilities().get(name) for name in ("amx_bf16", "avx512_bf16", "arm_bf16"))


def find_target(source: str, progress: Progress = silent) -> Path:
    """The folder of a target's files, fetched if they are not here yet (see decoding.hub.find)."""
    return embedded_path(progress) if source == "embedded" else hub.find("target", source, progress)


def load_target(source: str, device: str = "auto", dtype: str = "auto", progress: Progress = silent) -> Target:
    """Load a target.

    Args:
        source: "embedded", a folder, or a hub id ('org/name', 'org/name@revision').
        device: "auto", "cpu", "cuda" or "cuda:N". "auto" takes a GPU; where one is too small for the target it is spread
            over all of them, and what is left over stays in the CPU's memory and is copied for every forward (slow).
        dtype: "auto", "float32", "bfloat16" or "float16"; on a GPU also "8bit" and "4bit" (bitsandbytes).
        progress: is told what is being done and how far it is.

    Raises:
        UsageError: unknown source, device or dtype, or an architecture that can't be used.
        DraftscopeError: the files are there but can't be loaded, or the memory does not hold them.
    """
    picked = pick_device(device)
    precision = pick_precision(dtype, picked)
    path = find_target(source, progress)
    name = NAME if source == "embedded" else path.resolve().name if Path(source).is_dir() else source
    kind = DTYPES[precision if precision in DTYPES else pick_precision("auto", picked)]
    options: dict[str, Any] = {}
    if precision in QUANTIZED:
        options["quantization_config"] = _quantization(precision, kind)
    try:
        config = AutoConfig.from_pretrained(path, **NO_CODE)
        where = placement(config, weights_bytes(path, precision), picked, device == "auto" and precision in DTYPES, name)
        with _told(name, progress):
            # ZeroGPU stands in for a GPU on this thread alone, and transformers moves weights to devices on threads of its own
            apart = where == "cuda" and on_zero_gpu()
            model = AutoModelForCausalLM.from_pretrained(path, dtype=kind, device_map="cpu" if apart else where, **options, **NO_CODE)
            if apart:
                model.to("cuda")
    except DraftscopeError:
        raise
    except BROKEN as error:
        raise _unloadable(source, error) from error
    if model.get_output_embeddings() is None or config.is_encoder_decoder:
        raise UsageError(f"target {source!r} ({config.model_type}) is not a causal language model with an lm_head")
    model.eval().requires_grad_(False)
    use_grouped_attention(model)
    notes = ((f"{precision[0]}-bit weights (bitsandbytes)",) if precision in QUANTIZED else ()) + spread_notes(model)
    tokenizer = load_tokenizer(path, source)
    return Target(name, model, tokenizer, stop_ids(path, model.config.get_text_config(), tokenizer), notes)


def fits(source: str, device: str, dtype: str, progress: Progress = silent) -> bool:
    """Whether the memory that is free now holds a target. Its files are fetched for that, if they are not here yet.

    Raises:
        UsageError, DraftscopeError: as load_target, for what can be known before the weights are read.
    """
    picked = pick_device(device)
    precision = pick_precision(dtype, picked)
    return weights_bytes(find_target(source, progress), precision) <= free_bytes(picked)


def release_memory() -> None:
    """Give back the memory of models that nobody holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _quantization(precision: str, kind: torch.dtype) -> BitsAndBytesConfig:
    if precision == "8bit":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=kind)


def placement(config: PreTrainedConfig, size: int, device: str, spread: bool, name: str) -> Any:
    """The device map for weights of `size` bytes: one device where they fit.

    Args:
        spread: whether several GPUs and the CPU's memory may be used besides.

    Raises:
        DraftscopeError: they do not fit, with both figures.
    """
    free = free_bytes(device)
    if size <= free:
        return device
    if not (spread and device == "cuda"):
        advice = "a smaller target, a half-precision dtype" + (" or 4bit" if device.startswith("cuda") else "")
        told = f"target {name} needs about {gigabytes(size)} for its weights, {device} has {gigabytes(free)} free: {advice} needs less"
        raise DraftscopeError(told)
    room: dict[int | str, int] = {index: free_bytes(f"cuda:{index}") for index in range(torch.cuda.device_count())}
    return spread_map(config, size, {**room, "cpu": free_bytes("cpu")}, name)


def spread_map(config: PreTrainedConfig, size: int, room: dict[int | str, int], name: str) -> dict[str, int | str]:
    """A device map that fills the devices in order. Embedding, final norm and `lm_head` stay on the first: heads compute with them.

    Args:
        room: free bytes of each device, the first one computes; layers on a later "cpu" or "disk" are copied to it when they run,
            and a layer's size is kept free for that.

    Raises:
        DraftscopeError: all of it together is too small.
    """
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    counted = sum(parameter.numel() for parameter in model.parameters())
    names = {module: path for path, module in model.named_modules()}
    body = model.get_decoder()
    layers = next(child for child in body.children() if isinstance(child, nn.ModuleList))
    first, *_ = room
    ends = [names[child] for child in body.children() if child is not layers] + [names[model.get_output_embeddings()]]
    out: dict[str, int | str] = dict.fromkeys(ends, first)
    of_layers = sum(parameter.numel() for parameter in layers.parameters())
    layer = size * of_layers // counted // len(layers)
    left = {device: 0.9 * free for device, free in room.items()}  # the rest: keys and values, a head, what a forward holds
    left[first] -= size - layer * len(layers) + layer
    for index in range(len(layers)):
        device = next((device for device, free in left.items() if free >= layer), None)
        if device is None:
            told = " + ".join(
                f"{gigabytes(free)} on {device if isinstance(device, str) else f'cuda:{device}'}" for device, free in room.items()
            )
            raise DraftscopeError(f"target {name} needs about {gigabytes(size)} for its weights; free are {told}")
        left[device] -= layer
        out[f"{names[layers]}.{index}"] = device
    return out


def spread_notes(model: nn.Module) -> tuple[str, ...]:
    """How many layers stand where, of a target on several devices."""
    places = [str(place) for name, place in getattr(model, "hf_device_map", {}).items() if name.split(".")[-1].isdigit()]
    if len(set(places)) < 2:
        return ()
    return (f"layers: {', '.join(f'{places.count(place)} on {place_name(place)}' for place in dict.fromkeys(places))}",)


def place_name(place: int | str) -> str:
    """accelerate's name of a device in words."""
    return f"cuda:{place}" if str(place).isdigit() else str(place)


@contextmanager
def _told(name: str, progress: Progress) -> Iterator[None]:
    """Tells `progress` how far transformers is with reading weights, through the hook of its progress bars."""

    def hook(factory: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        bar = factory(*arguments, **options)
        total = options.get("total") or (len(arguments[0]) if arguments and hasattr(arguments[0], "__len__") else 0)
        return _Counted(bar, total, lambda share: progress(f"Reading {name}: {share:.0%}", share))

    before = logging.set_tqdm_hook(hook)
    try:
        progress(f"Reading {name}", 0.0)
        yield
    finally:
        logging.set_tqdm_hook(before)


class _Counted:
    """A progress bar that also tells its share, when it is iterated."""

    def __init__(self, bar: Any, total: int, tell: Callable[[float], None]) -> None:
        self._bar, self._total, self._tell = bar, total, tell

    def __iter__(self) -> Iterator[Any]:
        for done, item in enumerate(self._bar, 1):
            yield item
            if self._total and (done * 50 // self._total) != ((done - 1) * 50 // self._total):
                self._tell(done / self._total)

    def __enter__(self) -> "_Counted":
        self._bar.__enter__()
        return self

    def __exit__(self, *reason: Any) -> Any:
        return self._bar.__exit__(*reason)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bar, name)


def _unloadable(source: str, error: Exception) -> DraftscopeError:
    return DraftscopeError(f"target {source!r} can't be loaded: {first_line(error)}")


def load_tokenizer(path: Path, source: str) -> Any | None:
    """The target's tokenizer, or None where the folder has none (raw token ids still work). One without a chat template
    gets its family's, if the catalogue knows the target."""
    if not any((path / name).exists() for name in TOKENIZER_FILES):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, **NO_CODE)
    except BROKEN as error:
        raise DraftscopeError(f"the tokenizer of target {source!r} can't be loaded: {first_line(error)}") from error
    family = family_of(source)
    if family and not getattr(tokenizer, "chat_template", None):
        tokenizer.chat_template = family.chat_template
    return tokenizer


def stop_ids(path: Path, config: PreTrainedConfig, tokenizer: Any | None) -> frozenset[int]:
    """Every token that ends an answer: those of the generation config (such as `<|eot_id|>`), of the model config and the
    tokenizer, and the one that the chat template closes an answer with (released configs often lack it)."""
    found: set[int] = set()
    try:
        generation = GenerationConfig.from_pretrained(path).eos_token_id
    except (OSError, json.JSONDecodeError):
        generation = None
    for stops in (generation, config.eos_token_id, getattr(tokenizer, "eos_token_id", None)):
        found.update([stops] if isinstance(stops, int) else stops or [])
    if tokenizer is not None:
        found.update(closing_ids(tokenizer))
    return frozenset(token_id for token_id in found if 0 <= token_id < config.vocab_size)
