"""Checks this copy as a Hugging Face Space would meet it: `python -m tests.check_space [--zero-gpu] [--no-network]`.

What can be seen without the hub: the card, imports from the root, file sizes, that the requirements resolve, and that the
app starts and answers with a Space's environment. `--zero-gpu` also runs the package `spaces` (pip install spaces), with
its scheduler and its hardware played here: weights put on "cuda" before the page opens, a forked process for each run.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlparse

import httpx
import yaml
from gradio_client import Client
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
LARGEST = 10_000_000  # bytes; larger files need a storage of their own on the hub
COLOURS = {"red", "yellow", "green", "blue", "indigo", "purple", "pink", "gray"}
PACKAGES = ("app", "decoding", "heads")
SPACE = {
    "SPACE_ID": "someone/draftscope",
    "SPACE_HOST": "someone-draftscope.hf.space",
    "SYSTEM": "spaces",
    "MEMORY": "16Gi",
    "CPU_CORES": "2",
}


def tracked() -> list[Path]:
    """The files that would be pushed."""
    told = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    return [ROOT / name for name in told.split("\0") if name and not name.startswith("tests/")]


def check_card() -> str:
    """The front matter of README.md has what Spaces read, and fits the requirements."""
    card = yaml.safe_load((ROOT / "README.md").read_text(encoding="utf-8").split("---\n")[1])
    assert card["sdk"] == "gradio" and (ROOT / card["app_file"]).is_file(), "sdk or app_file"
    assert {card["colorFrom"], card["colorTo"]} <= COLOURS, "colours"
    assert len(card["short_description"]) <= 60, "short_description is over 60 characters"
    lines = [line.split("#")[0].strip() for line in (ROOT / "requirements.txt").read_text().splitlines()]
    wanted = {one.name: one for one in map(Requirement, filter(None, lines))}
    assert card["sdk_version"] in wanted["gradio"].specifier, f"gradio {card['sdk_version']} is not in {wanted['gradio'].specifier}"
    return f"gradio {card['sdk_version']}, Python {card['python_version']}"


def check_files() -> str:
    """No file is larger than what the hub keeps in git."""
    sizes = {path: path.stat().st_size for path in tracked()}
    large = [f"{path.relative_to(ROOT)} ({size / 1e6:.1f} MB)" for path, size in sizes.items() if size > LARGEST]
    assert not large, f"over {LARGEST / 1e6:.0f} MB: {', '.join(large)}"
    return f"{len(sizes)} files, {sum(sizes.values()) / 1e6:.1f} MB, the largest {max(sizes.values()) / 1e6:.1f} MB"


def check_imports() -> str:
    """Every module that app.py needs lies under the root or in the requirements: a copy without tests imports from a bare root."""
    with tempfile.TemporaryDirectory() as folder:
        for path in tracked():
            copy = Path(folder) / path.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.symlink_to(path)
        names = [
            ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            for path in tracked()
            if path.suffix == ".py" and path.relative_to(ROOT).parts[0] in PACKAGES and path.name != "__main__.py"
        ]
        script = f"import sys; sys.path.insert(0, {folder!r}); [__import__(name) for name in {names!r}]"
        done = subprocess.run([sys.executable, "-I", "-c", script], cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr.strip().splitlines()[-1]
    return f"{len(names)} modules"


def check_requirements() -> str:
    """pip finds releases that fit together."""
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", "--dry-run", "--ignore-installed", "-q"]
    command += ["--report", "-", "-r", str(ROOT / "requirements.txt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr.strip().splitlines()[-1]
    found = {item["metadata"]["name"]: item["metadata"]["version"] for item in json.loads(done.stdout)["install"]}
    return f"{len(found)} packages, gradio {found['gradio']}, torch {found['torch']}, transformers {found['transformers']}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def started(command: list[str], environment: dict[str, str]) -> Iterator[str]:
    """The app in a process of its own, until it answers; its address."""
    port = free_port()
    environment = {**os.environ, **SPACE, **environment, "GRADIO_SERVER_NAME": "127.0.0.1", "GRADIO_SERVER_PORT": str(port)}
    with tempfile.TemporaryFile("w+") as said:
        app = subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment, stdout=said, stderr=subprocess.STDOUT)
        try:
            for _ in range(600):
                if app.poll() is not None:
                    said.seek(0)
                    raise AssertionError(f"the app ended: {said.read().strip().splitlines()[-1]}")
                try:
                    if httpx.get(f"http://127.0.0.1:{port}/gradio_api/info", timeout=10).status_code == 200:
                        break
                except httpx.TransportError:
                    time.sleep(0.5)  # between two looks; what ends the wait is the answer
            yield f"http://127.0.0.1:{port}"
        finally:
            app.terminate()
            app.wait(60)


def compared(address: str, **asked: object) -> list[dict]:
    """The run records of a comparison."""
    client = Client(address, verbose=False)
    request = {"prompt": "Name three rivers.", "methods": ["autoregressive", "hass"], "max_new_tokens": 8, **asked}
    return list(client.submit(**request, api_name="/compare"))[-1]["runs"]


def check_start() -> str:
    """The app starts with a CPU Space's environment, serves one target, and runs a comparison."""
    with started(["app.py"], {"ACCELERATOR": "none"}) as address:
        offered = [entry["name"] for entry in Client(address, verbose=False).predict(api_name="/targets") if entry["available"]]
        assert offered == ["embedded"], f"a Space offers {offered}"
        runs = compared(address)
    assert [run["finish_reason"] for run in runs] == ["length", "length"], "a run did not end"
    return f"{runs[0]['environment']['device']}, {len(runs)} lanes of {len(runs[0]['output_ids'])} tokens"


class Scheduler(BaseHTTPRequestHandler):
    """What ZeroGPU's own scheduler answers; `calls` keeps what it was asked."""

    calls: list[tuple[str, dict[str, list[str]]]] = []

    def do_POST(self) -> None:
        asked = urlparse(self.path)
        self.calls.append((asked.path, parse_qs(asked.query)))
        lent = {"idle": False, "nvidiaIndex": 0, "nvidiaUUID": "GPU-0", "allowToken": "token"}
        body = json.dumps(lent if asked.path == "/schedule" else {}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


def check_zero_gpu() -> str:
    """`spaces` takes the weights at the start, lends a GPU for a computed time, and plain data comes back from its process."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Scheduler) as scheduler:
        threading.Thread(target=scheduler.serve_forever, daemon=True).start()
        environment = {
            "SPACES_ZERO_GPU": "true",
            "SPACES_ZERO_DEVICE_API_URL": f"http://127.0.0.1:{scheduler.server_port}",
            "ACCELERATOR": "zero-a10g",
            "OMP_NUM_THREADS": "1",  # a process that is forked after torch has used several threads can't use them
        }
        with started(["-m", "tests.space.standin"], environment) as address:
            runs = compared(address)
        scheduler.shutdown()
    paths = [path for path, _ in Scheduler.calls]
    assert paths[0] == "/startup-report" and paths[1:] == ["/schedule", "/allow", "/release"], f"the scheduler was asked {paths}"
    lent = int(Scheduler.calls[1][1]["durationSeconds"][0])
    assert len(runs) == 2 and runs[0]["output_ids"], "no runs came back"
    return f"a GPU was asked for {lent} s, {len(runs)} lanes came back"


CHECKS: dict[str, Callable[[], str]] = {
    "card": check_card, "files": check_files, "imports": check_imports, "requirements": check_requirements, "start": check_start,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.check_space", description="Check this copy as a Hugging Face Space.")
    parser.add_argument("--zero-gpu", action="store_true", help="also start it on the package `spaces` (pip install spaces)")
    parser.add_argument("--no-network", action="store_true", help="leave out whether the requirements resolve")
    options = parser.parse_args()
    checks = {name: check for name, check in CHECKS.items() if name != "requirements" or not options.no_network}
    if options.zero_gpu:
        checks["zero-gpu"] = check_zero_gpu
    failed = 0
    for name, check in checks.items():
        try:
            print(f"{name:14} ok: {check()}", flush=True)
        except Exception as error:  # told, whatever it is; the other checks go on
            failed += 1
            print(f"{name:14} FAILED: {' '.join(str(error).split()) or type(error).__name__}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
