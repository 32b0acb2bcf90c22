"""A kept server that goes away during a run, and comes back: one line each, and nothing of Prefect's own."""

import contextlib
import contextvars
import logging
from urllib.parse import urlsplit

import pytest
from httpx import ConnectError
from prefect.settings import PREFECT_API_URL, temporary_settings
from websockets.exceptions import InvalidHandshake

from flows.server import watched
from flows.server.watched import is_not_about_an_unreachable_server, watching_server
from tasks.progress import listen
from tests.flows.server.answers import Quiet, served
from tests.processes import ProgressLog, wait_for


class Healthy(Quiet):
    def do_GET(self) -> None:
        self.answer(200 if self.path == "/api/health" else 404, b"true")


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
            with served(Healthy) as url:
                stack.enter_context(temporary_settings({PREFECT_API_URL: url.replace("//", "//me:secret@")}))
                stack.enter_context(watching_server())
                asks(True, 2)
                assert heard.lines == []
            asks(False, 4)
            assert len(heard.lines) == 1
            with served(Healthy, urlsplit(url).port or 0):
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
