"""Many visitors at once, on loopback and bounded: `python -m tests.load --clients 20 --seconds 180`

Starts the page on a tiny target with words. Each client, in turn and at random: runs a comparison by the API and takes it to its end,
leaves it in the middle, cancels it, opens the document, asks for files it may not have, asks for something wrong. Every completed
run must be token for token what the same request gives alone; every error must be a clear message; at the end nothing is queued, and
the memory of the server is back to within 100 MB of what it was after its first runs.
"""

import argparse
import gc
import random
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
from gradio_client import Client
from gradio_client.exceptions import AppError

from app.comparison import Comparison, Request
from decoding import Settings
from tests.app.conftest import Server, record_tiny, serve, tiny_models

PROMPTS = (" the man said that he", " you are the first", " she will", " new world because", " it was a great day")
PATIENCE = 120  # seconds that a client waits for the end of its run
TRACES = ("Traceback", 'File "', "Error:")


def alone(server: Server, prompt: str, methods: tuple[str, ...], settings: Settings) -> list[list[int]]:
    """Output of each lane when nobody else is there."""
    job = server.device.submit(Comparison(server.models, Request(prompt, methods, server.models.source, settings, "alone")))
    job.ended.wait()
    return [run.output_ids for run in job.work.runs]


class Visitors:
    """Clients and what they met."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server, self.rng = server, random.Random(seed)
        self.counts: Counter = Counter()
        self.wrong: list[str] = []
        heads = server.models.extra_heads
        self.asked = [
            (prompt, ("autoregressive", heads[number % 2]), {"max_new_tokens": 24 + 8 * number, **sampling})
            for number, prompt in enumerate(PROMPTS)
            for sampling in ({}, {"temperature": 0.8, "seed": number})
        ]
        self.expected = [alone(server, prompt, methods, Settings(**values)) for prompt, methods, values in self.asked]

    def visit(self, until: float) -> None:
        """One client, until its time is over."""
        client = Client(self.server.url, verbose=False)
        while time.monotonic() < until:
            act = self.rng.choices((self.run, self.leave, self.cancel, self.look, self.err), (6, 2, 2, 2, 2))[0]
            try:
                act(client)
                self.counts[act.__name__] += 1
            except Exception as error:
                self.wrong.append(f"{act.__name__}: {type(error).__name__}: {error}"[:300])

    def _submit(self, client: Client) -> tuple[int, Any]:
        number = self.rng.randrange(len(self.asked))
        prompt, methods, values = self.asked[number]
        return number, client.submit(prompt=prompt, methods=list(methods), **values, api_name="/compare")

    def run(self, client: Client) -> None:
        number, job = self._submit(client)
        try:
            job.result(timeout=PATIENCE)
            last = job.outputs()[-1]
        except AppError as error:
            self._clear(str(error), "no more are taken")
            self.counts["told that the queue is full"] += 1
            return
        assert last["type"] == "runs", f"the last item is {str(last)[:80]}"
        assert [run["output_ids"] for run in last["runs"]] == self.expected[number], "another output than alone"

    def leave(self, client: Client) -> None:
        """A second client of the same kind that goes without a word."""
        gone = httpx.Client(base_url=self.server.url, timeout=30)
        prompt, methods, values = self.asked[0]
        body = {"data": [prompt, list(methods), self.server.models.source, values["max_new_tokens"], 0, 1, 0, 0, 0, 0, 0]}
        event = gone.post("gradio_api/call/compare", json=body).json()["event_id"]
        with gone.stream("GET", f"gradio_api/call/compare/{event}") as stream:
            next(stream.iter_lines(), None)
        gone.close()

    def cancel(self, client: Client) -> None:
        _, job = self._submit(Client(self.server.url, verbose=False))  # a visit of its own: it is not used again
        time.sleep(self.rng.random() * 0.5)
        job.cancel()

    def look(self, client: Client) -> None:
        page = httpx.get(self.server.url, timeout=60)
        assert page.status_code == 200 and "Draftscope" in page.text
        for path in ("gradio_api/file=app.py", "gradio_api/file=/etc/passwd", "gradio_api/file=../requirements.txt"):
            assert httpx.get(self.server.url + path, timeout=60).status_code in (403, 404), path
        assert httpx.get(self.server.url + "health", timeout=60).json()["status"] == "ok"

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


def load(server: Server, clients: int, seconds: float, seed: int = 0) -> tuple[Counter, list[str], float]:
    """Counts, what went wrong, megabytes grown."""
    visitors = Visitors(server, seed)
    visitors.visit(time.monotonic() + min(10.0, seconds / 4))  # memory is compared with a server that has served
    gc.collect()
    before = psutil.Process().memory_info().rss

    with ThreadPoolExecutor(clients) as pool:
        until = time.monotonic() + seconds
        list(pool.map(visitors.visit, [until] * clients))
    deadline = time.monotonic() + 60
    while server.device.requests and time.monotonic() < deadline:
        time.sleep(0.2)
    if server.device.requests:
        visitors.wrong.append(f"{server.device.requests} requests are still there a minute after the last visitor left")
    gc.collect()
    return visitors.counts, visitors.wrong, (psutil.Process().memory_info().rss - before) / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=180)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="draftscope-load-"))
    models = tiny_models(folder)
    for server in serve(models, record_tiny(models, folder / "runs")):
        counts, wrong, grown = load(server, options.clients, options.seconds)
    print(f"{options.clients} clients, {options.seconds:g} s: {dict(counts)}; memory {grown:+.0f} MB; {len(wrong)} things wrong")
    print("\n".join(f"{times} x {what}" for what, times in Counter(wrong).most_common(20)))
    return int(bool(wrong) or grown > 100)


if __name__ == "__main__":
    sys.exit(main())
