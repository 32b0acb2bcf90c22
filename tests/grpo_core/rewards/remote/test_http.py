import email.utils
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from grpo_core.errors import InputError
from grpo_core.rewards.remote import http
from grpo_core.rewards.remote.http import Service, ServiceFailure, ask_side_by_side
from tests.grpo_core.rewards.remote.conftest import Reply, Stub

QUICK: dict[str, Any] = {"timeout_s": 5.0, "attempts": 3, "backoff_s": 0.001}


@pytest.mark.parametrize("trouble", [Reply(drop=True), Reply({}, 500), Reply({}, 503), Reply({}, 429)])
def test_what_may_pass_is_tried_again(stub: Stub, trouble: Reply) -> None:
    stub.script(trouble, trouble, Reply({"well": 1}))
    assert Service("remote", stub.url, **QUICK).post("/x", b'{"a": 2}') == {"well": 1}
    assert [requested.body for requested in stub.requested] == [{"a": 2}] * 3


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        (Reply(drop=True), "could not be reached (RemoteProtocolError), after 3 attempts"),
        (Reply({}, 502), "answered with status 502, after 3 attempts"),
    ],
)
def test_after_the_last_attempt_it_fails_without_an_address(stub: Stub, trouble: Reply, reason: str) -> None:
    stub.script(trouble)
    with pytest.raises(ServiceFailure) as failure:
        Service("remote", stub.url, **QUICK).get("/x")
    assert reason in str(failure.value)
    assert "127.0.0.1" not in str(failure.value)
    assert len(stub.requested) == 3


def test_nobody_listens(closed_url: str) -> None:
    with pytest.raises(ServiceFailure, match=r"could not be reached \(ConnectError\), after 3 attempts"):
        Service("remote", closed_url, **QUICK).get("/x")


@pytest.mark.parametrize("drip_s", [0.15, 10.0])
def test_a_slow_service_runs_out_of_time(stub: Stub, drip_s: float) -> None:
    # Each byte of the first comes well within the limit, all of them take half a minute.
    stub.script(Reply({"a": "long answer" * 20}, drip_s=drip_s))
    started = time.monotonic()
    with pytest.raises(ServiceFailure, match=r"did not answer within 0\.3 s, after 2 attempts"):
        Service("remote", stub.url, timeout_s=0.3, attempts=2, backoff_s=0.001).get("/x")
    assert time.monotonic() - started < 8


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (400, {"error": "bad rubric"}, r"status 400.*The service says: bad rubric\."),
        (400, {"error": {"message": "no such model", "code": 3}}, "The service says: no such model"),
        (422, {"detail": [{"loc": ["x"]}]}, "The service says: .*loc"),
        (404, b"<html>gone</html>", "The service says: <html>gone</html>. Correct `url`"),
        (401, {}, "token_env"),
        (413, {"error": "too large"}, "smaller `batch_size`"),
        (302, b"", "status 302"),
    ],
)
def test_a_refusal_is_an_error_at_once(stub: Stub, status: int, body: Any, message: str) -> None:
    stub.script(Reply(body, status, headers={"Location": "/elsewhere"}))
    with pytest.raises(InputError, match=message) as error:
        Service("remote", stub.url, **QUICK).post("/x", b"{}")
    assert error.value.place == f"{stub.url}/x"
    assert len(stub.requested) == 1


def test_an_answer_that_is_no_json(stub: Stub) -> None:
    stub.script(Reply(b"<html>hello</html>"))
    with pytest.raises(InputError, match=r"got '<html>hello</html>'. The answer is not JSON"):
        Service("remote", stub.url, **QUICK).get("/x")


def test_an_endless_answer_is_cut(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "MAX_ANSWER_BYTES", 1000)
    stub.script(Reply(b'"' + b"x" * 2000 + b'"'))
    with pytest.raises(InputError, match="over 1000 bytes"):
        Service("remote", stub.url, **QUICK).get("/x")


@pytest.mark.parametrize("dated", [False, True])
def test_retry_after_is_honoured(stub: Stub, dated: bool) -> None:
    started = time.monotonic()
    # A date holds whole seconds only, so two from now is at least one away.
    value = email.utils.formatdate(time.time() + 2, usegmt=True) if dated else "1"
    stub.script(Reply({}, 429, {"Retry-After": value}), Reply({"well": 1}))
    assert Service("remote", stub.url, **QUICK).get("/x") == {"well": 1}
    assert time.monotonic() - started >= 0.95


def pauses(service: Service, retry_after_s: float | None = None) -> list[float]:
    class Outcome:
        def exception(self) -> ServiceFailure:
            return ServiceFailure("busy", retry_after_s)

    class State:
        outcome = Outcome()
        attempt_number = 0

    found = []
    for number in range(1, 12):
        State.attempt_number = number
        found.append(service._pause(State()))  # type: ignore[arg-type]
    return found


def test_pauses_double_up_to_a_limit_and_differ() -> None:
    service = Service("remote", "http://x", backoff_s=0.5)
    for number, pause in enumerate(pauses(service)):
        full = min(0.5 * 2**number, 30.0)
        assert full / 2 <= pause <= full
    assert pauses(service) != pauses(service)
    assert pauses(service, 7.0)[0] == 7.0
    assert pauses(service, 7.0)[-1] >= 15.0
    assert pauses(service, 1e6)[0] == 300.0


def test_jitter_leaves_the_shared_random_state_alone() -> None:
    before = random.getstate()
    pauses(Service("remote", "http://x"))
    assert random.getstate() == before


def test_token_goes_into_the_header_only(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCORER_TOKEN", " s3cret\n")
    stub.script(Reply({}))
    service = Service("remote", stub.url, token_env="SCORER_TOKEN", **QUICK)
    service.get("/x")
    assert stub.requested[0].headers["Authorization"] == "Bearer s3cret"
    assert "s3cret" not in repr(service)
    Service("remote", stub.url, **QUICK).get("/x")
    assert "Authorization" not in stub.requested[1].headers
    monkeypatch.setenv("SCORER_TOKEN", "two words")
    with pytest.raises(InputError, match="is not a token"):
        service.get("/x")
    monkeypatch.delenv("SCORER_TOKEN")
    with pytest.raises(InputError, match=r"token_env: got 'SCORER_TOKEN'\. This environment variable is not set"):
        service.get("/x")


def test_a_proxy_is_not_asked_for_the_own_machine(stub: Stub, closed_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", closed_url)
    monkeypatch.delenv("NO_PROXY", raising=False)
    stub.script(Reply({"well": 1}))
    assert Service("remote", stub.url, **QUICK).get("/x") == {"well": 1}


@pytest.mark.parametrize("concurrency", [1, 3])
def test_side_by_side_keeps_the_order_and_the_bound(concurrency: int) -> None:
    at_once, most, lock, together = 0, 0, threading.Lock(), threading.Barrier(concurrency)

    def ask(item: int) -> int:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        if item < concurrency:
            together.wait(60)  # the first ones, until all of them are there
        time.sleep(0.002 * (5 - item % 5))
        with lock:
            at_once -= 1
        return item * item

    assert ask_side_by_side(ask, list(range(12)), concurrency) == [i * i for i in range(12)]
    assert most == concurrency


@contextmanager
def dripping(content: bytes) -> Iterator[str]:
    """The address of a server that answers one byte of this after the other, each well within the limit."""
    stopping = threading.Event()

    def answer(listener: socket.socket) -> None:
        while not stopping.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                try:
                    for byte in content:
                        connection.sendall(bytes([byte]))
                        if stopping.wait(0.05):
                            return
                except OSError:
                    continue  # the other side has hung up

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5.0)
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        stopping.set()
        thread.join()


@pytest.mark.parametrize(
    "content",
    [
        b"HTTP/1.1 200 OK\r\nX-Long: " + b"x" * 1000,
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200,
        b"HTTP/1.0 200 OK\r\n\r\n" + b" " * 1000,
    ],
)
def test_a_service_that_drips_its_answer_runs_out_of_time(content: bytes) -> None:
    with dripping(content) as url:
        started = time.monotonic()
        with pytest.raises(ServiceFailure, match=r"did not answer within 0\.3 s, after 2 attempts"):
            Service("remote", url, timeout_s=0.3, attempts=2, backoff_s=0.001).get("/x")
        assert time.monotonic() - started < 15  # of 50 and more
