"""Where a model's files are: a folder, or a repository of the hub, fetched into the hub's own cache (offline: read from it)."""

import errno
from collections.abc import Callable, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tqdm import tqdm

from decoding.errors import DraftscopeError, UsageError, first_line

Progress = Callable[[str, float | None], None]  # (what is being done, share that is done or None); may raise Stopped

ANSWER_SECONDS = 20.0
TEXTS = ("*.json", "*.model", "*.txt", "*.jinja")  # configs, tokenizers, templates
SAFE, PICKLED = ("*.safetensors",), ("*.bin", "*.pt")
IGNORED = (
    "original/*",
    "consolidated*",
    "training_args.bin",
    "optimizer*",
    "scheduler*",
    "onnx/*",
    "*.msgpack",
)  # other forms of the same weights


def silent(text: str, share: float | None) -> None:
    """A Progress that tells nobody."""


def parse_id(source: str) -> tuple[str, str | None] | None:
    """('org/name', revision or None) of 'org/name' or 'org/name@revision'; None where it is no hub id."""
    name, _, revision = source.partition("@")
    parts = name.split("/")
    if len(parts) != 2 or not all(parts) or name.startswith((".", "~")):
        return None
    return name, revision or None


def find(kind: str, source: str, progress: Progress = silent) -> Path:
    """The folder of a target or head: the folder itself, or the hub repository's files, fetched if they are not here yet.

    Args:
        kind: what it is, for messages ("target", "head").
        source: a folder, or a hub id such as 'org/name' or 'org/name@revision'.

    Raises:
        UsageError: no such folder, repository or revision.
        DraftscopeError: the hub refuses or can't be reached, and its cache does not hold the files.
    """
    if Path(source).is_dir():
        return Path(source)
    parsed = parse_id(source)
    if parsed is None or Path(source).exists():
        raise UsageError(f"unknown {kind} {source!r}: give a folder with config.json, or a hub id such as 'org/name'")
    name, revision = parsed
    try:
        told = HfApi().model_info(name, revision=revision, timeout=ANSWER_SECONDS)  # other questions wait for a silent hub for ever
        files = [file.rfilename for file in told.siblings or ()]
        return Path(snapshot_download(name, revision=revision, allow_patterns=_wanted(files), tqdm_class=_bar(name, progress)))
    except GatedRepoError as error:
        told = f"{kind} {name} is gated: accept its licence on its page, then log in on this machine with `hf auth login`"
        raise DraftscopeError(told) from error
    except RepositoryNotFoundError as error:
        raise UsageError(f"unknown {kind} {source!r}: no such folder, and the hub has no such repository (or it is private)") from error
    except RevisionNotFoundError as error:
        raise UsageError(f"{kind} {name} has no revision {revision!r}") from error
    except HFValidationError as error:
        raise UsageError(f"unknown {kind} {source!r}: {first_line(error)}") from error
    except Exception as error:  # whatever kept the hub away (its client's errors have no common base): the cache may have it
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DraftscopeError(f"{kind} {name} can't be fetched: this machine's disk is full") from error
        return _cached(kind, name, revision, error)


def _wanted(files: Sequence[str]) -> list[str]:
    """The files to fetch: texts and one form of the weights, without code in it where there is the choice."""
    kept = [file for file in files if not any(fnmatch(file, pattern) for pattern in IGNORED)]
    safe = any(fnmatch(file, pattern) for file in kept for pattern in SAFE)
    patterns = (*TEXTS, *(SAFE if safe else PICKLED))
    return [file for file in kept if any(fnmatch(file, pattern) for pattern in patterns)]


def _cached(kind: str, name: str, revision: str | None, reason: Exception) -> Path:
    """What an earlier fetch brought, if it brought all that `_wanted` names: a killed one leaves some of the files."""
    for weights in (SAFE, PICKLED):
        with suppress(LocalEntryNotFoundError):
            told = snapshot_download(
                name, revision=revision, allow_patterns=[*TEXTS, *weights], ignore_patterns=[*IGNORED], local_files_only=True
            )
            if any(file for pattern in weights for file in Path(told).rglob(pattern)):
                return Path(told)
    told = f"{kind} {name} can't be had: it is not in the hub's cache here, and the hub can't be reached ({first_line(reason)})"
    raise DraftscopeError(told) from reason


def _bar(name: str, progress: Progress) -> type[tqdm]:
    """A tqdm that also tells `progress` how many bytes are here."""

    class Told(tqdm):
        def update(self, n: float | None = 1) -> bool | None:
            done = super().update(n)
            if self.unit == "B" and self.total:
                progress(f"Fetching {name}: {self.n / 1e9:.2f} of {self.total / 1e9:.2f} GB", min(self.n / self.total, 1.0))
            return done

    return Told
