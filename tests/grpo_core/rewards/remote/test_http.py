import contextlib
import email.utils
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_core import services
from grpo_core.rewards.remote.http import ask_side_by_side
from grpo_core.rewards.remote.reward import RemoteReward
from grpo_core.rewards.scoring_batch import ScoringError
from grpo_core.services import ServiceError
from tests.grpo_core.rewards.conftest import refusal, refused
from tests.grpo_core.rewards.stub import QUICK, Reply, Stub


def service(url: str, **more: Any) -> RemoteReward:
    return RemoteReward(url=url, reward="mine", **{**QUICK, "attempts": 3, **more})


def ask(reward: RemoteReward, path: str, body: bytes | None = None) -> object:
    with reward.connected() as request:
        return request(path, body)


@pytest.mark.parametrize("trouble", [Reply(drop=True), Reply({}, 500), Reply({}, 503), Reply({}, 429)])
def test_errors_that_may_pass_are_retried(stub: Stub, trouble: Reply) -> None:
    stub.script(trouble, trouble, Reply({"well": 1}))
    assert ask(service(stub.url), "/x", b'{"a": 2}') == {"well": 1}
    assert [requested.body for requested in stub.requested] == [{"a": 2}] * 3


@pytest.mark.parametrize(
    ("trouble", "reason"),
    [
        (Reply(drop=True), "could not be reached (RemoteProtocolError), after 3 attempts"),
        (Reply({}, 502), "answered with status 502, after 3 attempts"),
        (None, "could not be reached (ConnectError), after 3 attempts"),
    ],
)
def test_after_the_last_attempt_it_fails_without_an_address(
    stub: Stub, closed_url: str, trouble: Reply | None, reason: str
) -> None:
    stub.script(trouble or Reply())
    with pytest.raises(ScoringError) as failure:
        ask(service(stub.url if trouble else closed_url), "/x")
    assert reason in str(failure.value)
    assert "127.0.0.1" not in str(failure.value)
    assert len(stub.requested) == (3 if trouble else 0)


@pytest.mark.parametrize(
    ("status", "body", "word"),
    [
        (400, {"error": "bad rubric"}, "bad rubric"),
        (400, {"error": {"message": "no such model", "code": 3}}, "no such model"),
        (422, {"detail": [{"loc": ["x"]}]}, "loc"),
        (404, b"<html>gone</html>", "<html>gone</html>"),
        (401, {}, "token_env"),
        (413, {"error": "too large"}, "batch_size"),
        (302, b"", ""),
    ],
)
def test_a_refusal_is_an_error_at_once(stub: Stub, status: int, body: Any, word: str) -> None:
    stub.script(Reply(body, status, headers={"Location": "/elsewhere"}))
    error = refused(ask, service(stub.url), "/x", b"{}")
    assert (error.place, error.value) == (f"{stub.url}/x", f"status {status}")
    assert word in error.hint
    assert len(stub.requested) == 1


@pytest.mark.parametrize(
    ("answer", "value"), [(b"<html>hello</html>", "<html>hello</html>"), (b'"' + b"x" * 2000 + b'"', "over 1000 bytes")]
)
def test_an_answer_that_is_no_json_or_endless(
    stub: Stub, monkeypatch: pytest.MonkeyPatch, answer: bytes, value: str
) -> None:
    monkeypatch.setattr(services, "MAX_ANSWER_BYTES", 1000)
    stub.script(Reply(answer))
    assert refused(ask, service(stub.url), "/x").value == value


@pytest.mark.parametrize("dated", [False, True])
def test_retry_after_is_read(stub: Stub, dated: bool) -> None:
    value = email.utils.formatdate(time.time() + 1000, usegmt=True) if dated else "1000"
    stub.script(Reply({}, 429, {"Retry-After": value}))
    with pytest.raises(ScoringError) as failure:
        ask(service(stub.url, timeout_s=5.0, attempts=1), "/x")
    cause = failure.value.__cause__
    assert isinstance(cause, ServiceError)
    assert cause.retry_after_s == pytest.approx(1000, abs=100)


def pauses(asked: RemoteReward, retry_after_s: float | None = None) -> list[float]:
    outcome = SimpleNamespace(exception=lambda: ServiceError("busy", retry_after_s))
    states = (SimpleNamespace(outcome=outcome, attempt_number=number) for number in range(1, 12))
    return [asked._pause(state) for state in states]  # type: ignore[arg-type]


def test_pauses_double_up_to_a_limit_and_differ() -> None:
    before = random.getstate()
    asked = service("http://x", backoff_s=0.5)
    for number, pause in enumerate(pauses(asked)):
        full = min(0.5 * 2**number, 30.0)
        assert full / 2 <= pause <= full
    assert pauses(asked) != pauses(asked)
    assert pauses(asked, 7.0)[0] == 7.0
    assert pauses(asked, 7.0)[-1] >= 15.0
    assert pauses(asked, 1e6)[0] == 300.0
    assert random.getstate() == before


def test_token_goes_into_the_header_only(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCORER_TOKEN", " s3cret\n")
    stub.script(Reply({}))
    bearing = service(stub.url, token_env="SCORER_TOKEN")
    ask(bearing, "/x")
    assert stub.requested[0].headers["Authorization"] == "Bearer s3cret"
    assert "s3cret" not in repr(bearing)
    ask(service(stub.url), "/x")
    assert "Authorization" not in stub.requested[1].headers
    monkeypatch.setenv("SCORER_TOKEN", "two words")
    assert refusal(ask, bearing, "/x") == ("rewards.remote.token_env", "SCORER_TOKEN")
    monkeypatch.delenv("SCORER_TOKEN")
    assert refusal(ask, bearing, "/x") == ("rewards.remote.token_env", "SCORER_TOKEN")


def test_no_proxy_is_used_for_the_loopback(stub: Stub, closed_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", closed_url)
    monkeypatch.delenv("NO_PROXY", raising=False)
    stub.script(Reply({"well": 1}))
    assert ask(service(stub.url), "/x") == {"well": 1}


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
def dripping(content: bytes, pause_s: float) -> Iterator[str]:
    """Serve an answer byte by byte, with a pause after each; yield the address."""
    stopping = threading.Event()

    def answer(listener: socket.socket) -> None:
        while not stopping.is_set():
            with contextlib.suppress(OSError):  # no client, or it has hung up
                connection, _ = listener.accept()
                with connection:
                    for byte in content:
                        connection.sendall(bytes([byte]))
                        if stopping.wait(pause_s):
                            return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(5.0)
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        stopping.set()
        thread.join()


@pytest.mark.parametrize(
    ("content", "pause_s"),
    [
        (b"HTTP/1.1 200 OK\r\n", 10.0),
        # Each byte arrives well within the limit, all of them take a minute.
        (b"HTTP/1.1 200 OK\r\nX-Long: " + b"x" * 1000, 0.05),
        (b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 200, 0.05),
        (b"HTTP/1.0 200 OK\r\n\r\n" + b" " * 1000, 0.05),
    ],
)
def test_a_slow_service_runs_out_of_time(content: bytes, pause_s: float) -> None:
    with (
        dripping(content, pause_s) as url,
        pytest.raises(ScoringError, match=r"did not answer within 0\.3 s, after 2 attempts"),
    ):
        ask(service(url, timeout_s=0.3, attempts=2, backoff_s=0.001), "/x")
