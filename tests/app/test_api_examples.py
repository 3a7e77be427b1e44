"""The API as it is documented: README's examples run as written, MCP clients find the same tools, nothing else is public."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client

from app.models import Models
from app.page import build
from decoding.target import Target
from tests.app.conftest import Server
from tests.test_house import BLOCKS

ADDRESS = "http://127.0.0.1:7860"


@pytest.fixture(scope="module")
def embedded_server(embedded_float32: Target) -> Iterator[str]:
    """What the examples are written for: the embedded target and its shipped heads, with MCP."""
    models = Models("embedded", "cpu", "float32")
    models._target, models._loaded = embedded_float32, "embedded"
    demo = build(models)
    _, url, _ = demo.queue().launch(server_name="127.0.0.1", prevent_thread_lock=True, quiet=True, ssr_mode=False, mcp_server=True)
    yield url.rstrip("/")
    demo.close()


def example(language: str, mark: str) -> str:
    return next(text for name, text in BLOCKS if name == language and mark in text and ADDRESS in text)


def test_the_python_example_streams_a_comparison_from_another_process(embedded_server: str) -> None:
    script = example("python", "gradio_client").replace(ADDRESS, embedded_server)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    first, *updates, last = done.stdout.splitlines()
    assert "'autoregressive'" in first and "'hass'" in first
    assert updates and all(line.startswith("[('autoregressive', ") for line in updates)
    assert last.startswith("{'autoregressive': '") and "'hass': '" in last


def test_the_http_example_runs_as_written(embedded_server: str) -> None:
    script = example("bash", "curl").replace(ADDRESS, embedded_server)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "event: generating" in done.stdout and "event: complete" in done.stdout
    assert '"type": "runs"' in done.stdout and '"schema": "draftscope.run/1"' in done.stdout


def test_mcp_clients_list_and_call_the_tools(embedded_server: str) -> None:
    async def session() -> None:
        async with streamable_http_client(f"{embedded_server}/gradio_api/mcp/") as (read, write, *_), ClientSession(read, write) as client:
            await client.initialize()
            tools = {tool.name: tool for tool in (await client.list_tools()).tools}
            assert set(tools) == {"compare", "methods", "targets"}
            arguments = tools["compare"].inputSchema["properties"]
            assert arguments["methods"]["items"] == {"type": "string"} and "chat template" in arguments["prompt"]["description"]
            assert tools["compare"].description.startswith("Generate with each method")
            named = await client.call_tool("methods", {})
            assert not named.isError and "'hass'" in named.content[0].text
            compared = await client.call_tool(
                "compare", {"prompt": "Name three rivers.", "methods": ["autoregressive", "hass"], "max_new_tokens": 8}
            )
            assert not compared.isError and "draftscope.run/1" in compared.content[0].text
            refused = await client.call_tool("compare", {"prompt": "", "methods": ["autoregressive"]})
            assert refused.isError and "prompt is empty" in refused.content[0].text

    # in a thread of its own: where a browser test ran before, Playwright's event loop runs in this one
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, asyncio.wait_for(session(), 300)).result()


def test_everything_else_is_private(server: Server) -> None:
    told = httpx.get(f"{server.url}gradio_api/info").json()
    assert set(told["named_endpoints"]) == {"/compare", "/methods", "/targets"} and not told["unnamed_endpoints"]
    for name in ("begin", "run_lanes", "open_page", "stop", "draw_finished", "choose_target"):
        assert httpx.post(f"{server.url}gradio_api/call/{name}", json={"data": []}).status_code >= 400
    for entry in told["named_endpoints"].values():
        assert all(parameter["type"] for parameter in entry["parameters"])
