"""Measured results that are shipped (assets/results), as tables: the page draws them, `python -m app.results` writes the README's."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from decoding.records import AUTOREGRESSIVE
from decoding.resampling import NOTE, UNTOLD

RESULTS = Path(__file__).resolve().parent.parent / "assets" / "results"
README = RESULTS.parent.parent / "README.md"
MARKS = "<!-- results: python -m app.results -->", "<!-- end of results -->"


@dataclass(frozen=True)
class Table:
    """A table, where, when and by which command it was measured, and what marks in it mean."""

    title: str
    where: str
    command: str
    names: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        """As the README shows it."""
        lines = [self.names, ["---"] * len(self.names), *self.rows]
        told = "\n".join(f"| {' | '.join(row)} |" for row in lines)
        return f"**{self.title}.** {self.where}. Command: `{self.command}`\n\n{told}"


def tables(folder: Path = RESULTS) -> list[Table]:
    """One table for each result file, in the order of their names."""
    out = []
    for path in sorted(folder.glob("*.json")):
        told = json.loads(path.read_text(encoding="utf-8"))
        draw = DRAWN.get(told.get("schema", "").partition("/")[0])
        if draw is not None:
            title, names, rows = draw(told)
            cells = tuple(tuple(row) for row in rows)
            mark = f"; {NOTE}" if any(cell.endswith(UNTOLD) for row in cells for cell in row) else ""
            out.append(Table(title, _where(told) + mark, told["command"], tuple(names), cells))
    return out


def _where(told: Mapping[str, Any]) -> str:
    env, settings = told["environment"], told["settings"]
    prompts = told["prompts"]
    count = sum(prompts.values()) if isinstance(prompts, Mapping) else prompts
    versions = ", ".join(f"{name} {number}" for name, number in env["versions"].items() if name != "python")
    return (
        f"{told['target']}, {env['machine']}, {env['threads']} thread{'s' if env['threads'] > 1 else ''}, {env['dtype']}, {versions}, "
        f"{told['date'][:10]}: {count} prompts, {settings['max_new_tokens']} new tokens, temperature {settings['temperature']:g}"
        + "".join(f"; {note}" for note in env.get("notes", ()))
    )


def _number(value: float | None, form: str = ".2f") -> str:
    return "–" if value is None else format(value, form)


def _per_depth(values: Sequence[float | None]) -> str:
    return ", ".join(_number(value) for value in values) or "–"


def _ratio(found: Mapping[str, Any] | None) -> str:
    """With its interval, where the record has one, and `UNTOLD` where that holds 1."""
    if found is None:
        return "–"
    if "low" not in found:
        return _number(found["ratio"])
    return f"{found['ratio']:.2f} [{found['low']:.2f}, {found['high']:.2f}]" + ("" if found["differs"] else UNTOLD)


def _tree(tree: Mapping[str, int] | None) -> str:
    return "{depth}/{top_k}/{nodes}".format(**tree) if tree else "–"


Drawing = tuple[str, Sequence[str], Iterator[Sequence[str]]]


def _evaluation(told: Mapping[str, Any]) -> Drawing:
    heads = told["heads"]
    first = next(iter(heads))
    sets = list(heads[first]["per_set"])

    def rows() -> Iterator[Sequence[str]]:
        for name, entry in heads.items():
            per_set = [_number(entry["per_set"][one]["mean_acceptance_length"]) for one in sets]
            mean = _number(entry["mean_acceptance_length"])
            given, overlap = _per_depth(entry["conditional_acceptance"]), _per_depth(entry["overlap_by_depth"])
            over = _ratio(entry.get("tau_over", {}).get(first))
            yield f"`{name}`", mean, over, *per_set, given, overlap, _tree(entry["tree"])

    names = (
        "head",
        "tau",
        f"times that of `{first}` [95 % over prompts]",
        *(f"tau, {one}" for one in sets),
        "accepted at depth 1, 2, ... given the depth before",
    )
    return "Acceptance", (*names, "overlap by depth", "tree (depth/top-k/nodes)"), rows()


def _bench(told: Mapping[str, Any]) -> Drawing:
    def rows() -> Iterator[Sequence[str]]:
        for name, entry in told["methods"].items():
            speed = "1" if name == AUTOREGRESSIVE else _ratio(entry["speed_up"])
            phases, rate = entry.get("phase_ms_per_step", {}), entry["tokens_per_second"]["median"]
            costs = (_number(phases.get(phase), ".1f") for phase in ("draft", "verify"))
            yield (
                f"`{name}`",
                _number(rate, ".1f"),
                speed,
                _number(entry.get("mean_acceptance_length")),
                *costs,
                _tree(entry.get("tree")),
            )

    costs = ("draft ms per step", "verify ms per step", "tree (depth/top-k/nodes)")
    names = ("method", "tokens/s", "speed-up over plain decoding [95 % over prompts]", "tau", *costs)
    return "Speed", names, rows()


def _ablation(told: Mapping[str, Any]) -> Drawing:
    def rows() -> Iterator[Sequence[str]]:
        for row in told["rows"]:
            facts = (row["family"], str(row["layers"]), f"{row['adversary']:g}", f"{row['tokens_seen']:,}")
            due = (_ratio(row[f"due_to_{part}"]) for part in ("layers", "adversary"))
            yield *facts, _per_depth(row["held_out"]["top1"]), _number(row["held_out"]["chain"]), _number(row["tau"]), *due

    names = ("family", "K", "lambda", "tokens seen", "held-out top-1 by step", "held-out chain", "tau")
    due = ("tau times that of K = 1 [95 % over prompts]", "tau times that without adversary [95 % over prompts]")
    return "KOALA's two ingredients apart, at equal training tokens", (*names, *due), rows()


DRAWN: dict[str, Callable[[Mapping[str, Any]], Drawing]] = {
    "draftscope.evaluation": _evaluation,
    "draftscope.bench": _bench,
    "draftscope.ablation": _ablation,
}


def main() -> None:
    """Put the tables into the README."""
    begin, end = MARKS
    before, _, rest = README.read_text(encoding="utf-8").partition(begin)
    _, _, after = rest.partition(end)
    block = "\n\n".join(table.markdown() for table in tables())
    README.write_text(f"{before}{begin}\n\n{block}\n\n{end}{after}", encoding="utf-8")
    print(f"{len(tables())} tables")


if __name__ == "__main__":
    main()
