"""What commands ask of a server before any work, and a server that goes away during a run: each has a message."""

import contextlib
import contextvars
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

import pytest
from httpx import ConnectError
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.settings import (
    PREFECT_API_AUTH_STRING,
    PREFECT_API_KEY,
    PREFECT_API_URL,
    PREFECT_CLOUD_API_URL,
    temporary_settings,
)
from websockets.exceptions import InvalidHandshake

from flows.server import reachable
from flows.server.reachable import (
    is_not_about_an_unreachable_server,
    require_pools,
    require_server,
    server_database,
    watching_server,
    workers_online,
)
from grpo_core.errors import InputError
from tasks.process import environment
from tasks.progress import listen
from tests.processes import ProgressLog, wait_for


@contextmanager
def served(handler: type[BaseHTTPRequestHandler], port: int = 0) -> Iterator[str]:
    """Serve what the handler answers, at an address of an API."""
    with ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/api"
        finally:
            server.shutdown()
            thread.join()


class Quiet(BaseHTTPRequestHandler):
    """Answers, and logs nothing."""

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def answering(status: int, body: bytes) -> AbstractContextManager[str]:
    """Something that gives one answer to everything."""

    class Handler(Quiet):
        def do_GET(self) -> None:
            self.answer(status, body)

    return served(Handler)


def refusal(url: str) -> InputError:
    with temporary_settings({PREFECT_API_URL: url}), pytest.raises(InputError) as refused:
        require_server()
    return refused.value


CLOSED = "http://127.0.0.1:1/api"
ASKS = """
import sys
from flows.run_flow import start_server
from grpo_core.errors import InputError
from tasks.process import environment
try:
    start_server()
except InputError as error:
    assert not {"prefect", "torch", "transformers"} & {*sys.modules}
    print(error.place, error.value)
"""


def test_a_closed_address_is_refused_before_anything_heavy_is_imported() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ASKS], env=environment(PREFECT_API_URL=CLOSED), capture_output=True, text=True
    )
    assert (ended.stdout, ended.stderr) == (f"PREFECT_API_URL {CLOSED}\n", "")


@pytest.mark.parametrize(
    ("url", "variables", "refused"),
    [
        (CLOSED, {}, True),
        ("http://user:secret@127.0.0.1:1/api", {}, True),
        ("https://127.0.0.1:1/api", {"no_proxy": "127.0.0.1", "https_proxy": "http://127.0.0.1:9"}, True),
        # Only the proxy can tell.
        (CLOSED, {"http_proxy": "http://127.0.0.1:9"}, False),
        ("OPEN", {}, False),
        ("", {}, False),
        ("no address", {}, False),
        ("http://127.0.0.1:none/api", {}, False),
        ("ftp://127.0.0.1:1/api", {}, False),
    ],
)
def test_which_addresses_are_closed(
    monkeypatch: pytest.MonkeyPatch, url: str, variables: Mapping[str, str], refused: bool
) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        monkeypatch.setenv("PREFECT_API_URL", url.replace("OPEN", f"http://127.0.0.1:{listening.getsockname()[1]}/api"))
        with pytest.raises(InputError) if refused else nullcontext() as caught:
            reachable.refuse_closed_address()
    if caught is not None:
        assert caught.value.place == "PREFECT_API_URL"
        assert "secret" not in str(caught.value)


def test_a_server_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachable, "_TIMEOUT_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}/api"
        assert refusal(url).value == url


def test_an_address_that_swallows_packets_is_given_up_after_five_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: list[float] = []

    def swallow(_address: object, timeout: float, **_: object) -> socket.socket:
        seconds.append(timeout)
        raise TimeoutError("timed out")

    monkeypatch.setattr(socket, "create_connection", swallow)
    monkeypatch.setattr(time, "sleep", seconds.append)
    assert refusal("http://127.0.0.1:4200/api").place == "PREFECT_API_URL"
    assert 1 < sum(seconds) <= 5


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1/api", "127.0.0.1:4200/api", "ftp://127.0.0.1/api", "http://:x/api"]
)
def test_an_address_without_a_server(url: str) -> None:
    error = refusal(url)
    assert (error.place, error.value) == ("PREFECT_API_URL", url)


@pytest.mark.parametrize(
    ("status", "body"),
    [(404, b"no"), (200, b"<html>"), (200, b'"welcome"'), (200, b'"2.20.1"'), (200, b'"3.0.1"'), (200, b'"4.0.0"')],
)
def test_an_answer_that_is_not_prefects_or_of_a_release_that_does_not_go_together(status: int, body: bytes) -> None:
    with answering(status, body) as url:
        assert refusal(url).value == url
    with answering(200, b'"3.99.0"') as url, temporary_settings({PREFECT_API_URL: url}):
        require_server()


def test_a_server_that_cannot_answer_now_is_asked_once() -> None:
    with answering(503, b"") as url:
        error = refusal(url.replace("://", "://me:secret@"))
    assert error.value == url.replace("://", "://***@")
    assert "secret" not in str(error)


def test_another_password_and_none_are_reported_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT_API_AUTH_STRING", raising=False)
    with answering(401, b"") as url:
        error = refusal(url)
        assert (error.place, error.value) == ("PREFECT_API_AUTH_STRING", "not set")
        monkeypatch.setenv("PREFECT_API_AUTH_STRING", "admin:hidden")
        with temporary_settings({PREFECT_API_AUTH_STRING: "admin:hidden"}):
            error = refusal(url)
    assert error.value == "(not shown)"
    assert "hidden" not in str(error)


def test_without_a_server_pools_are_refused_and_all_else_is_fine() -> None:
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        require_server()
        require_pools([])
        assert server_database() is None
        with pytest.raises(InputError) as refused:
            require_pools([("placement.rollouts.pool", "gpu"), ("placement.update.pool", "gpu2")])
    assert [error.place for error in refused.value.errors] == ["placement.rollouts.pool", "placement.update.pool"]


def cloud(key: str) -> AbstractContextManager[str]:
    """Answers as Prefect Cloud does: to an API key only, and without `/admin` routes."""

    class Handler(Quiet):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            known = self.headers["Authorization"] == f"Bearer {key}"
            self.answer((200 if self.path.endswith("/work_pools/filter") else 404) if known else 401, b"[]")

        def do_GET(self) -> None:
            self.answer(404, b"")

    return served(Handler)


def test_prefect_cloud_is_asked_with_the_key_and_never_for_admin_routes() -> None:
    with cloud("pnu_right") as url:
        workspace = f"{url}/accounts/a/workspaces/w"
        settings = {PREFECT_CLOUD_API_URL: url, PREFECT_API_URL: workspace}
        with temporary_settings({**settings, PREFECT_API_KEY: "pnu_right"}):
            require_server()
            assert server_database() is None
        for key, value in (("pnu_wrong", "(not shown)"), (None, "not set")):
            with temporary_settings({**settings, PREFECT_API_KEY: key}), pytest.raises(InputError) as refused:
                require_server()
            assert (refused.value.place, refused.value.value) == ("PREFECT_API_KEY", value)


@pytest.mark.usefixtures("server")
def test_pools_are_looked_up_and_each_problem_is_told() -> None:
    with get_client(sync_client=True) as client:
        for name, kind in (("gpu", "grpo"), ("idle", "grpo"), ("plain", "process")):
            client.create_work_pool(WorkPoolCreate(name=name, type=kind))
        client.update_work_pool("idle", WorkPoolUpdate(is_paused=True))
    require_server()
    require_pools([("placement.rollouts.pool", "gpu")])
    places = [
        ("placement.rollouts.pool", "gpus"),
        ("placement.rewards.pool", "idle"),
        ("placement.update.pool", "plain"),
    ]
    with pytest.raises(InputError) as refused:
        require_pools([*places, ("placement.advantages.pool", "gpu")])
    assert [(error.place, error.value) for error in refused.value.errors] == places


@pytest.mark.usefixtures("server")
def test_workers_are_counted_while_they_are_heard_of() -> None:
    with get_client(sync_client=True) as client:
        client.create_work_pool(WorkPoolCreate(name="counted", type="grpo"))
        assert workers_online("counted") == 0
        for name in ("one", "two"):
            client._client.post("/work_pools/counted/workers/heartbeat", json={"name": name})
    assert workers_online("counted") == 2


class Healthy(Quiet):
    def do_GET(self) -> None:
        self.answer(200 if self.path == "/api/health" else 404, b"true")


def test_it_is_said_once_when_it_goes_and_once_when_it_is_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachable, "_SECONDS_BETWEEN_ASKS", 0.02)
    heard, asked = ProgressLog(), list[bool]()
    answers = reachable.answers

    def ask(url: str) -> bool:
        asked.append(answers(url))
        return asked[-1]

    monkeypatch.setattr(reachable, "answers", ask)

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
