"""A service on the loopback that answers what a test scripts: a scorer, a judge, the Hub, makers of weights."""

import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import huggingface_hub
import pytest
import transformers.utils.hub

from grpo_core.rewards.weights import Published

QUICK: dict[str, Any] = {"timeout_s": 5.0, "attempts": 2, "backoff_s": 0.001}


@dataclass
class Asked:
    """One request as received."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


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
        self.keeps = False  # whether it keeps a connection open after an answer
        self.connections = 0

    def script(self, *replies: Reply) -> None:
        """Answer with these replies in order, and repeat the last one."""
        left = list(replies)
        self.respond = lambda requested: left.pop(0) if len(left) > 1 else left[0]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    stub: Stub

    def setup(self) -> None:
        super().setup()
        with self.stub.lock:
            self.stub.connections += 1

    def do_GET(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        requested = Asked(self.command, self.path, dict(self.headers), json.loads(body) if body else None)
        with self.stub.lock:
            self.stub.requested.append(requested)
        reply = self.stub.respond(requested)
        self.close_connection = not self.stub.keeps
        if reply.drop:
            self.close_connection = True
            return
        content = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
        closing = {"Connection": "close"} if self.close_connection else {}
        self.send_response(reply.status)
        for name, value in {"Content-Length": str(len(content)), **closing, **reply.headers}.items():
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


COMMIT = "0123456789abcdef0123456789abcdef01234567"
CONTENT = b"weights of the makers"
DIGEST = hashlib.sha256(CONTENT).hexdigest()
NET = Published(
    "the makers", "net-7be5be79.pth", "https://example.org/net", "hf://makers/net/net-7be5be79.pth", "7be5be79"
)


def as_the_hub(requested: Asked, files: Mapping[str, bytes] | None = None) -> Reply:
    """Answer like the Hub for one open repository: one file of any name, or a model of these files."""
    refusals: Mapping[str, tuple[int, str]] = {
        "/closed/net/": (403, "GatedRepo"),
        "/makers/net/resolve/main/no-file": (404, "EntryNotFound"),
    }
    path = requested.path.partition("?")[0]
    for start, (status, code) in refusals.items():
        if path.startswith(start):
            return Reply(b"", status, {"X-Error-Code": code})
    if files is None and not path.startswith("/api/"):
        return _file(CONTENT, drop=path.startswith("/gone/"))
    return _repository("makers/net", files or {}, path.removeprefix("/api/models"))


def as_a_gated_repository(files: Mapping[str, bytes], requested: Asked, *, consent: bool = True) -> Reply:
    """Answer like the Hub for someone/model: its list of files is open to all, the files are not without consent."""
    path = requested.path.partition("?")[0].removeprefix("/api/models")
    if not path.startswith("/someone/model"):
        return Reply(b"", 404, {"X-Error-Code": "RepoNotFound"})
    if not consent and ("/auth-check" in path or "/resolve/" in path):
        return Reply(b"", 403, {"X-Error-Code": "GatedRepo"})
    return _repository("someone/model", files, path, gated="auto")


def _repository(name: str, files: Mapping[str, bytes], path: str, **more: object) -> Reply:
    sizes = {name: len(content) for name, content in files.items()}
    if "/tree/" in path and "additional_chat_templates" not in path:
        return Reply([{"type": "file", "path": name, "size": size, "oid": name} for name, size in sizes.items()])
    if "/tree/" not in path and "/resolve/" not in path:
        siblings = [{"rfilename": name, "size": size} for name, size in sizes.items()]
        return Reply({"id": name, "sha": COMMIT, "siblings": siblings, **more})
    content = files.get(path.partition("/resolve/")[2].partition("/")[2])
    return Reply(b"", 404, {"X-Error-Code": "EntryNotFound"}) if content is None else _file(content)


def _file(content: bytes, *, drop: bool = False) -> Reply:
    digest = hashlib.sha256(content).hexdigest()
    return Reply(content, headers={"ETag": f'"{digest}"', "X-Repo-Commit": COMMIT}, drop=drop)


def reach(stub: Stub, patch: pytest.MonkeyPatch) -> None:
    """Let the Hub's client take the stub for the Hub."""
    patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    patch.setattr(huggingface_hub.constants, "ENDPOINT", stub.url)
    template = stub.url + "/{repo_id}/resolve/{revision}/{filename}"
    patch.setattr(huggingface_hub.constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    # transformers keeps a client of its own, with the address of the first stub.
    patch.setattr(transformers.utils.hub, "_hf_api", None)
    huggingface_hub.close_session()
