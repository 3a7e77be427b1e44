"""What a person may choose: targets that fit this machine, and for each the heads that were made for it. No torch here."""

import json
import shutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from huggingface_hub import constants

from app.methods import METHODS, lane_label, method
from decoding.known import KnownTarget, catalogue
from decoding.memory import HELD, QUANTIZED, Needs, cpu_bytes, gigabytes, gpu_bytes, machine_words, needs
from decoding.records import AUTOREGRESSIVE
from decoding.space import on_a_space

EMBEDDED = "embedded"
EMBEDDED_NAME = "SmolLM2-135M-Instruct"
SHIPPED = Path(__file__).resolve().parent.parent / "assets" / "heads"


@dataclass(frozen=True)
class Offer:
    """One entry of the method list: `source` is what load_head takes, "autoregressive" is plain decoding."""

    source: str
    method: str
    label: str
    layers: int | None = None
    released: bool = False  # fetched from the hub when it is first used


PLAIN = Offer(AUTOREGRESSIVE, AUTOREGRESSIVE, method(AUTOREGRESSIVE).label)


@dataclass(frozen=True)
class TargetOffer:
    """One entry of the target list."""

    source: str  # what load_target takes
    title: str
    needs: Needs | None  # memory, in the precision that would be used; None: not known before it is loaded
    reason: str | None = None  # why it can't be chosen here
    note: str = ""  # what to know before it is chosen
    licence: str | None = None
    gated: bool = False
    tested: bool = False


def shipped_heads(folder: Path = SHIPPED) -> list[tuple[str, Offer]]:
    """(target, offer) of every head in `folder`, read from its config alone: `heads` would import torch for it."""
    found = []
    for config in sorted(folder.glob("*/config.json")):
        try:
            told = json.loads(config.read_text(encoding="utf-8"))
            section = told["draftscope"]
            layers = told.get("num_hidden_layers") or told.get("medusa_num_layers")
            offer = Offer(config.parent.name, section["method"], lane_label(section["method"], config.parent.name), layers)
            found.append((section["target"], offer))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # not a head of ours: load_head will say what is wrong with it when it is asked for by name
    order = {name: place for place, name in enumerate(METHODS)}
    return sorted(found, key=lambda pair: (pair[0] != EMBEDDED_NAME, order.get(pair[1].method, len(order)), pair[1].source))


def head_offers(target: str) -> list[Offer]:
    """Plain decoding and the heads made for a target, shipped ones first."""
    name = EMBEDDED_NAME if target == EMBEDDED else Path(target.partition("@")[0]).name
    shipped = [offer for made_for, offer in shipped_heads() if made_for == name]
    released = [
        Offer(head.source, head.method, lane_label(head.method, Path(head.source).name), released=True)
        for head in catalogue().heads_for(target)
    ]
    return [PLAIN, *shipped, *released]


def target_offers(own: str, device: str = "auto", dtype: str = "auto") -> list[TargetOffer]:
    """The server's own target, then the catalogue's, each with the reason where it can't be chosen here.

    A Space serves its own target only: another one would be loaded for every visitor.
    """
    known = {entry.source: entry for entry in catalogue().targets}
    mine = catalogue().target(own)
    out = [_offer(mine, device, dtype, own) if mine else TargetOffer(own, own if own.count("/") == 1 else Path(own).name, None)]
    for entry in known.values():
        if entry is mine:
            continue
        offer = _offer(entry, device, dtype, entry.source)
        if on_a_space():
            offer = TargetOffer(**{**vars(offer), "reason": "this Space serves one target; run Draftscope on your own machine for others"})
        out.append(offer)
    return out


def _offer(entry: KnownTarget, device: str, dtype: str, source: str) -> TargetOffer:
    gpus = gpu_bytes() if device != "cpu" else ()
    precision = dtype if dtype in HELD else "bfloat16" if gpus or _computes_in_half() else "float32"
    wanted = needs(entry, precision)
    facts = {"licence": entry.licence, "gated": entry.gated, "tested": entry.tested}
    disk = 2 * entry.parameters
    there = Path(constants.HF_HUB_CACHE) / f"models--{entry.source.replace('/', '--')}"
    one, together = max(gpus, default=0) if gpus else cpu_bytes(), sum(gpus) + cpu_bytes()
    reason, note = None, ""
    if wanted.total > one and (wanted.total > together or not gpus or device != "auto" or precision in QUANTIZED):
        machine, options = machine_words(cpu_bytes(), gpus), _options(entry, precision, one, gpus)
        reason = f"needs {gigabytes(wanted.total)} of memory, this machine has {machine}; would fit: {options}"
    elif wanted.total > one:
        note = "several GPUs" if wanted.total <= sum(gpus) else "partly in the CPU's memory: slow"
    if reason is None and entry.source != EMBEDDED and not there.is_dir() and disk > (free := _free_disk()):
        reason = f"is {gigabytes(disk)} to fetch, the disk has {gigabytes(free)} free"
    return TargetOffer(source, entry.title, wanted, reason, note, **facts)


def _options(entry: KnownTarget, precision: str, one: int, gpus: tuple[int, ...]) -> str:
    """What would make a target fit, in words."""
    smaller = [name for name in ("bfloat16", *(QUANTIZED if gpus else ())) if HELD[name] < HELD[precision]]
    fitting = [f"--dtype {name} ({gigabytes(size)})" for name in smaller if (size := needs(entry, name).total) <= one]
    if not gpus and not fitting:
        fitting = [f"a GPU with --dtype 4bit ({gigabytes(needs(entry, '4bit').total)})"]
    elif not fitting:
        fitting = [f"more GPUs (the layers are spread over them), with --dtype 4bit {gigabytes(needs(entry, '4bit').total)}"]
    return ", ".join(fitting)


def this_machine(device: str = "auto") -> str:
    """The memory of this machine, in words."""
    return machine_words(cpu_bytes(), gpu_bytes() if device != "cpu" else ())


def _free_disk() -> int:
    """Bytes free where the hub's files go."""
    folder = Path(constants.HF_HUB_CACHE)
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.is_dir())).free


@cache
def _computes_in_half() -> bool:
    """Whether this CPU computes in bfloat16 (load_target asks torch for the same)."""
    try:
        return any(name in Path("/proc/cpuinfo").read_text() for name in ("amx_bf16", "avx512_bf16", " bf16"))
    except OSError:
        return False
