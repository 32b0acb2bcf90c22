"""A kept server that goes away during a run, and comes back: one line each, and nothing of Prefect's own."""

import contextlib
import contextvars
import logging
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from httpx import ConnectError
from prefect.settings import PREFECT_API_URL, temporary_settings
from websockets.exceptions import InvalidHandshake

from flows.server import watched
from flows.server.watched import is_not_about_an_unreachable_server, watching_server
from tasks.progress import listen
from tests.processes import ProgressLog


class Healthy(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = b"true"
        self.send_response(200 if self.path == "/api/health" else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@contextlib.contextmanager
def serving(port: int = 0) -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", port), Healthy) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield int(server.server_address[1])
        finally:
            server.shutdown()
            thread.join()


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait for something that happens; the limit only ends a test that fails."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.02)


def test_it_is_said_once_when_it_goes_and_once_when_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched, "_SECONDS_BETWEEN_ASKS", 0.02)
    heard, asked = ProgressLog(), list[bool]()
    answers = watched.answers

    def ask(url: str) -> bool:
        asked.append(answers(url))
        return asked[-1]

    monkeypatch.setattr(watched, "answers", ask)

    def asks(answer: bool, times: int) -> None:
        before = asked.count(answer)
        wait_for(lambda: asked.count(answer) >= before + times)

    def watch() -> None:
        listen(heard)
        with contextlib.ExitStack() as stack:
            with serving() as port:
                url = f"http://127.0.0.1:{port}/api"
                stack.enter_context(temporary_settings({PREFECT_API_URL: url.replace("//", "//me:secret@")}))
                stack.enter_context(watching_server())
                asks(True, 2)
                assert heard.lines == []
            asks(False, 4)
            assert len(heard.lines) == 1
            with serving(port):
                asks(True, 3)
        (gone, back) = heard.lines
        assert gone.startswith(f"Prefect's server at {url.replace('//', '//***@')} does not answer")
        assert back == f"Prefect's server at {url.replace('//', '//***@')} answers again"

    contextvars.copy_context().run(watch)


@pytest.mark.parametrize(
    ("error", "level", "is_printed"),
    [
        (ConnectionRefusedError(), logging.ERROR, False),
        (TimeoutError(), logging.ERROR, False),
        (ConnectError("refused"), logging.ERROR, False),
        (InvalidHandshake(), logging.ERROR, False),
        (ConnectionRefusedError(), logging.WARNING, True),
        (ValueError("another fault"), logging.ERROR, True),
    ],
)
def test_what_background_services_print(error: Exception, level: int, is_printed: bool) -> None:
    record = logging.LogRecord("service", level, "file", 1, "Service %r failed to process item", ("events",), None)
    try:
        raise error
    except Exception:
        assert is_not_about_an_unreachable_server(record) == is_printed
