"""`python app.py` and `python -m app.record`: help, and mistakes told in one line with exit code 2."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from app.cli import parser

ROOT = Path(__file__).resolve().parent.parent.parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_a_space_names_its_target_in_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSCOPE_TARGET", "org/name")
    assert parser().parse_args([]).target == "org/name"
    assert parser().parse_args(["--target", "other/name"]).target == "other/name"
    monkeypatch.delenv("DRAFTSCOPE_TARGET")
    assert parser().parse_args([]).target == "embedded"


def test_help() -> None:
    told = run("app.py", "--help")
    assert told.returncode == 0
    for option in ("--target", "--head", "--device", "--dtype", "--host", "--port", "--allow-custom-models"):
        assert option in told.stdout


def test_the_readme_names_every_argument() -> None:
    read = (ROOT / "README.md").read_text()
    missing = [name for name in re.findall(r"^  (--[a-z-]+)", parser().format_help(), re.MULTILINE) if name not in read]
    assert not missing


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--port", "none"), "--port"),
        (("--port", "700000"), "port 700000"),
        (("--target", "no-such-folder"), "unknown target 'no-such-folder'"),
        (("--dtype", "int3"), "unknown dtype 'int3'"),
        (("--colour", "red"), "--colour"),
    ],
)
def test_mistakes_end_in_one_line(arguments: tuple[str, ...], words: str) -> None:
    told = run("app.py", *arguments)
    assert told.returncode == 2
    assert words in told.stderr and len(told.stderr.strip().splitlines()) == 1


def test_a_port_that_is_taken_is_told_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        told = run("app.py", "--port", str(taken.getsockname()[1]))
    assert told.returncode == 2 and "Traceback" not in told.stderr
    assert "is taken" in told.stderr.strip().splitlines()[-1] and "choose another with --port" in told.stderr


def test_a_head_that_does_not_fit_is_told() -> None:
    golden = ROOT / "tests" / "golden"
    told = run("app.py", "--target", str(golden / "tiny_base"), "--head", str(golden / "tiny_base"))
    assert told.returncode == 2 and "Traceback" not in told.stderr


def test_recording_with_a_wrong_target_is_told() -> None:
    told = run("-m", "app.record", "--target", "no-such-folder")
    assert told.returncode == 2 and "unknown target" in told.stderr and "Traceback" not in told.stderr
