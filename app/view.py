"""The page's view of runs: compact plain data, made from Run records alone and drawn in the browser.

Live, recorded and uploaded runs all pass through here, so they look and work the same. A lane's steps are sent in
slices (`at`, `steps`): the browser puts a slice where it belongs, so a repeated slice changes nothing.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypedDict

from app.methods import lane_label, method
from decoding.metrics import Lossless, Metrics, lossless, measure, speed_up
from decoding.records import Environment, HeadInfo, Run, Settings, Step, TreeShape

State = Literal["waiting", "loading", "running", "done", "stopped", "failed"]
MARKS = {"accepted": "a", "rejected": "r", "unreached": "u"}


class StepFacts(TypedDict):
    """What every step has. Lists of nodes are parallel, in the record's order."""

    root: int
    ids: list[int]
    up: list[int]  # parent of each node, -1 = root
    q: list[float]  # draft probability given the parent
    p: list[float]  # target probability at the parent
    mark: str  # one of a r u per node
    path: list[int]  # accepted nodes
    bonus: int
    out: int  # tokens emitted
    ms: list[float]  # draft, verify, accept, commit, record
    t: float  # start on the run's own clock
    ctx: int


class StepView(StepFacts, total=False):
    """One step, with what was recorded of it."""

    draw: list[float | None]
    bar: list[float | None]  # what the draw was held against: p after the siblings before it were ruled out
    gap: list[float]  # greedy: best minus second-best logit where each of (path, bonus) was chosen
    second: list[int]
    cos: list[float | None]
    share: list[float | None]


class Figures(TypedDict):
    """The numbers of a lane; None where nothing was measured yet."""

    tokens: int
    steps: int
    tau: float | None
    tps: float | None
    speedup: float | None
    use: float | None
    decode_ms: float


class EqualityView(TypedDict):
    """A lane against plain decoding."""

    equal: bool
    compared: int
    index: int | None
    plain: int | None
    mine: int | None
    gap: float | None
    tie: bool


class LaneView(TypedDict):
    """One lane, or a slice of it."""

    key: str
    method: str
    label: str
    about: str
    facts: str  # layers, parameters, tree, memory
    state: State
    error: str | None
    figures: Figures
    prefill: float | None
    first: int | None
    at: int  # index of the first step in `steps`
    steps: list[StepView]
    texts: dict[int, str]
    finish: str | None
    tree: list[int] | None  # depth, top_k, nodes as used
    sampled: bool
    equality: EqualityView | None


class Message(TypedDict):
    """What the page is told. `session` changes when the lanes are others than before."""

    session: str
    kind: Literal["live", "recorded", "uploaded"]
    title: str
    prompt: str
    where: str
    settings: str
    note: str  # an error or a notice about the whole session
    failed: bool
    running: bool
    link: str  # query of an address that opens this view
    lanes: list[LaneView]


@dataclass
class Tally:
    """A lane's counters while it runs; agrees with decoding.metrics.measure at every step."""

    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    prefill_ms: float = 0.0
    end_ms: float = 0.0
    ids: list[int] = field(default_factory=list)

    def add(self, step: Step) -> None:
        self.steps += 1
        self.tokens += len(step.token_ids)
        self.drafted += len(step.node_ids)
        self.accepted += len(step.accepted)
        self.end_ms = step.end_ms

    def figures(self, plain: Metrics | None) -> Figures:
        decode_ms = max(self.end_ms - self.prefill_ms, 0.0) if self.steps else 0.0
        rate = 1000 * self.tokens / decode_ms if decode_ms else None
        theirs = plain.tokens_per_second if plain else None
        return {
            "tokens": self.tokens,
            "steps": self.steps,
            "tau": 1 + self.accepted / self.steps if self.steps else None,
            "tps": rate,
            "speedup": rate / theirs if rate and theirs else None,
            "use": self.accepted / self.drafted if self.drafted else None,
            "decode_ms": decode_ms,
        }


def figures(run: Run, plain: Run | None) -> Figures:
    """The numbers of a run, its speed-up over `plain` where that was measured too."""
    mine = measure(run)
    return {
        "tokens": mine.tokens,
        "steps": mine.steps,
        "tau": mine.mean_acceptance_length,
        "tps": mine.tokens_per_second,
        "speedup": speed_up(mine, measure(plain)) if plain else None,
        "use": mine.draft_acceptance_rate,
        "decode_ms": mine.decode_ms,
    }


def short(value: float) -> float:
    """Four significant digits: what a person can read and no more to send."""
    return float(f"{value:.4g}")


def step_view(step: Step) -> StepView:
    """One step as the browser gets it."""
    view: StepView = {
        "root": step.root_id,
        "ids": step.node_ids,
        "up": step.parents,
        "q": [short(2.718281828459045**value) for value in step.draft_logprobs],
        "p": [short(value) for value in step.target_probs],
        "mark": "".join(MARKS[status] for status in step.status),
        "path": step.accepted,
        "bonus": step.bonus_id,
        "out": len(step.token_ids),
        "ms": [round(value, 3) for value in (step.draft_ms, step.verify_ms, step.accept_ms, step.commit_ms, step.record_ms)],
        "t": round(step.start_ms, 3),
        "ctx": step.context_length,
    }
    if any(draw is not None for draw in step.draws):
        view["draw"] = [None if draw is None else short(draw) for draw in step.draws]
        view["bar"] = held_against(step)
    if step.margins:
        view["gap"] = [short(value) for value in step.margins]
        view["second"] = step.runner_up_ids
    if any(value is not None for value in step.drift_cosine):
        view["cos"] = [None if value is None else short(value) for value in step.drift_cosine]
    if any(value is not None for value in step.overlap):
        view["share"] = [None if value is None else short(value) for value in step.overlap]
    return view


def held_against(step: Step) -> list[float | None]:
    """For each node that was tested by a draw: its target probability after the rejected siblings before it were
    taken out and the rest renormalised, which is what the draw was compared with."""
    gone: dict[int, float] = {}
    out: list[float | None] = []
    for parent, probability, draw, status in zip(step.parents, step.target_probs, step.draws, step.status, strict=True):
        removed = gone.get(parent, 0.0)
        left = 1.0 - removed
        out.append(None if draw is None else short(min(1.0, probability / left)) if left > 1e-9 else 0.0)
        if draw is not None and status == "rejected":
            gone[parent] = removed + probability
    return out


def used_ids(steps: Iterable[Step]) -> set[int]:
    """Every token id that the browser needs a text for."""
    ids: set[int] = set()
    for step in steps:
        ids.update(step.node_ids, step.runner_up_ids, (step.root_id, step.bonus_id))
    return ids


HALF = ("bfloat16", "float16")
FLOAT32_TIE = 1e-3  # logits: what the order of float32 additions can move


def rounding_decided(result: Lossless, run: Run) -> bool:
    """Whether the two best logits at the divergence are so close that rounding can swap them in the run's dtype."""
    if run.environment.dtype in HALF:
        return result.near_tie
    return result.margin is not None and result.margin < FLOAT32_TIE


def equality_view(result: Lossless, run: Run) -> EqualityView:
    """The lossless check as the browser gets it."""
    return {
        "equal": result.equal,
        "compared": result.compared,
        "index": result.index,
        "plain": result.plain_id,
        "mine": result.run_id,
        "gap": None if result.margin is None else short(result.margin),
        "tie": rounding_decided(result, run),
    }


def run_state(run: Run) -> State:
    """How a finished run is called on the page."""
    return {"cancelled": "stopped", "error": "failed"}.get(run.finish_reason, "done")  # type: ignore[return-value]


def lane_of(run: Run, key: str, plain: Run | None) -> LaneView:
    """A whole lane from a record."""
    with_head = run.head is not None
    texts = {token_id: run.token_text(token_id) for token_id in used_ids(run.steps)}
    if run.first_id is not None:
        texts[run.first_id] = run.token_text(run.first_id)
    against = plain if plain is not None and plain is not run and same_question(run, plain) else None
    if against is not None:
        texts.update({token_id: against.token_text(token_id) for token_id in against.output_ids})
    return {
        "key": key,
        "method": method(run.method).key,
        "label": lane_label(run.method, run.head),
        "about": method(run.method).about,
        "facts": facts_line(run),
        "state": run_state(run),
        "error": run.error,
        "figures": figures(run, plain if plain is not None and fair(run, plain) else None),
        "prefill": round(run.prefill_ms, 3),
        "first": run.first_id,
        "at": 0,
        "steps": [step_view(step) for step in run.steps],
        "texts": texts,
        "finish": run.finish_reason,
        "tree": list(run.settings.tree) if with_head else None,
        "sampled": run.settings.temperature > 0,
        "equality": equality_view(lossless(run, against), run) if against is not None else None,
    }


def empty_lane(key: str, method_key: str, head: str | None, state: State, sampled: bool) -> LaneView:
    """A lane that has not begun."""
    return {
        "key": key,
        "method": method(method_key).key,
        "label": lane_label(method_key, head),
        "about": method(method_key).about,
        "facts": "",
        "state": state,
        "error": None,
        "figures": Tally().figures(None),
        "prefill": None,
        "first": None,
        "at": 0,
        "steps": [],
        "texts": {},
        "finish": None,
        "tree": None,
        "sampled": sampled,
        "equality": None,
    }


def same_question(run: Run, plain: Run) -> bool:
    """Greedy runs of one target on one prompt: their outputs must be equal."""
    greedy = run.settings.temperature == 0 and plain.settings.temperature == 0
    return greedy and run.target == plain.target and run.prompt_ids == plain.prompt_ids


def fair(run: Run, plain: Run) -> bool:
    """True where the seconds of two runs may be divided: same prompt, sampling, machine, dtype and threads."""
    sampling = [(r.settings.temperature, r.settings.top_p, r.settings.top_k) for r in (run, plain)]
    places = [(r.environment.device, r.environment.dtype, r.environment.machine, r.environment.threads) for r in (run, plain)]
    return run.target == plain.target and run.prompt_ids == plain.prompt_ids and len({*sampling}) == len({*places}) == 1


def plain_of(runs: Iterable[Run]) -> Run | None:
    """The plain decoding among runs of one prompt."""
    return next((run for run in runs if run.head is None), None)


def settings_line(settings: Settings) -> str:
    """The settings that matter for reading a run, in words."""
    parts = [f"up to {settings.max_new_tokens} new tokens"]
    if settings.temperature == 0:
        parts.append("greedy (temperature 0)")
    else:
        parts.append(
            f"temperature {settings.temperature:g}, top-p {settings.top_p:g}, top-k {settings.top_k or 'off'}, seed {settings.seed}"
        )
    return ", ".join(parts)


def head_facts(info: HeadInfo, tree: TreeShape) -> str:
    """The size of a head and the tree that it drafts."""
    medusa = "medusa" in info.method
    word = f"{'block' if medusa else 'layer'}{'s' if info.layers > 1 else ''}{' per position' if medusa else ''}"
    size = f"{info.layers} {word}, {info.parameters / 1e6:.1f} M parameters"
    return f"{size}; {'static ' if medusa else ''}tree: depth {tree.depth}, top-k {tree.top_k}, {tree.nodes} nodes"


def facts_line(run: Run) -> str:
    """What a lane ran with: the head's size, the tree as used, the memory at most."""
    parts = [head_facts(run.head_info, run.settings.tree)] if run.head_info is not None else []
    if run.head_info is not None and run.head_info.dtype not in ("", run.environment.dtype):
        parts.append(f"drafts in {run.head_info.dtype}")
    if run.peak_memory_bytes:
        parts.append(f"memory {run.peak_memory_bytes / 2**30:.2f} GiB")
    return "; ".join(parts)


def where_line(target: str, environment: Environment) -> str:
    """The target and the hardware that a run is measured on."""
    parts = [target, environment.dtype, environment.machine or environment.device]
    if environment.device.startswith("cpu"):
        parts.append(f"{environment.threads} thread{'s' if environment.threads > 1 else ''}")
    else:
        parts.append(environment.device)
    parts += [f"torch {environment.versions['torch']}"] if "torch" in environment.versions else []
    return " · ".join([*parts, *environment.notes])


def session_of(runs: list[Run], session: str, kind: Literal["live", "recorded", "uploaded"], title: str) -> Message:
    """Everything the page shows for finished runs of one prompt."""
    plain = plain_of(runs)
    created = runs[0].created[:10]
    return {
        "session": session,
        "kind": kind,
        "title": title,
        "prompt": runs[0].prompt_text,
        "where": where_line(runs[0].target, runs[0].environment) + (f" · {created}" if created and kind != "live" else ""),
        "settings": settings_line(runs[0].settings),
        "note": "",
        "failed": False,
        "running": False,
        "link": "",
        "lanes": [lane_of(run, lane_key(index, run), plain) for index, run in enumerate(runs)],
    }


def lane_key(index: int, run: Run) -> str:
    """A name for a lane that is unique in its session."""
    return f"{index}:{run.head or run.method}"
