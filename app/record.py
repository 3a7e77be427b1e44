"""Make the recorded runs that the page opens on: `python -m app.record` (all shipped heads, on this machine)."""

import argparse
import json
import re
import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from app.library import RUNS, SUFFIX, save_packed
from app.methods import METHODS
from app.models import Models
from app.offers import EMBEDDED
from app.prompts import PROMPTS, Example, examples
from decoding.errors import DraftscopeError
from decoding.records import AUTOREGRESSIVE, Run, Settings


def record_prompt(models: Models, source: str, methods: list[str], prompt: str, settings: Settings) -> list[Run]:
    """One run for each method, plain decoding first, a few steps of each in turn; each head is warmed up before."""
    from decoding import Generation
    from decoding.engine import in_turns

    target = models.target(source)
    heads = {name: models.head(name, target) for name in methods}
    for name, head in heads.items():
        models.warm_up(name, target, head)
    runs = {name: Generation(target, head, prompt, settings, drift=True) for name, head in heads.items()}
    for _ in in_turns(runs):
        pass
    return [run.run for run in runs.values()]


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(prog="python -m app.record", description="Record the runs that the page shows without weights.")
    out.add_argument("--target", default=EMBEDDED, metavar="T", help="'embedded', a folder, or a hub id")
    out.add_argument(
        "--head", action="append", default=[], metavar="H", help="heads to record, in this order (default: all shipped for the target)"
    )
    out.add_argument("--prompts", type=Path, default=PROMPTS, metavar="FILE", help="prompt file (default: the examples of the page)")
    out.add_argument("--limit", type=int, default=None, metavar="N", help="only the first N prompts")
    out.add_argument("--max-new-tokens", type=int, default=96, metavar="N")
    out.add_argument("--temperature", type=float, default=0.0, metavar="T")
    out.add_argument("--device", default="auto", metavar="D")
    out.add_argument("--dtype", default="auto", metavar="D")
    exact = "a prompt to record once more in float32, where all lanes are equal token for token (default: %(default)s; '' = none)"
    out.add_argument("--exact", default="code", metavar="ID", help=exact)
    out.add_argument("--out", type=Path, default=RUNS, metavar="DIR", help="replaced when all is recorded (default: the page's own)")
    return out


def _record_all(options: argparse.Namespace, dtype: str, asked: list[Example], out: Path) -> list[dict[str, str]]:
    """Record every prompt with every method; the entries of the index."""
    models = Models(options.target, options.device, dtype, tuple(options.head))
    methods = [AUTOREGRESSIVE, *(options.head or [offer.source for offer in models.offers() if offer.source != AUTOREGRESSIVE])]
    settings = Settings(max_new_tokens=options.max_new_tokens, temperature=options.temperature)
    for example in asked:
        for run in record_prompt(models, options.target, methods, example.prompt, settings):
            name = re.sub(r"[^\w.-]", "-", run.head or AUTOREGRESSIVE)
            save_packed(run, out / example.name / f"{name}{SUFFIX}")
            label = METHODS[run.method].label if run.method in METHODS else run.method
            print(f"{example.name:14} {label:16} {len(run.steps):4} steps {len(run.output_ids):4} tokens", flush=True)
    return [{"name": example.name, "title": example.title} for example in asked]


def main(arguments: list[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    aside = Path(tempfile.mkdtemp(prefix="draftscope-runs-"))
    try:
        asked = examples(options.prompts)[: options.limit]
        index = _record_all(options, options.dtype, asked, aside)
        again = [
            replace(example, name=f"{example.name}-float32", title=f"{example.title} (float32)")
            for example in asked
            if example.name == options.exact
        ]
        index += _record_all(options, "float32", again, aside)
        (aside / "index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
        shutil.rmtree(options.out, ignore_errors=True)
        aside.chmod(0o755)
        shutil.copytree(aside, options.out)
    except DraftscopeError as error:
        print(f"app.record: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
