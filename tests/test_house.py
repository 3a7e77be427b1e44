"""What the repository promises around the code: README commands that are true, a Space card, a browser that is not forgotten."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import app.cli
import decoding.cli
import heads.cli
from app import results
from tests import conftest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
CARD = yaml.safe_load(README.split("---\n")[1])
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
COMMANDS = [line for language, block in BLOCKS if language == "bash" for line in block.splitlines() if line]
COLOURS = {"red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray"}


def requirements(name: str) -> dict[str, Requirement]:
    lines = (line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    return {one.name: one for one in (Requirement(line) for line in lines if line and not line.startswith("-r"))}


def test_the_readme_opens_with_the_two_commands_that_set_everything_up() -> None:
    assert COMMANDS[:2] == [
        "pip install -r requirements.txt && python app.py",
        "pip install -r requirements-dev.txt && python -m pytest",
    ]
    assert len(README.split("---\n", 2)[2].split("```")[0].splitlines()) < 12  # nothing to read before the first


def test_nothing_else_lies_at_the_top() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a checkout: what is tracked can't be told")
    packages = {"app", "assets", "decoding", "docs", "heads", "tests"}
    files = {".gitignore", "LICENSE", "README.md", "app.py", "pyproject.toml", "requirements-dev.txt", "requirements.txt"}
    assert {line.split("/")[0] for line in listed.stdout.splitlines()} == packages | files | {".ci"}


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("python ")])
def test_every_command_of_the_readme_is_understood(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *arguments = shlex.split(line)[1:]
    if program == "app.py":
        app.cli.parser().parse_args(arguments)
        return
    package = {"decoding": decoding.cli, "heads": heads.cli}[arguments.pop(0)]
    understood = []
    monkeypatch.setattr(package, "run_command", lambda command: understood.append(command) or 0)
    assert package.main(arguments) == 0 and len(understood) == 1


def test_the_readme_shows_the_shipped_results() -> None:
    begin, end = results.MARKS
    shown = results.tables()
    assert shown and README.split(begin)[1].split(end)[0].strip() == "\n\n".join(table.markdown() for table in shown)


def test_the_oldest_python_that_is_promised_has_all_that_is_used() -> None:
    oldest = re.search(r'requires-python = ">=([\d.]+)', (ROOT / "pyproject.toml").read_text()).group(1)
    assert f"Python {oldest} to " in README
    parts = [str(ROOT / name) for name in ("app.py", "app", "decoding", "heads", "tests")]
    asked = [sys.executable, "-c", "import vermin; vermin.main()", f"-t={oldest}-", "--violations", "--no-tips", *parts]
    found = subprocess.run(asked, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


def test_the_python_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    example = next(block for language, block in BLOCKS if language == "python")
    monkeypatch.chdir(tmp_path)
    exec(compile(example, "README.md", "exec"), {})
    assert (tmp_path / "run.json").stat().st_size > 1000
    assert len(capsys.readouterr().out.splitlines()) > 2


def test_the_space_card_is_one_that_spaces_read() -> None:
    assert CARD["sdk"] == "gradio" and (ROOT / CARD["app_file"]).is_file()
    assert CARD["sdk_version"] in requirements("requirements.txt")["gradio"].specifier
    project = (ROOT / "pyproject.toml").read_text()
    assert CARD["python_version"] in SpecifierSet(re.search(r'requires-python = "(.*)"', project)[1])
    assert {CARD["colorFrom"], CARD["colorTo"]} <= COLOURS
    assert len(CARD["short_description"]) <= 60
    assert CARD["license"] == "apache-2.0" and "Apache License" in (ROOT / "LICENSE").read_text()


def test_torch_can_be_had_without_a_gpu_build() -> None:
    """2.13 is the newest release that has a CPU build on the package index; the floor is the first with Muon, which training uses;
    Spaces' GPUs run 2.8.0 to 2.11.0."""
    torch = requirements("requirements.txt")["torch"].specifier
    assert "2.9.0" in torch and "2.8.0" not in torch and "2.11.0" in torch and "2.13.0" in torch and "2.14.0" not in torch


def test_packages_that_the_build_names_are_all_there_are() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    named = set(re.findall(r'"([\w.]+)"', re.search(r"packages = \[(.*?)\]", project)[1]))
    here = {
        str(path.parent.relative_to(ROOT)).replace(os.sep, ".")
        for package in ("app", "decoding", "heads")
        for path in (ROOT / package).rglob("__init__.py")
    }
    assert named == here


def no_programs(monkeypatch: pytest.MonkeyPatch, *there: str) -> None:
    monkeypatch.delenv("CHROMIUM_PATH", raising=False)
    monkeypatch.setattr(conftest, "shutil", SimpleNamespace(which=lambda name: f"/usr/bin/{name}" if name in there else None))


def test_a_missing_browser_is_installed_where_that_is_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    there = ["apt-get"]
    no_programs(monkeypatch, *there)
    commands: list[str] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(" ".join(command))
        if "install" in command:
            no_programs(monkeypatch, "chromium")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(conftest.subprocess, "run", run)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert conftest.find_browser() == "/usr/bin/chromium"
    assert commands == ["apt-get update", "apt-get install -y chromium"]  # the lists first: a new machine has none


def test_without_a_browser_ci_fails_and_others_skip(monkeypatch: pytest.MonkeyPatch, pytestconfig: pytest.Config) -> None:
    no_programs(monkeypatch)
    fixture = conftest.browser_executable.__wrapped__
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="apt-get install chromium"):
        fixture(pytestconfig)
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match="apt-get install chromium"):
        fixture(pytestconfig)


def test_a_browser_that_was_named_wrongly_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CHROMIUM_PATH", "/nowhere/chromium")
    with pytest.raises(LookupError, match="/nowhere/chromium"):
        conftest.find_browser()


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_ci_fails_where_a_part_of_it_fails(tmp_path: Path) -> None:
    """Every step of .ci/run is played by a stand-in; each failing one must be the script's exit code."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    for name in ("requirements.txt", "requirements-dev.txt"):
        (tmp_path / name).write_text("nothing")
    stand_in = tmp_path / "python"
    # makes a "venv" whose python, pip and ruff are the same script; fails in the call that FAIL matches
    stand_in.write_text(
        "#!/usr/bin/env bash\n"
        'call="$(basename "$0") $*"\n'
        'case "$call" in *"$FAIL"*) exit 3;; esac\n'
        'case "$call" in *"-m venv"*) mkdir -p "${@: -1}/bin"; for name in python pip ruff; do cp "$0" "${@: -1}/bin/$name"; done;; esac\n'
        'echo "$call"\n'
    )
    stand_in.chmod(0o755)

    def ci(fail: str) -> subprocess.CompletedProcess[str]:
        fresh = os.environ | {"PYTHON": str(stand_in), "FAIL": fail, "XDG_CACHE_HOME": mkdtemp(dir=tmp_path)}
        return subprocess.run(["bash", ".ci/run"], cwd=tmp_path, env=fresh, capture_output=True, text=True, check=False)

    good = ci("nothing at all")
    assert good.returncode == 0, good.stderr
    steps = ["-m venv", "install", "ruff check", "ruff format --check", "-m pytest"]
    places = [good.stdout.index(step) for step in steps[1:]]
    assert places == sorted(places)
    for step in steps:
        assert ci(step).returncode == 3, step
