"""The trees that `python -m decoding tune` chose: the user's, in the cache folder, and the shipped ones. No torch: the page draws them."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from decoding.embedded import cache_dir
from decoding.records import Environment, Run, TreeShape
from decoding.written import save

SHIPPED = Path(__file__).resolve().parent.parent / "assets" / "results" / "tuned.json"
SEPARATOR = " | "


@dataclass
class Tuned:
    """The choice for one head on one machine, and the figures behind it."""

    head: str
    target: str
    machine: str
    dtype: str
    threads: int
    depth: int
    top_k: int
    nodes: int
    ms_per_token: float  # of this tree, in runs
    plain_ms: float  # one plain token, in runs beside them
    tau: float
    verify_ms: dict[int, float]  # by rows: a step of a run without its draft
    draft_ms: dict[str, float]  # by "depth/top_k"
    curve: list[dict[str, float]] = field(default_factory=list)  # the best tree of each number of nodes
    finals: list[dict[str, float]] = field(default_factory=list)  # the trees that were run against each other
    measured: str = ""
    acceptance_from: str = ""  # the machine whose tau this is, where only costs were measured here

    @property
    def tree(self) -> TreeShape:
        return TreeShape(self.depth, self.top_k, self.nodes)

    @property
    def speed_up(self) -> float:
        """Over plain decoding, both run in turns."""
        return self.plain_ms / self.ms_per_token


def _file() -> Path:
    return cache_dir() / "tuned.json"


def remember(key: str, tuned: Tuned) -> None:
    """Keep a choice."""
    save({**{name: asdict(one) for name, one in known(_file()).items()}, key: asdict(tuned)}, _file())


def recall(key: str) -> Tuned | None:
    """The choice for a key of `key_of`; where this machine has none, the shipped one for the same kind of device, dtype and network
    (in float32 a row costs more, and bfloat16's trees can make a head slower than plain decoding; more training changes no cost)."""
    if (one := own(key)) is not None:
        return one
    return next((one for other, one in known(SHIPPED).items() if _anywhere(other) == _anywhere(key)), None)


def own(key: str) -> Tuned | None:
    """The choice that was made on this very machine."""
    return known(_file()).get(key)


def foreign(key: str) -> bool:
    """Whether `recall` has nothing of this kind of machine."""
    here = key.split(SEPARATOR)[:-1]
    return own(key) is None and not any(other.split(SEPARATOR)[:-1] == here for other in known(SHIPPED))


def tuned_elsewhere(key: str) -> Tuned | None:
    """A whole `tune` of the same network (more training, the dtype and the machine do not matter): this machine's own, else a
    shipped one, of the same dtype if there is one."""
    _, device, dtype, _, *network, _ = key.split(SEPARATOR)
    found = []
    for path in (_file(), SHIPPED):
        for other, one in known(path).items():
            _, its_device, its_dtype, _, *its_network, _ = other.split(SEPARATOR)
            if its_network == network and one.curve and not one.acceptance_from:
                found.append(((its_device, its_dtype) != (device, dtype), one))
    return min(found, key=lambda entry: entry[0])[1] if found else None


def key_of(where: Environment, *rest: object) -> str:
    """What a choice is kept under: the machine, and everything about target and head that changes cost or acceptance."""
    return SEPARATOR.join(map(str, (where.machine, where.device, where.dtype, where.threads, *rest)))


def _anywhere(key: str) -> list[str]:
    _, device, dtype, _, *network, _ = key.split(SEPARATOR)  # without the machine, its threads and the tokens seen
    return [device, dtype, *network]


def known(path: Path) -> dict[str, Tuned]:
    """All choices in a file; what can't be read, or was written by another version, is not there."""
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    out = {}
    for key, entry in told.items() if isinstance(told, Mapping) else ():
        try:
            out[key] = Tuned(**{**entry, "verify_ms": {int(rows): float(ms) for rows, ms in entry["verify_ms"].items()}})
        except (KeyError, TypeError, ValueError, AttributeError):
            continue
    return out


def chosen_for(run: Run) -> Tuned | None:
    """The newest choice for a run's head on the kind of machine it ran on; shipped ones count where there is no own one."""
    where = run.environment
    wanted = (run.head, run.target, where.machine, where.dtype)
    for path in (_file(), SHIPPED):
        found = [one for one in known(path).values() if (one.head, one.target, one.machine, one.dtype) == wanted]
        if found:
            return max(found, key=lambda one: one.measured)
    return None


def told(tuned: Tuned) -> str:
    """The choice and its curve as text."""
    said = f" (tau from {tuned.acceptance_from}, costs measured here)" if tuned.acceptance_from else ""
    lines = [
        f"{tuned.head}: tree_depth {tuned.depth}, tree_top_k {tuned.top_k}, tree_nodes {tuned.nodes}: {tuned.ms_per_token:.1f} ms a token, "
        f"tau {tuned.tau:.2f}; a plain token {tuned.plain_ms:.1f} ms, so {tuned.speed_up:.2f}x{said}"
    ]
    if tuned.verify_ms:
        lines.append("verification, ms by rows: " + ", ".join(f"{rows}: {ms:.1f}" for rows, ms in tuned.verify_ms.items()))
    lines.append("nodes  depth  top_k   tau  ms a token")
    shown = [(point, "") for point in tuned.curve if not tuned.finals or point["nodes"] + 1 in tuned.verify_ms]
    shown += [(point, "  run") for point in tuned.finals]
    for point, mark in sorted(shown, key=lambda entry: (entry[0]["nodes"], entry[1])):
        chosen = point["nodes"] == tuned.nodes and (mark or not tuned.finals)
        line = "{nodes:>5}  {depth:>5}  {top_k:>5}  {tau:>4.2f}  {ms_per_token:>6.1f}".format(**point)
        lines.append(line + ("  <- chosen" if chosen else mark))
    return "\n".join(lines)
