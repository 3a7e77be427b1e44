"""Measured comparison: methods and plain decoding interleaved in one process, on the same prompts, with spread.

Every speed-up is a ratio measured here. Its 95 % interval comes from resampling the prompts (bootstrap); where the
interval holds 1, the table says that there is no difference.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedModel

from decoding.chat import encode_prompt
from decoding.costs import synchronize
from decoding.engine import Generation
from decoding.head import DraftHead
from decoding.metrics import PHASES, Metrics, lossless, measure
from decoding.prompts import Prompt
from decoding.records import AUTOREGRESSIVE, Run, Settings
from decoding.reports import heading
from decoding.resampling import NOTE, Amounts, interval, ratio
from decoding.target import Target

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

PEERS = {"transformers": {}, "transformers, prompt lookup": {"prompt_lookup_num_tokens": 10}}


@dataclass
class Sample:
    """One method on one prompt, once: tokens of the decode steps and their time (prefill apart where it can be told)."""

    method: str
    number: int  # of the prompt: two files may use the same ids
    prompt: str
    source: str
    repeat: int
    tokens: int
    decode_ms: float
    run: Run | None  # None for peers, which leave no record


def bench(
    target: Target,
    heads: list[DraftHead],
    prompts: list[Prompt],
    settings: Settings,
    *,
    repeats: int = 1,
    warmup: int = 1,
    peers: bool = False,
    on_run: Callable[[Run], None] = lambda run: None,
) -> dict[str, Any]:
    """Measure plain decoding and every head (and transformers' own generate) on the same prompts.

    Args:
        warmup: runs of the first prompt per method before anything is counted.
        peers: also transformers' generate, plain and with prompt lookup (greedy only).
        on_run: gets every counted record.

    Returns:
        A JSON-ready result: environment, settings, per method figures with spread and speed-up intervals.
    """
    methods: dict[str, Callable[[Prompt], tuple[int, float, Run | None]]] = {
        AUTOREGRESSIVE: lambda prompt: _ours(target, None, prompt, settings),
        **{head.name: (lambda prompt, head=head: _ours(target, head, prompt, settings)) for head in heads},
    }
    if peers:
        model = _untouched(target)
        methods |= {name: (lambda prompt, extra=extra: _peer(target, model, prompt, settings, extra)) for name, extra in PEERS.items()}
    samples: list[Sample] = []
    total = len(methods) * (warmup + repeats * len(prompts))
    with tqdm(total=total, unit="run", desc="bench", file=sys.stderr) as bar:
        for method in methods.values():
            for _ in range(warmup):
                method(prompts[0])
                bar.update()
        for repeat in range(repeats):
            for number, prompt in enumerate(prompts):
                names = list(methods)
                turn = (number + repeat) % len(names)  # no method always runs first
                for name in names[turn:] + names[:turn]:
                    bar.set_postfix_str(f"{name}, {prompt.id}", refresh=False)
                    tokens, milliseconds, run = methods[name](prompt)
                    samples.append(Sample(name, number, prompt.id, prompt.source, repeat, tokens, milliseconds, run))
                    if run:
                        on_run(run)
                    bar.update()
    return _results(target, heads, methods, samples, settings, prompts, repeats, warmup)


def _ours(target: Target, head: DraftHead | None, prompt: Prompt, settings: Settings) -> tuple[int, float, Run]:
    generation = Generation(target, head, prompt.text, settings)
    for _ in generation:
        pass
    run = generation.run
    figures = measure(run)
    return figures.tokens, figures.decode_ms, run


def _untouched(target: Target) -> PreTrainedModel:
    """The model as transformers loads it. Ours lends its matrices to the lean forward, and on a CPU they are packed for it."""
    source = target.model.config._name_or_path
    if target.device.type != "cpu" or not Path(source).is_dir():
        return target.model
    return AutoModelForCausalLM.from_pretrained(source, dtype=target.dtype).eval()


@torch.inference_mode()
def _peer(target: Target, model: PreTrainedModel, prompt: Prompt, settings: Settings, extra: dict[str, Any]) -> tuple[int, float, None]:
    """transformers' generate; its prefill is measured with a one-token run of its own and taken off."""
    ids = torch.tensor([encode_prompt(target.tokenizer, prompt.text)], device=target.embedding.weight.device)
    # num_return_sequences and the like stay at their defaults; sampling settings are ours
    sampling = {"do_sample": settings.temperature > 0}
    if settings.temperature > 0:
        sampling |= {"temperature": settings.temperature, "top_p": settings.top_p, "top_k": settings.top_k}
    common = {"attention_mask": torch.ones_like(ids), "eos_token_id": sorted(target.stop_token_ids) or None, **sampling}
    times = []
    for limit in (1, settings.max_new_tokens):
        synchronize(ids.device)
        started = time.perf_counter()
        out = model.generate(ids, max_new_tokens=limit, pad_token_id=0, **common, **(extra if limit > 1 else {}))
        synchronize(ids.device)
        times.append(1000 * (time.perf_counter() - started))
    return out.shape[1] - ids.shape[1] - 1, max(times[1] - times[0], 1e-6), None


def _results(
    target: Target,
    heads: list[DraftHead],
    methods: dict[str, Any],
    samples: list[Sample],
    settings: Settings,
    prompts: list[Prompt],
    repeats: int,
    warmup: int,
) -> dict[str, Any]:
    by_method = {name: [sample for sample in samples if sample.method == name] for name in methods}
    plain = by_method[AUTOREGRESSIVE]
    heads_by_name = {head.name: head for head in heads}
    out: dict[str, Any] = {}
    for name, own in by_method.items():
        rates = [_rate([sample for sample in own if sample.repeat == repeat]) for repeat in range(repeats)]
        entry: dict[str, Any] = {
            "tokens_per_second": {"median": statistics.median(rates), "min": min(rates), "max": max(rates)},
            "speed_up": ratio(_per_prompt(own), _per_prompt(plain)),
        }
        for peer in PEERS:
            if peer in by_method and name not in PEERS:
                entry.setdefault("speed_up_over", {})[peer] = ratio(_per_prompt(own), _per_prompt(by_method[peer]))
        runs = [sample.run for sample in own if sample.run]
        if runs:
            entry |= _figures(measure(runs))
            entry["tree"] = runs[0].settings.tree._asdict() if name in heads_by_name else None
            entry["per_set"] = {
                source: _figures(measure([s.run for s in own if s.run and s.source == source])) for source in _sources(prompts)
            }
            entry["lossless"] = _lossless(own, plain)
        if name in heads_by_name:
            entry["head"] = heads_by_name[name].info.model_dump()
        out[name] = entry
    return {
        **heading("bench", "decoding", target, settings),
        "prompts": {source: sum(prompt.source == source for prompt in prompts) for source in _sources(prompts)},
        "repeats": repeats,
        "warmup": warmup,
        "peak_memory_mib": _peak_memory(target),
        "methods": out,
    }


def _sources(prompts: list[Prompt]) -> list[str]:
    return list(dict.fromkeys(prompt.source for prompt in prompts))


def _figures(figures: Metrics) -> dict[str, Any]:
    return {
        "mean_acceptance_length": figures.mean_acceptance_length,
        "acceptance_by_depth": figures.acceptance_by_depth,
        "conditional_acceptance": figures.conditional_acceptance,
        "draft_acceptance_rate": figures.draft_acceptance_rate,
        "acceptance_histogram": figures.acceptance_histogram,
        "ms_per_token": figures.ms_per_token,
        "phase_ms_per_step": {name: value / max(figures.steps, 1) for name, value in figures.phase_ms.items()},
        "steps": figures.steps,
        "tokens": figures.tokens,
    }


def _rate(samples: list[Sample]) -> float:
    return 1000 * sum(sample.tokens for sample in samples) / max(sum(sample.decode_ms for sample in samples), 1e-9)


def _per_prompt(samples: list[Sample]) -> Amounts:
    """Tokens and the median time over the repeats, in the prompts' order."""
    out = []
    for number in sorted({sample.number for sample in samples}):
        same = [sample for sample in samples if sample.number == number]
        out.append((same[0].tokens, statistics.median(sample.decode_ms for sample in same)))
    return out


def _lossless(own: list[Sample], plain: list[Sample]) -> dict[str, Any]:
    """How many outputs equal plain decoding's, and the first divergences (greedy)."""
    reference = {sample.number: sample.run for sample in plain if sample.repeat == 0}
    firsts = [sample for sample in own if sample.repeat == 0]
    found = [(sample.prompt, lossless(sample.run, reference[sample.number])) for sample in firsts]
    return {
        "equal": sum(result.equal for _, result in found),
        "of": len(found),
        "divergences": [
            {"prompt": prompt, "index": result.index, "plain_id": result.plain_id, "run_id": result.run_id, "margin": result.margin}
            for prompt, result in found
            if not result.equal
        ],
    }


def _peak_memory(target: Target) -> float:
    if target.device.type == "cuda":
        return torch.cuda.max_memory_allocated(target.device) / 2**20
    if resource is None:
        return psutil.Process().memory_info().peak_wset / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1024 if sys.platform != "darwin" else 2**20)


def table(results: dict[str, Any]) -> str:
    """The result as text."""
    env, settings = results["environment"], results["settings"]
    versions = ", ".join(f"{name} {number}" for name, number in env["versions"].items())
    drafts = {entry["head"]["dtype"] for entry in results["methods"].values() if "head" in entry} - {"", env["dtype"]}
    dtypes = ", ".join([env["dtype"], *(f"heads in {dtype}" for dtype in sorted(drafts))])
    lines = [
        f"{results['target']} on {env['machine']} ({env['device']}, {dtypes}, {env['threads']} threads; {versions})",
        f"{sum(results['prompts'].values())} prompts, {results['repeats']} repeats, {settings['max_new_tokens']} new tokens, "
        f"temperature {settings['temperature']}; peak memory {results['peak_memory_mib']:.0f} MiB",
        "",
        f"{'method':<28} {'tokens/s (min-max)':<22} {'speed-up [95 %]':<24} {'tau':>5}  {'tree':<9} equal   ms per step: "
        + " ".join(f"{name:>7}" for name in PHASES),
    ]
    for name, entry in results["methods"].items():
        rate, speed = entry["tokens_per_second"], entry["speed_up"]
        told = "1 (it is the baseline)" if name == AUTOREGRESSIVE else interval(speed)
        line = f"{name:<28} {rate['median']:>6.1f} ({rate['min']:.1f}-{rate['max']:.1f})".ljust(52) + f"{told:<24} "
        if "steps" in entry:
            tree = "-" if not entry["tree"] else "{depth}/{top_k}/{nodes}".format(**entry["tree"])
            same = f"{entry['lossless']['equal']}/{entry['lossless']['of']}"
            tau = entry["mean_acceptance_length"]
            phases = " ".join(f"{entry['phase_ms_per_step'][phase]:>7.2f}" for phase in PHASES)
            line += f"{'-' if tau is None else format(tau, '.2f'):>5}  {tree:<9} {same:<8}{'':<13} {phases}"
        lines.append(line)
    lines.append("")
    for name, entry in results["methods"].items():
        if entry.get("acceptance_by_depth"):
            share = " ".join(f"{value:.2f}" for value in entry["acceptance_by_depth"])
            given = " ".join("-" if value is None else f"{value:.2f}" for value in entry["conditional_acceptance"])
            sets = ", ".join(f"{s} {f['mean_acceptance_length']:.2f}" for s, f in entry["per_set"].items() if f["steps"])
            lines.append(f"{name}: accepted at depth 1, 2, ...: {share}; given the depth before: {given}; tau by set: {sets}")
    lines.append(f"tau = tokens per step, bonus included. {NOTE}.")
    return "\n".join(lines)
