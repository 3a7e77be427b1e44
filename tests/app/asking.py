"""One request on the device without a page, for tests of the server."""

import time
from collections.abc import Callable

from app.comparison import Comparison, Request
from app.operator import Operator
from decoding import Settings
from tests.app.conftest import Server

PROMPT = " the man said that he"


def ask(server: Server, operator: Operator | None = None, tokens: int = 24, **values: object) -> Comparison:
    settings = Settings(max_new_tokens=tokens, **values)
    return Comparison(server.models, Request(PROMPT, ("autoregressive",), server.models.source, settings, "test"), operator)


def run(server: Server, work: Comparison) -> Comparison:
    job = server.device.submit(work)
    assert job.ended.wait(60)
    return work


def wait_until(true: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.05)
