"""The package `spaces` on a machine without a GPU: what it asks of CUDA is answered here, and the GPU that it lends is the CPU.

`python -m tests.space.standin [arguments of app.py]` starts the app this way. All else is the package's own: it patches
torch, keeps weights that are put on "cuda", schedules over HTTP, forks, pickles what goes in and out.
"""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import torch

APP = Path(__file__).resolve().parent.parent.parent / "app.py"


def not_forked() -> bool:
    """torch.cuda._is_in_bad_fork, as something that can be pickled."""
    return False


def stand_in() -> None:
    """Import `spaces` and take the hardware out of it."""
    torch.version.cuda = "12.8"
    torch._C._cuda_init = lambda: None
    torch.cuda._is_in_bad_fork = not_forked
    from spaces.zero import torch as zero
    from spaces.zero.torch import patching

    def move(callback: Callable[[int], None] | None = None) -> None:
        for fake, original in patching.cuda_aliases.items():
            fake.data = original

    zero.pack = lambda: 0  # to the disk, from which only a GPU can read them back
    zero.init = lambda uuid: None
    zero.size = lambda: 0
    zero.move = move


if __name__ == "__main__":
    from tests.space import standin

    standin.stand_in()
    sys.argv[0] = str(APP)
    runpy.run_path(str(APP), run_name="__main__")
