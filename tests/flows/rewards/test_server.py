import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
import uvicorn

from configs.scoring import RewardSection
from flows.http_server import server_config
from flows.rewards.server import ServerLimits, create_app, serve
from grpo_core.rewards.image_statistics import JpegReward
from grpo_core.rewards.remote import wire
from grpo_core.rewards.remote.reward import RemoteReward
from grpo_core.rewards.scoring_batch import NOT_APPLICABLE, Score, ScoringBatch
from grpo_core.rewards.similarity.pairs import SsimReward
from grpo_core.rewards.text.rules import AnswerReward
from tests.grpo_core.rewards.conftest import flat, make_batch, make_texts, noise, refusal

REPOSITORY = Path(__file__).parents[3]
REWARDS = (RewardSection(reward="jpeg"), RewardSection(reward="ssim", name="likeness"), RewardSection(reward="answer"))
ODD = RewardSection(
    reward="function", settings={"function": "tests.tasks.execution.functions:odd", "on_error": "raise"}
)
QUICK: dict[str, Any] = {"timeout_s": 120.0, "attempts": 2, "backoff_s": 0.01, "concurrency": 1}


@contextmanager
def serving(rewards: Sequence[RewardSection] = REWARDS, token: str | None = None, **limits: Any) -> Iterator[str]:
    """The address of a server in a thread of this process."""
    with serving_app(create_app(rewards, token, ServerLimits(**limits))) as url:
        yield url


@contextmanager
def serving_app(app: Any) -> Iterator[str]:
    config = server_config(app)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    # A process takes seconds to start, so most tests share one.
    with serving([*REWARDS, ODD], concurrency=1, max_requests=1, seconds_to_arrive=1.5) as url:
        yield url


def test_scores_through_the_wire_are_those_of_a_direct_call(url: str) -> None:
    images = [noise(i, 40 + i, 32) for i in range(5)] + [flat(77), noise(9, 32, 32).convert("L")]
    targets = [noise(i + 50, 40 + i, 32) for i in range(4)] + [None, flat(79), noise(3, 32, 32)]
    batch = make_batch(images, targets)
    direct = SsimReward().score(batch)
    assert direct[4] == NOT_APPLICABLE
    assert len({score.value for score in direct}) > 5
    assert RemoteReward(url=url, reward="likeness", batch_size=3, with_targets=True, **QUICK).score(batch) == direct
    assert RemoteReward(url=url, reward="jpeg", batch_size=2, **QUICK).score(batch) == JpegReward().score(batch)
    written = make_texts("cat", "dög", "", columns={"answer": ["cat", "dog", None]})
    assert RemoteReward(url=url, reward="answer", **QUICK).score(written) == AnswerReward().score(written)


def test_versions_follow_code_settings_and_weights(url: str) -> None:
    jpeg, likeness, *_ = httpx.get(url + wire.DESCRIBE_PATH).json()["rewards"]
    assert (jpeg["name"], likeness["name"]) == ("jpeg", "likeness")
    assert (jpeg["needs_target"], likeness["needs_target"]) == (False, True)
    assert likeness["provenance"]["reward"] == "ssim"
    assert RemoteReward(url=url, reward="jpeg", reward_version=jpeg["version"], **QUICK).preflight() == []
    (problem,) = RemoteReward(url=url, reward="jpeg", reward_version="1", **QUICK).preflight()
    assert f"has version {jpeg['version']} of jpeg" in problem


def test_what_a_reward_does_not_say_comes_through(url: str) -> None:
    reward = RemoteReward(url=url, reward="odd", **QUICK)
    nan, null, well = reward.score(make_texts("nan", "null", "well"))
    assert "is nan" in str(nan.failure)
    assert (null, well) == (NOT_APPLICABLE, Score(0.1 + 0.2, 0.1 + 0.2))


JSON = {"Content-Type": "application/json"}


def body(reward: str, batch: ScoringBatch) -> bytes:
    return wire.write_request(reward, batch, with_targets=True)


def assert_refused(address: str, content: Any, status: int, word: str, headers: Mapping[str, str] = JSON) -> None:
    """Post a request that the server refuses with this status and a word of its message."""
    answer = httpx.post(address + wire.SCORE_PATH, content=content, headers=headers, timeout=60)
    assert answer.status_code == status
    assert word in answer.json()["error"]


def test_a_wrong_request_is_refused_with_the_reason(url: str) -> None:
    assert_refused(url, body("jpg", make_batch([flat(1)])), 404, "answer, jpeg, likeness")


def test_bodies_beyond_the_limit_and_of_another_type() -> None:
    with serving(max_body_bytes=1000, max_requests=0) as url:
        assert_refused(url, b" " * 1001, 413, "")
        assert_refused(url, iter([b" " * 100] * 100), 413, "")
        assert_refused(url, b" " * 1000, 429, "")
        assert_refused(url, b"{}", 415, "", {"Content-Type": "text/plain"})
        remote = RemoteReward(url=url, reward="jpeg", **QUICK)
        assert refusal(remote.score, make_batch([noise(0, 64, 64)])) == (f"{url}/v1/score", "status 413")


def test_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIVEN", "right")
    with serving(token="right") as url:
        assert RemoteReward(url=url, reward="jpeg", token_env="GIVEN", **QUICK).preflight() == []
        for headers in ({}, {"Authorization": "Bearer"}, {"Authorization": "right"}, {"Authorization": "Bearer x"}):
            assert httpx.get(url + wire.DESCRIBE_PATH, headers=headers).status_code == 401
            assert httpx.post(url + wire.SCORE_PATH, headers=JSON | headers, content=b"{}").status_code == 401
        (problem,) = RemoteReward(url=url, reward="jpeg", **QUICK).preflight()
        assert "status 401" in problem
        assert "token_env" in problem


def test_the_scorer_of_the_documentation_works() -> None:
    page = (REPOSITORY / "docs" / "remote_rewards.md").read_text()
    example = page.partition("## A scorer in thirty lines\n")[2].partition("\nStarted with")[0]
    names: dict[str, Any] = {}
    exec(textwrap.dedent(example), names)
    with serving_app(names["app"]) as url:
        scores = RemoteReward(url=url, reward="brightness", **QUICK).score(make_batch([flat(51), flat(255), flat(0)]))
    assert scores == [Score(0.2, 0.2), Score(1.0, 1.0), Score(0.0, 0.0)]


@dataclass
class Waiting:
    """A request on a connection of its own, whose completion is scored until `path` exists; see functions.odd."""

    path: Path
    connection: socket.socket
    process: psutil.Process

    @classmethod
    def begin(cls, url: str, path: Path) -> "Waiting":
        connection = connect(url)
        connection.sendall(posted(body("odd", make_texts(f"wait {path}"))))
        return cls(path, connection, psutil.Process(int(content_of(path.with_suffix(".begun")))))


def connect(url: str) -> socket.socket:
    address = urlsplit(url)
    return socket.create_connection((str(address.hostname), int(address.port or 0)), timeout=60)


def posted(content: bytes) -> bytes:
    head = f"POST {wire.SCORE_PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def content_of(path: Path) -> str:
    """The content of a file that is about to be written."""
    deadline = time.monotonic() + 60
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return path.read_text()


def test_a_busy_server_is_asked_again_and_work_ends_with_its_client(url: str, tmp_path: Path) -> None:
    left = Waiting.begin(url, tmp_path / "never")
    answer = httpx.post(url + wire.SCORE_PATH, content=body("odd", make_texts("x")), headers=JSON)
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "1")
    left.connection.close()
    left.process.wait(timeout=60)
    reward = RemoteReward(url=url, reward="odd", **QUICK | {"attempts": 30})
    assert reward.score(make_texts("x")) == [Score(0.1 + 0.2, 0.1 + 0.2)]


@pytest.mark.slow
def test_a_process_that_dies_is_replaced(url: str) -> None:
    answer = httpx.post(url + wire.SCORE_PATH, content=body("odd", make_texts("exit")), headers=JSON, timeout=120)
    assert answer.status_code == 500
    assert "code 3" in answer.json()["error"]
    assert RemoteReward(url=url, reward="jpeg", **QUICK).score(make_batch([flat(3)])) == JpegReward().score(
        make_batch([flat(3)])
    )


def test_the_time_limit_ends_the_work_and_is_named(tmp_path: Path) -> None:
    with serving([ODD], timeout=0.25) as url:
        never = body("odd", make_texts(f"wait {tmp_path / 'never'}"))
        answer = httpx.post(url + wire.SCORE_PATH, content=never, headers=JSON, timeout=120)
        assert answer.status_code == 504
        assert "0.25 s" in answer.json()["error"]
        begun = tmp_path / "never.begun"
        assert not begun.exists() or not psutil.pid_exists(int(begun.read_text()))


def test_slow_connections_cost_nobody_else_anything(url: str) -> None:
    """They send nothing, half a head, and all but the last byte of a body; the last are told why they are refused."""
    whole = posted(body("answer", make_texts("cat", columns={"answer": ["cat"]})))
    slow = [connect(url) for _ in range(12)]
    for index, connection in enumerate(slow):
        connection.sendall(whole[: (0, 30, len(whole) - 1)[index % 3]])
    answer = httpx.post(url + wire.SCORE_PATH, content=whole.partition(b"\r\n\r\n")[2], headers=JSON, timeout=120)
    assert answer.status_code == 200
    ends = [connection.makefile("rb").readline() for connection in slow[2::3]]
    assert ends == [b"HTTP/1.1 408 Request Timeout\r\n"] * 4
    for connection in slow:
        connection.close()


def test_siblings_must_come_together() -> None:
    grouped = ODD.model_copy(update={"settings": {**ODD.settings, "by_group": True}})
    with serving([grouped]) as url:
        (problem,) = RemoteReward(url=url, reward="odd", **QUICK).preflight()
        assert "compares siblings" in problem


def test_serve_refuses_what_is_not_ready() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for rewards, settings, place, value in (
            ([RewardSection(reward="lpips", name="learned"), *REWARDS], {}, "rewards.learned", "not ready"),
            (REWARDS, {"host": "0.0.0.0"}, "host", "0.0.0.0"),
            (REWARDS, {"token_env": "SURELY_NOT_SET"}, "--token-env", "SURELY_NOT_SET"),
            (REWARDS, {"port": port}, "host and port", f"127.0.0.1:{port}"),
        ):
            assert refusal(serve, rewards, **{"port": 0, **settings}) == (place, value)


SERVER = """
from flows.rewards.server import serve
from configs.scoring import RewardSection
serve([RewardSection(reward="jpeg")], port=0, report_progress=lambda line: print(line, flush=True))
print("ended", flush=True)
"""


@pytest.mark.slow
def test_a_server_ends_on_a_signal_and_later_samples_fail() -> None:
    batch = make_batch([noise(i, 24, 24) for i in range(4)])
    environment, command = os.environ | {"OMP_NUM_THREADS": "1"}, [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert "serving jpeg on http://127.0.0.1:" in line
            reward = RemoteReward(url=line.split()[3].rstrip(","), reward="jpeg", batch_size=1, **QUICK)
            assert reward.score(batch) == JpegReward().score(batch)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
            assert process.stdout.read() == "ended\n"
        finally:
            process.kill()
    assert [score.failure for score in reward.score(batch)] == [
        "the service could not be reached (ConnectError), after 2 attempts"
    ] * 4
