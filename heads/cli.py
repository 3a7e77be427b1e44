"""`python -m heads`: write training text, train heads, and evaluate them."""

import argparse
import json
import shlex
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from decoding.cli import add_settings, add_target_options, count, prepare, run_command, settings_from
from decoding.written import check_place, save

RECIPE_OPTIONS = {
    "layers": (int, "K: decoder layers of the head, or residual blocks per position"),
    "align_steps": (int, "HASS alignment steps (1 = EAGLE)"),
    "positions": (int, "Medusa: future positions"),
    "own_lm_head": (bool, "Medusa: a trained lm_head per position instead of the target's"),
    "feature_weight": (float, "weight of the SmoothL1 feature loss"),
    "soft_weight": (float, "weight of the cross-entropy (EAGLE and HASS: 0.1)"),
    "top_weight": (float, "weight of HASS's top-K loss"),
    "top_k": (int, "K of the top-K loss"),
    "step_decay": (float, "weight of draft step m is this to the power m"),
    "hard_labels": (bool, "learn the text's tokens instead of the target's distributions"),
    "adversary": (float, "lambda of KOALA's adversarial loss, 0 = none"),
    "adversary_rate": (float, "learning rate of the discriminator"),
    "adversary_ramp": (float, "share of the training over which lambda grows from 0"),
    "fit_input": (bool, "start fc as the best linear guess (else random)"),
    "scale_inputs": (bool, "train in coordinates where every input of a matrix has size 1"),
    "noise": (float, "uniform noise on input features (EAGLE)"),
    "optimizer": (str, "adamw or muon (for the matrices)"),
    "learning_rate": (float, "peak learning rate"),
    "schedule": (str, "after the warm-up: linear, to zero, or cosine, to a tenth"),
    "warm_up": (float, "share of the training"),
    "batch_tokens": (int, "padded tokens of a batch"),
    "accumulate": (int, "batches per optimizer step and process"),
    "epochs": (int, "times the text is seen"),
    "tokens": (int, "supervised tokens to see in all, instead of epochs"),
    "draft_vocab": (int, "propose only the N most frequent tokens (default: all)"),
    "weight_decay": (float, "of AdamW"),
    "clip_norm": (float, "largest gradient norm, 0 = any"),
    "clip_value": (float, "largest gradient entry (EAGLE and HASS: 0.5), 0 = any"),
    "seed": (int, "of first weights, order and noise"),
    "start": (str, "folder of a head to go on from (a second stage): its draft vocabulary is kept, its tokens are counted in"),
}
ABLATION_OPTIONS = ("draft_vocab", "learning_rate", "schedule", "feature_weight")  # those that hold for all heads of an ablation


def _synthesize(arguments: argparse.Namespace) -> None:
    target = prepare(arguments)
    from heads.training.synthesize import synthesize

    report = synthesize(target, arguments.tokens, arguments.out, arguments.batch, arguments.seed)
    print(json.dumps(report, indent=1))


def _pack(arguments: argparse.Namespace) -> None:
    target = prepare(arguments)
    from heads.training.data import pack

    print(json.dumps(pack(arguments.data, arguments.out, target), indent=1))


def _train(arguments: argparse.Namespace) -> None:
    from heads.training.allocator import keep_memory
    from heads.training.recipe import recipe_for
    from heads.training.workers import Workers, launched_device

    recipe = recipe_for(arguments.method, **{name: getattr(arguments, name) for name in RECIPE_OPTIONS})
    keep_memory()
    arguments.device = launched_device(arguments.device)
    workers = Workers(cpu=arguments.device == "cpu")
    target = prepare(arguments)
    from heads.training.train import train

    figures = train(
        target,
        recipe,
        arguments.data,
        arguments.out,
        max_length=arguments.max_length,
        checkpoint_minutes=arguments.checkpoint_minutes,
        max_minutes=arguments.max_minutes,
        snapshots=max(0, arguments.snapshots),
        keep_features=arguments.features == "cached",
        command=shlex.join(["python", "-m", "heads", *sys.argv[1:]]),
        workers=workers,
    )
    if workers.first:
        print(f"{arguments.out}: {figures}")
    workers.close()


def _evaluate(arguments: argparse.Namespace) -> None:
    check_place(arguments.out)
    from decoding.prompts import read_prompts

    prompts = read_prompts(arguments.prompts, arguments.limit)
    settings = settings_from(arguments)
    target = prepare(arguments)
    from heads import load_heads
    from heads.evaluate import evaluate, table

    results = evaluate(target, load_heads(arguments.head, target), prompts, settings)
    print(table(results))
    if arguments.out:
        save(results, arguments.out)


def _ablate(arguments: argparse.Namespace) -> None:
    from decoding.prompts import read_prompts
    from heads.training.allocator import keep_memory

    keep_memory()
    prompts = read_prompts(arguments.prompts, arguments.limit)
    settings = settings_from(arguments)
    target = prepare(arguments)
    from heads.ablate import ablate, table

    result = ablate(
        target,
        arguments.data,
        arguments.out,
        prompts,
        settings,
        families=arguments.families,
        layers=arguments.layers,
        adversaries=arguments.adversaries,
        tokens=arguments.tokens,
        seed=settings.seed,
        **{name: getattr(arguments, name) for name in ABLATION_OPTIONS},
    )
    print(table(result))


def _add_recipe(parser: argparse._ActionsContainer, names: Iterable[str]) -> None:
    for name in names:
        kind, text = RECIPE_OPTIONS[name]
        how = {"action": argparse.BooleanOptionalAction} if kind is bool else {"type": kind}
        parser.add_argument(f"--{name.replace('_', '-')}", help=text, **how)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m heads", description="Train and evaluate draft heads.")
    commands = parser.add_subparsers(dest="command", required=True)

    synthesize = commands.add_parser("synthesize", help="let the target write dialogues to train on; resumes where it stopped")
    add_target_options(synthesize)
    synthesize.add_argument("--tokens", type=int, required=True, help="answer tokens that the folder shall hold in the end")
    synthesize.add_argument("--out", type=Path, required=True, help="folder of the text")
    synthesize.add_argument("--batch", type=int, default=128, help="dialogues written at once (default: %(default)s)")
    synthesize.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    synthesize.set_defaults(function=_synthesize)

    packing = commands.add_parser("pack", help="put text folders together into one small folder, each dialogue once")
    add_target_options(packing)
    packing.add_argument("data", type=Path, nargs="+", help="folders made by 'synthesize'")
    packing.add_argument("--out", type=Path, required=True, help="a new folder, or a packed one that gets what it lacks")
    packing.set_defaults(function=_pack)

    train = commands.add_parser(
        "train", help="train a head; resumes from a checkpoint in --out; also under 'accelerate launch -m heads train ...'"
    )
    add_target_options(train)
    train.add_argument("--method", required=True, help="eagle, hass, koala-eagle, hass-koala, medusa or koala-medusa")
    train.add_argument("--data", type=Path, nargs="+", required=True, help="folders made by 'synthesize' or 'pack', or ShareGPT JSON files")
    train.add_argument("--out", type=Path, required=True, help="folder of the head, its checkpoint and metrics")
    train.add_argument("--max-length", type=int, default=2048, help="dialogues are cut here (default: %(default)s)")
    train.add_argument(
        "--features",
        choices=["cached", "fly"],
        default="cached",
        help="target features of all the text once on disk, or in every step: quicker for few --tokens of much text (default: %(default)s)",
    )
    train.add_argument("--checkpoint-minutes", type=float, default=5.0, help="a kill loses at most this (default: %(default)s)")
    train.add_argument("--max-minutes", type=float, help="stop after this long, leaving a checkpoint")
    train.add_argument("--snapshots", type=int, default=0, help="heads to write on the way, evenly, into OUT/<tokens seen> (default: none)")
    group = train.add_argument_group("recipe (default: what the method sets)")
    _add_recipe(group, RECIPE_OPTIONS)
    train.set_defaults(function=_train)

    evaluate = commands.add_parser("evaluate", help="acceptance of heads on prompts, side by side")
    add_target_options(evaluate)
    evaluate.add_argument("--head", action="append", required=True, help="a head; may be given several times")
    evaluate.add_argument("--prompts", type=Path, nargs="+", required=True, help='JSON lines {"id", "category", "turns"}')
    evaluate.add_argument("--limit", type=count, help="only the first N prompts of each file")
    evaluate.add_argument("--out", type=Path, help="write the results here, as JSON")
    add_settings(evaluate)
    evaluate.set_defaults(function=_evaluate)

    ablate = commands.add_parser("ablate", help="KOALA's layers and adversary taken apart: heads trained on equal tokens, then measured")
    add_target_options(ablate)
    ablate.add_argument("--data", type=Path, nargs="+", required=True, help="as for 'train'")
    ablate.add_argument("--tokens", type=int, required=True, help="supervised tokens that each head sees")
    ablate.add_argument("--out", type=Path, required=True, help="a folder: one head in each of its folders, and ablation.json")
    ablate.add_argument("--families", nargs="+", default=["eagle", "medusa"], metavar="F", help="default: eagle medusa")
    ablate.add_argument("--layers", type=int, nargs="+", default=[1, 2, 3], metavar="K", help="default: 1 2 3")
    ablate.add_argument("--adversaries", type=float, nargs="+", default=[0.0, 0.1], metavar="LAMBDA", help="default: 0 0.1")
    _add_recipe(ablate, ABLATION_OPTIONS)
    ablate.add_argument("--prompts", type=Path, nargs="+", required=True, help="as for 'evaluate'")
    ablate.add_argument("--limit", type=count, help="only the first N prompts of each file")
    add_settings(ablate)
    ablate.set_defaults(function=_ablate)

    arguments = parser.parse_args(argv)
    if getattr(arguments, "max_length", 3) < 3:
        parser.error("--max-length is at least 3")
    return run_command(lambda: arguments.function(arguments))
