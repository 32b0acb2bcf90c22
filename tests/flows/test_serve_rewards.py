import base64
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import httpx
import pytest
import uvicorn

from flows.serve_rewards import create_app, describe_reward, serve
from grpo_core.rewards.image_statistics import JpegReward
from grpo_core.rewards.lpips import LpipsReward
from grpo_core.rewards.ocr.text_accuracy import MAX_ASPECT, TextAccuracyReward
from grpo_core.rewards.remote import wire
from grpo_core.rewards.remote.reward import RemoteReward
from grpo_core.rewards.reward import NOT_APPLICABLE, Reward, Score, ScoringBatch
from grpo_core.rewards.similarity import SsimReward
from grpo_core.rewards.text import AnswerReward
from grpo_core.streams import Modality
from tests.grpo_core.rewards.conftest import flat, make_batch, make_texts, noise, refusal

REPOSITORY = Path(__file__).parents[2]
REWARDS: Mapping[str, Reward] = {"jpeg": JpegReward(), "likeness": SsimReward(), "answer": AnswerReward()}
QUICK: dict[str, Any] = {"timeout_s": 20.0, "attempts": 2, "backoff_s": 0.01}


@contextmanager
def serving(rewards: Mapping[str, Reward] = REWARDS, token: str | None = None, **more: Any) -> Iterator[str]:
    """The address of a server in a thread of this process."""
    with serving_app(create_app(rewards, token, **more)) as url:
        yield url


@contextmanager
def serving_app(app: Any) -> Iterator[str]:
    config = uvicorn.Config(app, log_level="warning", lifespan="off")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture
def trunk_file(tmp_path: Path) -> Path:
    """Weights that have a digest; nothing loads them."""
    path = tmp_path / "trunk.pth"
    path.write_bytes(b"weights")
    return path


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving() as url:
        yield url


BEGUN, GO_ON = threading.Event(), threading.Event()


@dataclass(frozen=True)
class Odd(Reward):
    """Scores, fails, waits or raises as its completions say."""

    needs_group: bool = False  # type: ignore[assignment]

    name: ClassVar[str] = "odd"
    version: ClassVar[str] = "1"
    media: ClassVar[tuple[Modality, ...]] = ("text",)

    def settings(self) -> Mapping[str, object]:
        return {}

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        given = {"nan": Score(float("nan"), 1.0), "failed": Score.failed("no"), "null": NOT_APPLICABLE}
        if "raise" in batch.completions:
            raise RuntimeError("a secret of the server")
        for text in batch.completions:
            if text == "wait":
                BEGUN.set()
                assert GO_ON.wait(60)
        return [given.get(text, Score(0.1 + 0.2, 1 / 3)) for text in batch.completions]


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


def test_versions_follow_code_settings_and_weights(url: str, trunk_file: Path) -> None:
    (jpeg, likeness, _) = httpx.get(url + wire.DESCRIBE_PATH).json()["rewards"]
    assert (jpeg["name"], likeness["name"]) == ("jpeg", "likeness")
    assert (jpeg["needs_target"], likeness["needs_target"]) == (False, True)
    assert likeness["provenance"]["reward"] == "ssim"
    assert (jpeg["max_aspect"], describe_reward("text", TextAccuracyReward()).max_aspect) == (None, MAX_ASPECT)
    assert jpeg["version"] == describe_reward("other name", JpegReward()).version
    assert jpeg["version"] != describe_reward("jpeg", JpegReward(quality=90)).version
    lpips = describe_reward("lpips", LpipsReward(weights=str(trunk_file)))
    assert lpips.provenance["weights"]["trunk"] == hashlib.sha256(trunk_file.read_bytes()).hexdigest()  # type: ignore[index]
    assert str(trunk_file) not in lpips.model_dump_json()
    assert RemoteReward(url=url, reward="jpeg", reward_version=jpeg["version"], **QUICK).preflight() == []
    (problem,) = RemoteReward(url=url, reward="jpeg", reward_version="1", **QUICK).preflight()
    assert f"has version {jpeg['version']} of jpeg" in problem


def test_what_a_reward_does_not_say_comes_through(caplog: pytest.LogCaptureFixture) -> None:
    with serving({"odd": Odd()}) as url:
        reward = RemoteReward(url=url, reward="odd", **QUICK)
        nan, failed, null, well = reward.score(make_texts("nan", "failed", "null", "well"))
        assert "is nan" in str(nan.failure)
        assert (failed, null, well) == (Score.failed("no"), NOT_APPLICABLE, Score(0.1 + 0.2, 1 / 3))
        broken = reward.score(make_texts("raise"))
        assert broken == [Score.failed("the service answered with status 500, after 2 attempts")]
        refused = httpx.post(url + wire.SCORE_PATH, content=body("odd", make_texts("raise")), headers=JSON)
        assert "secret" not in refused.text
        assert "a secret of the server" in caplog.text


JSON = {"Content-Type": "application/json"}


def body(reward: str, batch: ScoringBatch) -> bytes:
    return wire.write_request(reward, batch, with_targets=True)


def with_image(content: bytes) -> bytes:
    sample = {"sample_id": "s", "prompt": "p", "image": base64.b64encode(content).decode()}
    return json.dumps({"protocol": 1, "reward": "jpeg", "samples": [sample]}).encode()


def assert_refused(address: str, content: Any, status: int, word: str, headers: Mapping[str, str] = JSON) -> None:
    """Post a request that the server refuses with this status and a word of its message."""
    answer = httpx.post(address + wire.SCORE_PATH, content=content, headers=headers)
    assert answer.status_code == status
    assert word in answer.json()["error"]


@pytest.mark.parametrize(
    ("content", "status", "word"),
    [
        (b"", 422, "JSON"),
        (b'{"protocol": 1, "reward": "jpeg", "samples": []}', 422, "samples"),
        (body("jpg", make_batch([flat(1)])), 404, "answer, jpeg, likeness"),
        (body("jpeg", make_texts("a")), 422, "these samples are texts"),
        (body("answer", make_batch([flat(1)])), 422, "these samples are images"),
        (body("likeness", make_batch([noise(0, 40, 40)], [noise(0, 40, 60)])), 422, "aspect"),
        (body("likeness", make_batch([noise(0, 8, 8)], [noise(1, 8, 8)])), 422, "11 pixels"),
        (body("answer", make_texts("a", columns={"answer": [3]})), 422, "column answer"),
        (with_image(b"GIF89a"), 422, "sample s, image: "),
    ],
)
def test_wrong_requests_are_refused_with_the_reason(url: str, content: bytes, status: int, word: str) -> None:
    assert_refused(url, content, status, word)


def test_bodies_beyond_the_limit_and_of_another_type() -> None:
    with serving(max_body_bytes=1000) as url:
        assert_refused(url, b" " * 1001, 413, "")
        assert_refused(url, iter([b" " * 100] * 100), 413, "")
        assert_refused(url, b" " * 999, 422, "JSON")
        assert_refused(url, b"{}", 415, "", {"Content-Type": "text/plain"})
        remote = RemoteReward(url=url, reward="jpeg", **QUICK)
        assert refusal(remote.score, make_batch([noise(0, 64, 64)])) == (f"{url}/v1/score", "status 413")


def test_images_beyond_the_limit_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    within = make_batch([flat(1, 30, 10), flat(2, 20, 10)], [flat(1, 30, 10), flat(2, 20, 10)])
    beyond = make_batch([*within.images, flat(3, 1, 1)], [*within.targets, None])
    with serving(max_pixels=1000) as url:
        address = url + wire.SCORE_PATH
        assert httpx.post(address, content=body("jpeg", within), headers=JSON).status_code == 200
        monkeypatch.setattr(wire, "read_batch", None)
        assert_refused(url, body("jpeg", beyond), 413, "1001 pixels")


def test_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIVEN", "right")
    batch = make_batch([flat(3)])
    with serving(token="right") as url:
        assert RemoteReward(url=url, reward="jpeg", token_env="GIVEN", **QUICK).score(batch) == JpegReward().score(
            batch
        )
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


def test_a_busy_server_refuses_and_is_asked_again() -> None:
    with serving({"odd": Odd()}, concurrency=1, max_requests=1) as url:
        first = threading.Thread(
            target=httpx.post,
            args=(url + wire.SCORE_PATH,),
            kwargs={"content": body("odd", make_texts("wait")), "headers": JSON, "timeout": 60},
        )
        first.start()
        assert BEGUN.wait(60)
        answer = httpx.post(url + wire.SCORE_PATH, content=body("odd", make_texts("x")), headers=JSON)
        assert (answer.status_code, answer.headers["Retry-After"]) == (429, "1")
        threading.Timer(0.2, GO_ON.set).start()
        reward = RemoteReward(url=url, reward="odd", **QUICK | {"attempts": 30})
        assert reward.score(make_texts("x")) == [Score(0.1 + 0.2, 1 / 3)]
        first.join()


def test_siblings_must_come_together() -> None:
    with serving({"odd": Odd(needs_group=True)}) as url:
        (problem,) = RemoteReward(url=url, reward="odd", **QUICK).preflight()
        assert "compares siblings" in problem
        assert_refused(url, body("odd", make_texts("a")), 422, "group_id")
        batch = make_texts("a", "b", group_ids=["g", "h"])
        well = RemoteReward(url=url, reward="odd", by_group=True, **QUICK).score(batch)
        assert [score.failure for score in well] == [None, None]


def test_serve_refuses_what_is_not_ready() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for rewards, settings, place, value in (
            ({"learned": LpipsReward(), "jpeg": JpegReward()}, {}, "rewards.learned", "not ready"),
            (REWARDS, {"host": "0.0.0.0"}, "host", "0.0.0.0"),
            (REWARDS, {"token_env": "SURELY_NOT_SET"}, "--token-env", "SURELY_NOT_SET"),
            (REWARDS, {"port": port}, "host and port", f"127.0.0.1:{port}"),
        ):
            assert refusal(serve, rewards, **{"port": 0, **settings}) == (place, value)


SERVER = """
from flows.serve_rewards import serve
from grpo_core.rewards.image_statistics import JpegReward
serve({"jpeg": JpegReward()}, port=0, report_progress=lambda line: print(line, flush=True))
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
            reward = RemoteReward(url=line.split()[-1], reward="jpeg", batch_size=1, concurrency=1, **QUICK)
            assert reward.score(batch) == JpegReward().score(batch)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
            assert process.stdout.read() == "ended\n"
        finally:
            process.kill()
    assert [score.failure for score in reward.score(batch)] == [
        "the service could not be reached (ConnectError), after 2 attempts"
    ] * 4
