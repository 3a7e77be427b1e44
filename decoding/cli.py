"""`python -m decoding`: run one prompt, or measure methods against each other."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from decoding.errors import DraftscopeError, UsageError
from decoding.records import Settings
from decoding.written import check_place, save, writing

EXIT_FAILED, EXIT_USAGE = 1, 2
EXAMPLES = Path(__file__).resolve().parent.parent / "assets" / "prompts" / "examples.jsonl"


def count(text: str) -> int:
    """The type of options that are a number from 1 up."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 up")
    return int(text)


def run_command(command: Callable[[], None]) -> int:
    """Run a command; errors are one clear line. Returns the exit code: 0, 1 failed, 2 wrong arguments."""
    try:
        command()
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except DraftscopeError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return EXIT_FAILED
    return 0


def add_target_options(parser: argparse.ArgumentParser) -> None:
    """--target, --device, --dtype, --threads: the same everywhere."""
    parser.add_argument(
        "--target",
        default="embedded",
        help="'embedded', a folder, or a hub id such as org/name or org/name@revision (default: %(default)s)",
    )
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: %(default)s)")
    parser.add_argument("--dtype", default="auto", help="auto, float32, bfloat16, float16; on a GPU also 8bit, 4bit (default: %(default)s)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's choice)")


def add_settings(parser: argparse.ArgumentParser) -> None:
    """The fields of Settings as options; what is not given stays unset, so that a head's tuned tree counts."""
    group = parser.add_argument_group("settings")
    texts = {
        "max_new_tokens": "tokens to generate at most",
        "temperature": "0 = greedy",
        "top_p": "nucleus sampling",
        "top_k": "sample from the k best tokens, 0 = all",
        "seed": "of the random draws",
        "tree_depth": "drafted levels (default: the head's own)",
        "tree_top_k": "children per node and beam width (default: the head's own)",
        "tree_nodes": "drafted nodes that are verified, root not counted (default: the head's own)",
    }
    for name, text in texts.items():
        default = Settings.model_fields[name].default
        text += "" if "default" in text else f" (default: {default})"
        group.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=argparse.SUPPRESS, help=text)


def settings_from(arguments: argparse.Namespace) -> Settings:
    """Settings with only those fields set that were given."""
    return Settings(**{name: value for name, value in vars(arguments).items() if name in Settings.model_fields})


def prepare(arguments: argparse.Namespace):
    """Load the target that the options name; torch is imported here, after the arguments were found right."""
    import torch
    from transformers.utils import logging

    from decoding.loading import load_target

    logging.disable_progress_bar()
    if arguments.threads is not None:
        if arguments.threads < 1:
            raise UsageError("--threads is at least 1")
        torch.set_num_threads(arguments.threads)
    return load_target(arguments.target, arguments.device, arguments.dtype)


def _run(arguments: argparse.Namespace) -> None:
    check_place(arguments.trace)
    settings = settings_from(arguments)
    target = prepare(arguments)
    from decoding.engine import Generation
    from decoding.metrics import measure
    from heads import load_head

    head = load_head(arguments.head, target, draft_vocab=arguments.draft_vocab) if arguments.head else None
    generation = Generation(target, head, arguments.prompt, settings)
    try:
        for _ in generation:
            sys.stderr.write(f"\r{len(generation.output_ids)} tokens, {len(generation.steps)} steps")
            sys.stderr.flush()
    except KeyboardInterrupt:
        pass  # what was made is kept and shown
    sys.stderr.write("\n")
    run = generation.run
    figures = measure(run)
    print(run.text)
    told = [
        f"{run.method}: {len(run.output_ids)} tokens in {figures.steps} steps ({run.finish_reason})",
        f"prefill {run.prefill_ms:.0f} ms",
    ]
    if figures.tokens_per_second:
        told += [f"{figures.tokens_per_second:.1f} tokens/s", f"tau {figures.mean_acceptance_length:.2f}"]
    print(", ".join(told), file=sys.stderr)
    if arguments.trace:  # last: a full disk takes the file, not the answer
        with writing(arguments.trace):
            run.save(arguments.trace)


def _bench(arguments: argparse.Namespace) -> None:
    check_place(arguments.out)
    from decoding.prompts import read_prompts

    settings = settings_from(arguments)
    if arguments.warmup < 0:
        raise UsageError("--warmup is at least 0")
    prompts = read_prompts(arguments.prompts, arguments.limit)
    target = prepare(arguments)
    from decoding.bench import bench, table
    from heads import load_heads

    heads = load_heads(arguments.head, target, arguments.draft_vocab)
    for head in heads:
        settings.resolved(head.tree)  # contradictions are told before anything is measured
    results = bench(target, heads, prompts, settings, repeats=arguments.repeats, warmup=arguments.warmup, peers=arguments.peers)
    print(table(results))  # first: a full disk takes the file, not the figures
    if arguments.out:
        save(results, arguments.out)


def _tune(arguments: argparse.Namespace) -> None:
    from decoding.prompts import read_prompts

    prompts = read_prompts(arguments.prompts, arguments.limit)
    target = prepare(arguments)
    from decoding.tuned import told
    from decoding.tuning import fit, tune
    from heads import load_heads

    for head in load_heads(arguments.head, target, arguments.draft_vocab):
        print(told(fit(target, head) if arguments.quick else tune(target, head, prompts)))


def _scale(arguments: argparse.Namespace) -> None:
    target = prepare(arguments)
    from decoding.costs import drafting, verification
    from decoding.records import TreeShape
    from heads import load_head

    measured = verification(target, arguments.rows, arguments.contexts)
    print(f"{target.name}: ms of a verification by context and rows (1 row = a plain step)")
    print("context  " + " ".join(f"{rows:>8}" for rows in arguments.rows))
    for context in arguments.contexts:
        print(f"{context:>7}  " + " ".join(f"{measured[context, rows]:>8.1f}" for rows in arguments.rows))
    shapes = [TreeShape(depth, width, min(TreeShape(depth, width).pool, 59)) for depth, width in ((1, 10), (4, 4), (6, 10))]
    for name in arguments.head:
        head = load_head(name, target, draft_vocab=arguments.draft_vocab)
        for context in arguments.contexts:
            cost = drafting(target, head, shapes, context)
            told = ", ".join(f"{shape.depth}/{shape.top_k}/{shape.nodes}: {ms:.1f}" for shape, ms in cost.items())
            print(f"{name} ({head.info.layers} layers), ms of a draft at context {context} by depth/top_k/nodes: {told}")


def _needs(arguments: argparse.Namespace) -> None:
    from decoding.known import catalogue
    from decoding.memory import HELD, QUANTIZED, cpu_bytes, described, gigabytes, gpu_bytes, machine_words, needs

    targets = [described(source) for source in arguments.target] or list(catalogue().targets)
    gpus, cpu = gpu_bytes(), cpu_bytes()
    print(f"this machine has {machine_words(cpu, gpus)}; '*' = fits on one device of it")
    for target in targets:
        print(f"{target.title} ({target.parameters / 1e9:.2f} billion parameters)")
        for precision in HELD:
            found = needs(target, precision, arguments.context, arguments.nodes)
            most = max((*gpus, 0 if precision in QUANTIZED else cpu))  # 8 and 4 bits need a GPU
            print(f"{'*' if found.total <= most else ' '} {precision:<9} {gigabytes(found.total):>9}: {found}")


def _add_draft_vocab(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--draft-vocab", type=int, help="let heads propose only the N most frequent tokens (default: as trained)")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m decoding", description="Speculative decoding with learned draft heads.")
    commands = parser.add_subparsers(dest="command", required=True)

    run = commands.add_parser("run", help="generate an answer to one prompt", formatter_class=argparse.RawTextHelpFormatter)
    add_target_options(run)
    run.add_argument("--head", help="name of a shipped head, a folder or a hub id (default: none, plain decoding)")
    _add_draft_vocab(run)
    run.add_argument("--prompt", required=True, help="what the user says; the chat template is applied")
    run.add_argument("--trace", type=Path, help="write the Run record here, as JSON")
    add_settings(run)
    run.set_defaults(function=_run)

    bench = commands.add_parser("bench", help="measure heads against plain decoding")
    add_target_options(bench)
    bench.add_argument("--head", action="append", default=[], help="a head to measure; may be given several times")
    bench.add_argument("--prompts", type=Path, nargs="+", required=True, help='JSON lines {"id", "category", "turns"}')
    bench.add_argument("--limit", type=count, help="only the first N prompts of each file")
    bench.add_argument("--repeats", type=count, default=1, help="default: %(default)s")
    bench.add_argument("--warmup", type=int, default=1, help="uncounted runs per method (default: %(default)s)")
    bench.add_argument("--peers", action="store_true", help="measure transformers' generate too, plain and with prompt lookup")
    _add_draft_vocab(bench)
    bench.add_argument("--out", type=Path, help="write the results here, as JSON")
    add_settings(bench)
    bench.set_defaults(function=_bench)

    tune = commands.add_parser("tune", help="find the trees that fit this machine, and use them from now on")
    add_target_options(tune)
    tune.add_argument("--head", action="append", required=True, help="a head to tune; may be given several times")
    tune.add_argument("--prompts", type=Path, nargs="+", default=[EXAMPLES], help="JSON lines (default: the page's examples)")
    tune.add_argument(
        "--quick", action="store_true", help="measure only what trees cost here; what they catch is known of the shipped heads"
    )
    tune.add_argument("--limit", type=count, default=8, help="only the first N prompts of each file (default: %(default)s)")
    _add_draft_vocab(tune)
    tune.set_defaults(function=_tune)

    scale = commands.add_parser("scale", help="measure what a step costs against context, tree and layers")
    add_target_options(scale)
    scale.add_argument("--head", action="append", default=[], help="a head whose drafts are measured; may be given several times")
    scale.add_argument("--contexts", type=count, nargs="+", default=[200, 1000, 2000], help="default: 200 1000 2000")
    scale.add_argument("--rows", type=count, nargs="+", default=[1, 8, 16, 32, 60], help="root included (default: 1 8 16 32 60)")
    _add_draft_vocab(scale)
    scale.set_defaults(function=_scale)

    needs = commands.add_parser("needs", help="what targets need of memory, from their configs alone")
    needs.add_argument("--target", nargs="+", default=[], help="folders, or targets of the catalogue (default: all of it)")
    needs.add_argument("--context", type=count, help="tokens of a request (default: the target's limit, at most 4096)")
    needs.add_argument("--nodes", type=count, default=59, help="of a draft tree (default: %(default)s)")
    needs.set_defaults(function=_needs)

    arguments = parser.parse_args(argv)
    return run_command(lambda: arguments.function(arguments))
