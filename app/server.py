"""What stands around the page: its address, headers that keep foreign scripts out, a health endpoint, an orderly end."""

import os
import re
import secrets
import signal
import sys
import threading
import time
from typing import Any

import gradio as gr
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.device import Device
from app.log import event, start
from app.models import Models
from app.operator import Operator
from app.theme import page_head, theme

# Gradio compiles the templates of its HTML parts (unsafe-eval); everything else that is not the page's own is refused.
# A Space is shown in a frame of huggingface.co.
PAGE_POLICY = (
    "default-src 'self'; script-src 'self' 'nonce-{nonce}' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; worker-src 'self' blob:; object-src 'none'; "
    "base-uri 'self'; form-action 'self'; frame-ancestors 'self' https://huggingface.co https://*.hf.space"
)
SESSIONS = 256  # visits that Gradio remembers, the newest; each takes about 0.2 MB, and of API calls none is ever told to have ended
QUEUED = 256  # events of all visitors that Gradio's own queue takes
LAST_WORD_SECONDS = 0.5  # for the last updates to reach the pages that follow a run
FILE_POLICY = "default-src 'none'; sandbox"  # what visitors upload is data, also where it calls itself a page
SCRIPT, HEAD = re.compile(rb"<script(?=[\s>])"), re.compile(rb"</head>")


class Guard:
    """Adds the policy and other headers to every answer, and the page's own style and script to the head of its document:
    there they run before Gradio's (which are modules, and deferred), and are known by their nonce."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        nonce, start, body = secrets.token_urlsafe(16), None, b""

        async def answer(message: Message) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start":
                headers = dict(message["headers"])
                document = headers.get(b"content-type", b"").startswith(b"text/html") and "/file=" not in scope["path"]
                policy = PAGE_POLICY.format(nonce=nonce) if document else FILE_POLICY
                headers |= {
                    b"content-security-policy": policy.encode(),
                    b"x-content-type-options": b"nosniff",
                    b"referrer-policy": b"same-origin",
                }
                message["headers"] = list(headers.items())
                if not document:
                    await send(message)
                else:
                    start = message
            elif start is None:
                await send(message)
            else:
                body += message.get("body", b"")
                if not message.get("more_body"):
                    body = HEAD.sub(lambda _: page_head().encode() + b"</head>", body, count=1)
                    body = SCRIPT.sub(f'<script nonce="{nonce}"'.encode(), body)
                    start["headers"] = [
                        *((k, v) for k, v in start["headers"] if k != b"content-length"),
                        (b"content-length", b"%d" % len(body)),
                    ]
                    await send(start)
                    await send({"type": "http.response.body", "body": body})

        await self.app(scope, receive, answer)


def wrong_call(request: Request, error: Exception) -> JSONResponse:
    """An HTTP call with an unknown or a missing argument, or of no endpoint: Gradio lets these errors through.

    Raises:
        Exception: the error itself, where it is another one.
    """
    place, _, name = request.url.path.partition("/gradio_api/call/v2/")
    if place or not name:
        raise error
    if isinstance(error, KeyError):
        return JSONResponse({"error": "no such endpoint: there are /compare, /methods and /targets"}, status_code=404)
    return JSONResponse({"error": str(error)}, status_code=422)


def launch_options(models: Models, device: Device, operator: Operator) -> dict[str, Any]:
    """What `demo.launch` is given, apart from host and port."""
    begun = time.monotonic()

    def health(_: Request) -> JSONResponse:
        told = {
            "status": "ending" if device.closed else "ok",
            "target": models.source,
            "loaded": models.ready(models.source),
            "requests": device.requests,
            "places": device.places,
            "seconds": round(time.monotonic() - begun),
        }
        return JSONResponse(told, status_code=503 if device.closed else 200)

    return {
        "theme": theme(),
        "footer_links": ["api", "gradio", "settings"],
        "ssr_mode": False,  # the page is drawn by its own script; a second server would answer without the headers
        "state_session_capacity": SESSIONS,
        "max_file_size": operator.max_upload_mb << 20,
        "app_kwargs": {
            "middleware": [Middleware(Guard)],
            "routes": [Route("/health", health)],
            "exception_handlers": {TypeError: wrong_call, KeyError: wrong_call},
        },
    }


def serve(demo: gr.Blocks, device: Device, **options: Any) -> None:
    """Launch the page and stay until SIGTERM or Ctrl-C. Then what runs is stopped within a step, kept and told to those who
    follow it, before the server goes."""
    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    start()
    try:
        demo.queue(max_size=QUEUED).launch(prevent_thread_lock=True, **options)
    except OSError as error:  # Gradio names its own settings, which are not how this page is started
        device.close()
        wanted = options.get("server_port")
        what = f"port {wanted} is taken" if wanted else "no port from 7860 on is free"
        print(
            f"app.py: {what}, or can't be opened here: choose another with --port ({str(error).splitlines()[0].split('. ')[0]})",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    event("begin", address=demo.local_url)
    while not ending.wait(3600):
        pass
    event("end", requests=device.requests)
    device.close()
    time.sleep(LAST_WORD_SECONDS)
    demo.close(verbose=False)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # an ordinary exit waits for the hub client's pool, whose fetch nobody wants any more: hours on a slow network
