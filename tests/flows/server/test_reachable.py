"""What commands ask of a server before any work: each way it can be missing has a message, within seconds."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import prefect
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from flows.server.reachable import require_pools, require_server, server_database, workers_online
from grpo_core.errors import InputError, InputErrors


@contextmanager
def matching_manifest(status: int, body: bytes) -> Iterator[str]:
    """Something that gives one answer to everything."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/api"
        finally:
            server.shutdown()
            thread.join()


def refusal(url: str) -> str:
    with temporary_settings({PREFECT_API_URL: url}), pytest.raises(InputError) as refused:
        require_server()
    return str(refused.value)


def test_nobody_answers() -> None:
    told = refusal("http://127.0.0.1:1/api")
    assert told.startswith("PREFECT_API_URL: got 'http://127.0.0.1:1/api'. No server answers there")
    assert "grpo ui" in told


def test_somebody_listens_and_says_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        started = time.perf_counter()
        told = refusal(f"http://127.0.0.1:{mute.getsockname()[1]}/api")
        assert time.perf_counter() - started < 40
    assert "No server answers there" in told


@pytest.mark.parametrize("url", ["127.0.0.1:4200/api", "ftp://127.0.0.1/api", "http://:x/api"])
def test_an_address_that_is_none(url: str) -> None:
    assert "http://HOST:PORT/api" in refusal(url)


@pytest.mark.parametrize(("status", "body"), [(404, b"no"), (200, b"<html>"), (200, b'"welcome"')])
def test_what_answers_is_no_api_of_prefects(status: int, body: bytes) -> None:
    with matching_manifest(status, body) as url:
        assert "does the address end in /api?" in refusal(url)


def test_a_server_that_cannot_answer_now() -> None:
    with matching_manifest(503, b"") as url:
        told = refusal(url.replace("://", "://me:secret@"))
    assert "It answered 503" in told
    assert "secret" not in told


def test_another_password_and_none_are_told_and_not_shown() -> None:
    with matching_manifest(401, b"") as url:
        assert "PREFECT_API_AUTH_STRING: got 'not set'" in refusal(url)
        with temporary_settings({PREFECT_API_AUTH_STRING: "admin:hidden"}):
            told = refusal(url)
    assert "PREFECT_API_AUTH_STRING: got '(not shown)'" in told
    assert "hidden" not in told


@pytest.mark.parametrize(("release", "fits"), [("2.20.1", False), ("3.0.1", False), ("4.0.0", False), ("3.99.0", True)])
def test_releases_that_do_not_go_together(release: str, fits: bool) -> None:
    with matching_manifest(200, f'"{release}"'.encode()) as url:
        if fits:
            with temporary_settings({PREFECT_API_URL: url}):
                require_server()
        else:
            assert f"The server is Prefect {release} and this is {prefect.__version__}" in refusal(url)


def test_without_a_server_pools_are_refused_and_all_else_is_fine() -> None:
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        require_server()
        require_pools([])
        assert server_database() is None
        with pytest.raises(InputErrors) as refused:
            require_pools([("placement.rollouts.pool", "gpu"), ("placement.update.pool", "gpu2")])
    assert [error.place for error in refused.value.errors] == ["placement.rollouts.pool", "placement.update.pool"]
    assert "none is configured: start one with `grpo ui`" in str(refused.value)


@pytest.mark.usefixtures("server")
def test_pools_are_looked_up_and_each_problem_is_told() -> None:
    with get_client(sync_client=True) as client:
        for name, kind in (("gpu", "grpo"), ("idle", "grpo"), ("plain", "process")):
            client.create_work_pool(WorkPoolCreate(name=name, type=kind))
        client.update_work_pool("idle", WorkPoolUpdate(is_paused=True))
    require_server()
    require_pools([("placement.rollouts.pool", "gpu")])
    require_pools([("schedule.pool", "plain")], kind=None)
    places = [
        ("placement.rollouts.pool", "gpus"),
        ("placement.rewards.pool", "idle"),
        ("placement.update.pool", "plain"),
    ]
    with pytest.raises(InputErrors) as refused:
        require_pools([*places, ("placement.advantages.pool", "gpu")])
    missing, paused, plain = (str(error) for error in refused.value.errors)
    assert "it has: gpu, idle. `grpo worker gpus` starts a worker and makes it" in missing
    assert "prefect work-pool resume idle" in paused
    assert "of type process, and stages need one of type grpo" in plain


@pytest.mark.usefixtures("server")
def test_workers_are_counted_while_they_are_heard_of() -> None:
    with get_client(sync_client=True) as client:
        client.create_work_pool(WorkPoolCreate(name="counted", type="grpo"))
        assert (workers_online("counted"), workers_online("nowhere")) == (0, 0)
        for name in ("one", "two"):
            client._client.post("/work_pools/counted/workers/heartbeat", json={"name": name})
    assert workers_online("counted") == 2
