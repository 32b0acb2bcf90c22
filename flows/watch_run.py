"""`grpo inspect --watch`: serve the page of a run on this machine, and write it again while the run works."""

import json
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from flows.http_server import address_of, listening, local_hosts_only, run_server
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

SECONDS_AHEAD = 20.0
"""For so long the share may be used at once, when a person looks at one iteration after another."""

_NUMBER = re.compile(r"[0-9]{0,9}")
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class BusyError(Exception):
    """Reading took its share of the processor; `seconds` are left until there is more of it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        super().__init__(f"Too many pages were asked for; ask again in {seconds:.0f} s.")


def watch_run(name: str, *, root: str, port: int, iteration: int | None, started: Callable[[str], None]) -> None:
    """Serve the page of a run, on a port of this machine, until Ctrl-C.

    Args:
        iteration: the one to show first; None for the last whose samples have rewards, also when there is a later one.
        started: called with the address of the page once it is served.

    Raises:
        InputError: there is no such run or iteration, or the port is taken.
    """
    store = find_run(name, root)
    require_iteration(RunReader(store), iteration)
    try:
        listener = listening(HOST, port)
    except (OSError, OverflowError) as error:
        raise InputError("--port", port, f"It cannot be served there ({error}). 0 chooses a free port.") from error
    with listener:
        started(f"{address_of(listener)}/{f'?iteration={iteration}' if iteration is not None else ''}")
        run_server(create_app(RunWatch(store)), listener)


@dataclass(frozen=True)
class _Page:
    """A page as it was written, from when on it may be written again, and what the run had when it was read."""

    html: str
    tag: str
    due: float
    time: str

    @property
    def is_due(self) -> bool:
        """Whether it may be written again."""
        return time.monotonic() >= self.due


class RunWatch:
    """The page of a run, written again when the run has more, but not so often that it slows the run down."""

    def __init__(self, store: ArtifactStore) -> None:
        """Read nothing yet."""
        self._store, self._memory = store, Memory()
        self._pages: dict[int | None, _Page] = {}
        # One reading at a time leaves most of the machine to the run.
        self._lock = threading.Lock()
        # When the share of the processor that was used is made up for.
        self._even_at = 0.0

    def page(self, iteration: int | None = None) -> str:
        """Return the page, written now if it is due; BusyError when reading has taken its share of the processor."""
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
        now, begun = time.monotonic(), time.thread_time()
        if (ahead := self._even_at - now) > SECONDS_AHEAD:
            raise BusyError(ahead - SECONDS_AHEAD)
        reader = RunReader(self._store, self._memory if iteration is None else None)
        require_iteration(reader, iteration)
        found = read_inspection(reader, iteration, with_page=True)
        reader.memory.forget_unused()
        html = render_run_page(found.run, found.samples, found.verdict, found.warnings, watched=tag)
        made_up = (time.thread_time() - begun) / SHARE
        self._even_at = max(self._even_at, now) + made_up
        return _Page(html, tag, time.monotonic() + max(SECONDS_BETWEEN, made_up), f"{datetime.now():%H:%M:%S}")


def create_app(watch: RunWatch) -> Starlette:
    """Make the application that answers with the page, or with its state as JSON."""

    def page(request: Request) -> Response:
        return _answer(request, lambda iteration: ("text/html", watch.page(iteration)))

    def state(request: Request) -> Response:
        return _answer(request, lambda iteration: ("application/json", json.dumps(watch.state(iteration))))

    return Starlette(routes=[Route("/", page), Route("/state", state)], middleware=[local_hosts_only()])


def _answer(request: Request, read: Callable[[int | None], tuple[str, str]]) -> Response:
    number, status, headers = request.query_params.get("iteration", ""), 200, dict(_HEADERS)
    kind = "text/plain"
    try:
        if not _NUMBER.fullmatch(number):
            raise InputError("iteration", number, "Give its number.")
        kind, text = read(int(number) if number else None)
    except InputError as error:
        status, text = 404, str(error)
    except BusyError as error:
        status, text, headers["Retry-After"] = 503, str(error), f"{error.seconds:.0f}"
    except Exception as error:
        # Files can vanish while they are read; the page shows the error, first in few words, and asks again.
        status, text = 503, f"{type(error).__name__}: {error}"
    return Response(text.encode(errors="replace"), status, headers, f"{kind}; charset=utf-8")
