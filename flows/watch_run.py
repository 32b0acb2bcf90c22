"""`grpo inspect --watch`: serve the page of a run on this machine, and write it again while the run works."""

import json
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from flows.inspect_run import read_inspection, require_iteration
from grpo_core.errors import InputError
from tasks.reports.run_page import render_run_page
from tasks.runs.layout import EVALUATIONS, POLICIES, iteration_folder
from tasks.runs.lookup import find_run
from tasks.runs.reader import Memory, RunReader
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.run_lock import is_locked

HOST = "127.0.0.1"

SECONDS_BETWEEN, SHARE = 2.0, 0.1
"""Least time between two readings of a run, and the largest share of a processor that reading takes."""

_NUMBER = re.compile(r"[0-9]{0,9}")


def watch_run(name: str, *, root: str, port: int, iteration: int | None, started: Callable[[str], None]) -> None:
    """Serve the page of a run until Ctrl-C.

    Args:
        name: a run under the root, or the path of its folder.
        root: a folder or any fsspec URL.
        port: of this machine; 0 for a free one.
        iteration: the one to show first; None for the last whose samples have rewards, also when there is a later one.
        started: called with the address of the page once it is served.

    Raises:
        InputError: there is no such run or iteration, or the port is taken.
    """
    store = find_run(name, root)
    require_iteration(RunReader(store), iteration)
    try:
        server = _Server(RunWatch(store), port)
    except (OSError, OverflowError) as error:
        raise InputError("--port", port, f"It cannot be served there ({error}). 0 chooses a free port.") from error
    with server:
        started(f"http://{HOST}:{server.server_port}/{f'?iteration={iteration}' if iteration is not None else ''}")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            return


@dataclass(frozen=True)
class _Page:
    """A page as it was written.

    Attributes:
        tag: what the run had when it was read.
        seconds: processor time of reading and writing it.
        written: when that was, on the monotonic clock.
        time: the same for people.
    """

    html: str
    tag: str
    seconds: float
    written: float
    time: str

    @property
    def is_due(self) -> bool:
        """Whether it may be written again."""
        return time.monotonic() - self.written >= max(SECONDS_BETWEEN, self.seconds / SHARE)


class RunWatch:
    """The page of a run, written again when the run has more, but not so often that it slows the run down."""

    def __init__(self, store: ArtifactStore) -> None:
        """Read nothing yet."""
        self._store, self._memory = store, Memory()
        self._pages: dict[int | None, _Page] = {}
        # One reading at a time leaves most of the machine to the run.
        self._lock = threading.Lock()

    def page(self, iteration: int | None = None) -> str:
        """Return the page, written now if it is due.

        Args:
            iteration: the one to show; None for the last whose samples have rewards.

        Raises:
            InputError: the run has no such iteration.
        """
        with self._lock:
            page, tag = self._pages.get(iteration), self._tag()
            if page is None or (page.tag != tag and page.is_due):
                page = self._written(iteration, tag)
                # Of the iterations that were chosen, only the last is kept.
                self._pages = {key: each for key, each in self._pages.items() if key is None}
                self._pages[iteration] = page
            return page.html

    def state(self, iteration: int | None = None) -> dict[str, str]:
        """Return the tag of the page that would be served now, and a few words about the run."""
        page, tag = self._pages.get(iteration), self._tag()
        words = "running" if is_locked(self._store) else "not running"
        if page is None:
            return {"tag": tag, "status": words}
        return {"tag": tag if page.is_due else page.tag, "status": f"{words}, read at {page.time}"}

    def _tag(self) -> str:
        """Describe what the run has by the names in a few folders."""
        reader = RunReader(self._store)
        last = [[each, reader.names(iteration_folder(each))] for each in reader.iterations()[-2:]]
        return json.dumps([last, reader.names(EVALUATIONS), reader.names(POLICIES)[-4:], is_locked(self._store)])

    def _written(self, iteration: int | None, tag: str) -> _Page:
        begun = time.thread_time()
        reader = RunReader(self._store, self._memory if iteration is None else None)
        require_iteration(reader, iteration)
        found = read_inspection(reader, iteration, with_page=True)
        reader.memory.forget_unused()
        html = render_run_page(found.run, found.samples, found.verdict, found.warnings, watched=tag)
        seconds = time.thread_time() - begun
        return _Page(html, tag, seconds, time.monotonic(), f"{datetime.now():%H:%M:%S}")


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, watch: RunWatch, port: int) -> None:
        self.watch = watch
        super().__init__((HOST, port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the error, unless the browser has gone, as it does when a tab is closed."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        """Answer with the page, or with its state as JSON."""
        hosts = {f"{name}:{self.server.server_port}" for name in (HOST, "localhost")}
        address = urlsplit(self.path)
        number = parse_qs(address.query).get("iteration", [""])[0]
        if self.headers.get("Host") not in hosts:
            # A page of another site whose name leads here may not read the run.
            self._answer(HTTPStatus.FORBIDDEN, "text/plain", f"This is not one of {', '.join(sorted(hosts))}.")
        elif address.path not in ("/", "/state") or not _NUMBER.fullmatch(number):
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", "There is nothing here.")
        else:
            self._answer_for(address.path, int(number) if number else None)

    def _answer_for(self, path: str, iteration: int | None) -> None:
        try:
            if path == "/":
                answer = ("text/html", self.server.watch.page(iteration))
            else:
                answer = ("application/json", json.dumps(self.server.watch.state(iteration)))
        except InputError as error:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", str(error))
        except Exception as error:
            # Files can vanish while they are read; the page shows the error, first in few words, and asks again.
            self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", f"{type(error).__name__}: {error}")
        else:
            self._answer(HTTPStatus.OK, *answer)

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        content = text.encode(errors="replace")
        self.send_response(status)
        for name, value in (
            ("Content-Type", f"{kind}; charset=utf-8"),
            ("Content-Length", str(len(content))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("Cross-Origin-Resource-Policy", "same-origin"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Write no line for each request."""
