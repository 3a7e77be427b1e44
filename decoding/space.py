"""Whether this is a Hugging Face Space, and which kind: asked by the page, the loader and the memory figures alike."""

import os


def on_a_space() -> bool:
    """Whether this is a Space, open to strangers."""
    return bool(os.environ.get("SPACE_ID"))


def on_zero_gpu() -> bool:
    """Whether a GPU is borrowed for each run, as the package `spaces` reads it."""
    return os.environ.get("SPACES_ZERO_GPU", "").lower() in ("1", "t", "true")
