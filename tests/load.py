"""Many visitors at once, on loopback and bounded: `python -m tests.load --clients 20 --seconds 180`

Starts `python app.py` on a tiny target with words, in a process of its own. Each client, in turn and at random: runs a comparison by the
API and takes it to its end, leaves it in the middle, cancels it, opens the document, asks for files it may not have, asks for something
wrong. Every completed run must be token for token what the same request gives alone; every error must be a clear message; at the end
nothing is queued, and the memory of the server is back to within 100 MB of what it was after its first runs.
"""

import argparse
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
from gradio_client import Client
from gradio_client.exceptions import AppError

from tests.app.conftest import tiny_models

ROOT = Path(__file__).resolve().parent.parent
PROMPTS = (" the man said that he", " you are the first", " she will", " new world because", " it was a great day")
PATIENCE = 120  # seconds that a client waits for the end of its run
IDLE = 10  # seconds that the server is left alone before its memory is read
TRACES = ("Traceback", 'File "', "Error:")


class Visitors:
    """Clients and what they met."""

    def __init__(self, url: str, seed: int = 0) -> None:
        self.url, self.rng = url, random.Random(seed)
        self.counts: Counter = Counter()
        self.wrong: list[str] = []
        lone = Client(url, verbose=False)
        plain, *heads = [entry["name"] for entry in lone.predict(api_name="/methods")]
        self.asked = [
            {"prompt": prompt, "methods": [plain, heads[number % 2]], "max_new_tokens": 24 + 8 * number, **sampling}
            for number, prompt in enumerate(PROMPTS)
            for sampling in ({}, {"temperature": 0.8, "seed": number})
        ]
        self.expected = [_outputs(lone.submit(**asked, api_name="/compare")) for asked in self.asked]

    def together(self, clients: int, seconds: float) -> None:
        """So many clients for so long; afterwards the server must have nothing left to do."""
        until = time.monotonic() + seconds
        with ThreadPoolExecutor(clients) as pool:
            list(pool.map(self._visit, [until] * clients))
        deadline = time.monotonic() + 60
        while left := self._health()["requests"]:
            if time.monotonic() > deadline:
                self.wrong.append(f"{left} requests are still there a minute after the last visitor left")
                return
            time.sleep(0.2)

    def _visit(self, until: float) -> None:
        client = Client(self.url, verbose=False)
        while time.monotonic() < until:
            act = self.rng.choices((self.run, self.leave, self.cancel, self.look, self.err), (6, 2, 2, 2, 2))[0]
            try:
                act(client)
                self.counts[act.__name__] += 1
            except Exception as error:
                self.wrong.append(f"{act.__name__}: {type(error).__name__}: {error}"[:300])

    def _health(self) -> dict[str, Any]:
        return httpx.get(self.url + "health", timeout=60).json()

    def run(self, client: Client) -> None:
        number = self.rng.randrange(len(self.asked))
        try:
            outputs = _outputs(client.submit(**self.asked[number], api_name="/compare"))
        except AppError as error:
            self._clear(str(error), "no more are taken")
            self.counts["told that the queue is full"] += 1
            return
        assert outputs == self.expected[number], "another output than alone"

    def leave(self, client: Client) -> None:
        """A second client of the same kind that goes without a word."""
        with httpx.Client(base_url=self.url, timeout=60) as gone:
            event = gone.post("gradio_api/call/v2/compare", json=self.asked[0]).json()["event_id"]
            with gone.stream("GET", f"gradio_api/call/compare/{event}") as stream:
                lines = stream.iter_lines()
                for _ in range(self.rng.randrange(1, 12)):
                    next(lines, None)

    def cancel(self, client: Client) -> None:
        job = Client(self.url, verbose=False).submit(**self.rng.choice(self.asked), api_name="/compare")  # a visit of its own
        time.sleep(self.rng.random() * 0.5)
        job.cancel()

    def look(self, client: Client) -> None:
        page = httpx.get(self.url, timeout=60)
        assert page.status_code == 200 and "Draftscope" in page.text
        for path in ("gradio_api/file=app.py", "gradio_api/file=/etc/passwd", "gradio_api/file=../requirements.txt"):
            assert httpx.get(self.url + path, timeout=60).status_code in (403, 404), path
        assert self._health()["status"] == "ok"

    def err(self, client: Client) -> None:
        bad = self.rng.choice(({"prompt": ""}, {"methods": ["none"]}, {"temperature": -1}, {"max_new_tokens": 10**6}, {"target": "x/y"}))
        try:
            client.predict(**{"prompt": " he", "methods": ["autoregressive"], **bad}, api_name="/compare")
        except AppError as error:
            self._clear(str(error), "")
        else:
            raise AssertionError(f"{bad} was taken")

    def _clear(self, message: str, words: str) -> None:
        assert words in message and len(message) < 600 and not any(trace in message for trace in TRACES), message[:200]


def _outputs(job: Any) -> list[list[int]]:
    """Output of each lane of a run that was taken to its end."""
    job.result(timeout=PATIENCE)
    last = job.outputs()[-1]
    assert last["type"] == "runs", f"the last item is {str(last)[:80]}"
    return [run["output_ids"] for run in last["runs"]]


@contextmanager
def app(folder: Path, *arguments: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """`python app.py` on the tiny target, on loopback: its address and its process. Its log is `folder`/log."""
    models = tiny_models(folder)
    heads = [part for source in models.extra_heads for part in ("--head", source)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "app.py", "--target", models.source, *heads, "--device", "cpu", "--dtype", "float32", "--port", str(port)]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([*command, *arguments], cwd=ROOT, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
    url = f"http://127.0.0.1:{port}/"
    try:
        deadline = time.monotonic() + 180
        while True:
            assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
            try:
                httpx.get(url + "health", timeout=10)
                break
            except httpx.TransportError:
                time.sleep(0.2)
        yield url, process
    finally:
        process.terminate()
        process.wait(60)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=180)
    options = parser.parse_args()
    with app(Path(tempfile.mkdtemp(prefix="draftscope-load-"))) as (url, process):
        visitors = Visitors(url)
        visitors.together(1, min(10.0, options.seconds / 4))
        before = _memory(process)
        visitors.together(options.clients, options.seconds)
        grown = _memory(process) - before
    print(f"{options.clients} clients, {options.seconds:g} s: {dict(visitors.counts)}; {len(visitors.wrong)} things wrong")
    print(f"memory of the server: {before:.0f} MB after its first runs, {grown:+.0f} MB at the end")
    print("\n".join(f"{times} x {what}" for what, times in Counter(visitors.wrong).most_common(20)))
    return int(bool(visitors.wrong) or grown > 100)


def _memory(process: subprocess.Popen) -> float:
    """Resident megabytes of a server that has nothing to do."""
    time.sleep(IDLE)
    return psutil.Process(process.pid).memory_info().rss / 2**20


if __name__ == "__main__":
    sys.exit(main())
