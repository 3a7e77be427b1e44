"""A stand-in for the hub, on loopback, which can fail in several ways."""

import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.app.tiny import GOLDEN

COMMIT = "a" * 40


class StandIn(ThreadingHTTPServer):
    """A hub with one repository, org/tiny: the tiny target, and files that nobody wants."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {path.name: path.read_bytes() for path in (GOLDEN / "tiny_base").iterdir()}
        self.files |= {"README.md": b"# tiny", ".gitattributes": b"x", "original/consolidated.00.pth": b"x"}
        self.how = "well"  # well | silent | slow | cut
        self.begun = threading.Event()  # some bytes of the weights are out
        self.closed = threading.Event()
        self.asked: list[str] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def server_close(self) -> None:
        self.closed.set()
        super().server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(path)
        if self.server.how == "silent":
            self.server.closed.wait(60)
        elif not path.removeprefix("/api/models").startswith("/org/tiny"):
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif "/resolve/" in path:
            self._file(path.partition(f"/resolve/{COMMIT}/")[2])
        elif "/tree/" in path:
            rows = [{"type": "file", "path": name, "size": len(data), "oid": _id(data)} for name, data in self.server.files.items()]
            self._send(200, json.dumps(rows).encode())
        else:
            told = {"id": "org/tiny", "sha": COMMIT, "siblings": [{"rfilename": name} for name in self.server.files]}
            self._send(200, json.dumps(told).encode())

    def _file(self, name: str) -> None:
        data = self.server.files[name]
        headers = {"ETag": f'"{_id(data)}"', "X-Repo-Commit": COMMIT}
        if self.command == "HEAD" or not name.endswith(".safetensors") or self.server.how == "well":
            self._send(200, data, headers)
            return
        self.send_response(200)
        for key, value in (headers | {"Content-Length": str(len(data))}).items():
            self.send_header(key, value)
        self.end_headers()
        self.wfile.write(data[: len(data) // 2])
        self.wfile.flush()
        self.server.begun.set()
        if self.server.how == "slow":
            for place in range(len(data) // 2, len(data)):
                if self.server.closed.wait(0.05):
                    return  # a fetch of the client's that goes on would keep the tests' process from ending
                self.wfile.write(data[place : place + 1])

    def _send(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for key, value in ({"Content-Length": str(len(data))} | (headers or {})).items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Not on the tests' output."""


def _id(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
