"""A service on the loopback that answers what a test scripts: a scorer, a judge, the Hub, makers of weights."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

QUICK: dict[str, Any] = {"timeout_s": 5.0, "attempts": 2, "backoff_s": 0.001}


@dataclass
class Asked:
    """One request as received."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


@dataclass
class Reply:
    """A status, a body (JSON unless bytes) and headers; with `drop` the service hangs up instead."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    drop: bool = False


class Stub:
    """The requests received, and the function that answers them."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.requested: list[Asked] = []
        self.respond: Callable[[Asked], Reply] = lambda requested: Reply(status=404)
        self.lock = threading.Lock()

    def script(self, *replies: Reply) -> None:
        """Answer with these replies in order, and repeat the last one."""
        left = list(replies)
        self.respond = lambda requested: left.pop(0) if len(left) > 1 else left[0]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    stub: Stub

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        requested = Asked(self.command, self.path, dict(self.headers), json.loads(body) if body else None)
        with self.stub.lock:
            self.stub.requested.append(requested)
        reply = self.stub.respond(requested)
        self.close_connection = True
        if reply.drop:
            return
        content = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        self.send_response(reply.status)
        for name, value in {"Content-Length": str(len(content)), "Connection": "close", **reply.headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_HEAD = do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        """Keep the tests' output clean."""


@contextlib.contextmanager
def serve() -> Iterator[Stub]:
    """Run a service until the end of the block."""
    handler = type("Handler", (_Handler,), {})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        handler.stub = Stub(f"http://127.0.0.1:{server.server_address[1]}")  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield handler.stub  # type: ignore[attr-defined]
        finally:
            server.shutdown()
            thread.join()
