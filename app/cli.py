"""Arguments of `python app.py`."""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from app.models import Models
from app.offers import EMBEDDED
from app.operator import Operator, from_environment
from app.zero import ZERO_GPU
from decoding.errors import DraftscopeError
from decoding.space import on_a_space


class _Parser(argparse.ArgumentParser):
    """Reads environment variables first (`DRAFTSCOPE_MAX_NEW_TOKENS` is `--max-new-tokens`): a Space has no command line."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None) -> argparse.Namespace:
        return super().parse_args([*from_environment(self), *(sys.argv[1:] if args is None else args)], namespace)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def parser() -> argparse.ArgumentParser:
    """The arguments, see `python app.py --help`."""
    out = _Parser(prog="app.py", description="Draftscope: watch draft heads guess and the target check them.")
    out.add_argument("--target", default=EMBEDDED, metavar="ID", help="'embedded', a folder, or a hub id (default: embedded)")
    out.add_argument(
        "--head", action="append", default=[], metavar="ID", help="a head beside the shipped ones: a folder or a hub id; may be repeated"
    )
    out.add_argument("--device", default="auto", metavar="D", help="auto, cpu, cuda or cuda:N (default: auto)")
    kinds = "auto, float32, bfloat16, float16, and on an NVIDIA GPU 8bit or 4bit (default: auto)"
    out.add_argument("--dtype", default="auto", metavar="T", help=kinds)
    out.add_argument("--host", default=None, metavar="H", help="address to listen on (default: this machine only)")
    out.add_argument("--port", type=int, default=None, metavar="P", help="port to listen on (default: the first free one from 7860)")
    out.add_argument(
        "--allow-custom-models",
        action="store_true",
        help="let visitors name targets and heads of their own: hub ids (they are downloaded and loaded), and folders of "
        "this machine where it is no Space",
    )
    out.add_argument("--mcp", action="store_true", help="also serve the API's tools to MCP clients, at /gradio_api/mcp/")
    out.add_argument("--allow-local-models", action="store_true", help="on a Space too, let visitors name folders of this machine")
    Operator.add_arguments(out)
    return out


def parse(given: list[str]) -> argparse.Namespace:
    """The parsed arguments."""
    return parser().parse_args(given)


def models_of(arguments: argparse.Namespace) -> Models:
    """The registry for these arguments. What was named is loaded now, so that a mistake ends the program in one line;
    with nothing named nothing is loaded and the page opens at once. On ZeroGPU everything is: it moves along with each run.

    Raises:
        SystemExit: 2 with one line where a name or value is wrong.
    """
    models = Models(arguments.target, arguments.device, arguments.dtype, tuple(arguments.head), arguments.allow_custom_models)
    models.allow_local = arguments.allow_local_models or not on_a_space()
    named = ZERO_GPU or arguments.target != EMBEDDED or arguments.head or arguments.device != "auto" or arguments.dtype != "auto"
    if arguments.port is not None and not 1 <= arguments.port <= 65535:
        parser().error(f"port {arguments.port} is not between 1 and 65535")
    if named:
        try:
            target = models.target(arguments.target)
            for source in [offer.source for offer in models.own_offers()] if ZERO_GPU else arguments.head:
                models.head(source, target)
        except DraftscopeError as error:
            print(f"app.py: {error}", file=sys.stderr)
            raise SystemExit(2) from None
    return models
