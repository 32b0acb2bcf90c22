import logging
import re
from collections.abc import Callable
from typing import Any

import pytest

from grpo_core.rewards.remote.reward import RemoteReward
from grpo_core.rewards.reward import provenance_of, score_samples
from grpo_core.rewards.scoring_batch import NOT_APPLICABLE, Score, ScoringBatch
from tests.grpo_core.rewards.conftest import flat, make_batch, make_texts, noise, refusal
from tests.grpo_core.rewards.stub import QUICK, Asked, Reply, Stub


def described(**more: Any) -> dict[str, Any]:
    return {"protocol": 1, "rewards": [{"name": "mine", "version": "7", "media": ["image", "text"], **more}]}


def scored(requested: Asked, **more: Any) -> dict[str, Any]:
    """As score the length of the completion, or nothing for an image."""
    scores = [
        {"sample_id": s["sample_id"], "value": float(len(s["completion"])) if "completion" in s else None}
        for s in requested.body["samples"]
    ]
    return {"protocol": 1, "reward": "mine", "version": "7", "scores": scores} | more


@pytest.fixture
def server(stub: Stub) -> Stub:
    stub.respond = answering()
    return stub


def texts(count: int, **more: Any) -> ScoringBatch:
    return make_texts(*("x" * length for length in range(count)), **more)


def answering(**more: Any) -> Callable[[Asked], Reply]:
    """A service that describes itself, and scores with these fields instead of the right ones."""
    return lambda requested: Reply(described() if requested.method == "GET" else scored(requested, **more))


def posts(server: Stub) -> list[Any]:
    return [requested.body for requested in server.requested if requested.method == "POST"]


@pytest.mark.parametrize(("batch_size", "concurrency"), [(1, 1), (3, 4), (100, 2)])
def test_scores_keep_the_order_whatever_the_batch(server: Stub, batch_size: int, concurrency: int) -> None:
    reward = RemoteReward(url=server.url, reward="mine", batch_size=batch_size, concurrency=concurrency, **QUICK)
    assert reward.score(texts(7)) == [Score(float(i), float(i)) for i in range(7)]
    assert sorted(len(body["samples"]) for body in posts(server))[-1] == min(batch_size, 7)
    assert len(posts(server)) == -(-7 // batch_size)
    assert len([requested for requested in server.requested if requested.method == "GET"]) == 1


def test_a_group_goes_in_one_request(server: Stub) -> None:
    reward = RemoteReward(url=server.url + "/", reward="mine", by_group=True, **QUICK)
    assert reward.needs.group
    reward.score(texts(5, group_ids=["a", "a", "a", "b", "b"]))
    sent = sorted([sample["group_id"] for sample in body["samples"]] for body in posts(server))
    assert sent == [["a", "a", "a"], ["b", "b"]]
    assert refusal(reward.score, texts(2)) == ("rewards.remote.by_group", True)


@pytest.mark.parametrize("with_targets", [False, True])
def test_targets_are_sent_only_on_request(server: Stub, with_targets: bool) -> None:
    batch = make_batch([noise(0, 8, 8)], [noise(1, 8, 8)])
    reward = RemoteReward(url=server.url, reward="mine", with_targets=with_targets, **QUICK)
    assert reward.needs.target is with_targets
    assert reward.score(batch) == [NOT_APPLICABLE]
    assert ("target" in posts(server)[0]["samples"][0]) is with_targets


@pytest.mark.parametrize(
    ("description", "batch", "place", "value"),
    [
        (described(needs_target=True), texts(1), ".with_targets", False),
        (described(media=["image"]), texts(1), ".reward", "mine"),
        (described(media=["text"]), make_batch([flat(0)]), ".reward", "mine"),
        (
            described(min_side=33),
            make_batch([flat(0, 33, 33), flat(0, 40, 32)]),
            ", sample s1",
            "image of 40x32 pixels",
        ),
        (
            described(max_aspect=2.5),
            make_batch([flat(0, 25, 10), flat(0, 10, 26)]),
            ", sample s1",
            "image of 10x26 pixels",
        ),
    ],
)
def test_samples_that_the_reward_cannot_take_are_not_sent(
    server: Stub, description: Any, batch: ScoringBatch, place: str, value: object
) -> None:
    server.script(Reply(description))
    reward = RemoteReward(url=server.url, reward="mine", **QUICK)
    assert refusal(reward.score, batch) == (f"rewards.remote{place}", value)
    assert posts(server) == []


def test_a_service_killed_half_way_fails_the_rest_and_no_more(stub: Stub, caplog: pytest.LogCaptureFixture) -> None:
    def respond(requested: Asked) -> Reply:
        if requested.method == "GET":
            return Reply(described())
        return Reply(drop=True) if requested.body["samples"][0]["sample_id"] >= "s4" else Reply(scored(requested))

    stub.respond = respond
    reward = RemoteReward(url=stub.url, reward="mine", batch_size=2, concurrency=1, **QUICK)
    with caplog.at_level(logging.WARNING):
        scores = score_samples(reward, texts(8))
    assert scores[:4] == [Score(float(i), float(i)) for i in range(4)]
    reason = "the service could not be reached (RemoteProtocolError), after 2 attempts"
    assert scores[4:] == [Score.failed(reason)] * 4
    assert len(posts(stub)) == 2 + 2 * 2
    assert "sample s7" in caplog.text
    assert "127.0.0.1" not in caplog.text


def test_another_version_is_refused_at_once_and_half_way(server: Stub) -> None:
    expecting = RemoteReward(url=server.url, reward="mine", reward_version="6", **QUICK)
    assert len(expecting.preflight()) == 1
    assert refusal(expecting.score, texts(1)) == ("rewards.remote.reward_version", "6")
    assert posts(server) == []
    reward = RemoteReward(url=server.url, reward="mine", **QUICK)
    reward.score(texts(1))
    server.respond = lambda requested: Reply(scored(requested, version="8"))
    assert refusal(reward.score, texts(1)) == ("rewards.remote.reward_version", "7")


@pytest.mark.parametrize(
    ("wrong", "value"),
    [
        ({"scores": [{"sample_id": "s0", "value": "high"}] * 2}, "scores.0.value: "),
        ({"scores": None}, "scores: "),
        ({"scores": [{"sample_id": "s0", "value": True}] * 2}, "scores.0.value: "),
        ({"scores": [{"sample_id": "s0", "value": 1.0, "failure": "both"}] * 2}, "scores.0: "),
        ({"protocol": 2}, "protocol: "),
        ({"reward": "other"}, "scores of the reward 'other'"),
    ],
)
def test_wrong_answers_are_an_error(server: Stub, wrong: dict[str, Any], value: str) -> None:
    server.respond = answering(**wrong)
    place, found = refusal(RemoteReward(url=server.url, reward="mine", **QUICK).score, texts(2))
    assert place == f"{server.url}/v1/score"
    assert str(found).startswith(value)


def test_provenance_has_the_version_and_no_address(server: Stub, closed_url: str) -> None:
    requested = provenance_of(RemoteReward(url=server.url, reward="mine", **QUICK))
    pinned = provenance_of(RemoteReward(url=closed_url, reward="mine", reward_version="7", batch_size=3, **QUICK))
    assert requested == pinned
    sent = {"by_group": False, "with_targets": False, "with_sources": False}
    assert requested["settings"] == {"reward": "mine", "reward_version": "7", **sent}
    unreachable = RemoteReward(url=closed_url, reward="mine", **QUICK)
    assert refusal(provenance_of, unreachable) == ("rewards.remote.url", closed_url)


@pytest.mark.parametrize(
    ("description", "message"),
    [
        (described(), ""),
        (described(needs_group=True), r"by_group: got False\."),
        ({"protocol": 1, "rewards": []}, r"rewards\.remote\.reward: got 'mine'\."),
        ({"protocol": 3, "rewards": []}, r"v1/describe: got 'protocol: "),
        ([1, 2], "v1/describe: got '"),
        (described(media=["smell"]), r"rewards\.0\.media"),
        (None, r"rewards\.remote\.url: got 'http"),
    ],
)
def test_preflight(server: Stub, closed_url: str, description: Any, message: str) -> None:
    server.script(Reply(description))
    url = closed_url if description is None else server.url
    problems = RemoteReward(url=url, reward="mine", **QUICK).preflight()
    assert [bool(re.search(message, problem)) for problem in problems] == [True] * bool(message), problems


def test_images_in_prompts_go_along_where_the_server_needs_them(stub: Stub) -> None:
    stub.respond = lambda asked: Reply(described(needs_sources=True) if asked.method == "GET" else scored(asked))
    batch = make_texts("x", "", source_images=[[flat(1)], []])
    without = RemoteReward(url=stub.url, reward="mine", **QUICK)
    assert refusal(without.score, batch)[0] == "rewards.remote.with_sources"
    reward = RemoteReward(url=stub.url, reward="mine", with_sources=True, **QUICK)
    assert reward.needs.sources == "optional"
    assert reward.score(batch) == [Score(1.0, 1.0), Score(0.0, 0.0)]
    first, second = posts(stub)[0]["samples"]
    assert len(first["sources"]) == 1
    assert "sources" not in second
    assert provenance_of(reward)["settings_digest"] != provenance_of(without)["settings_digest"]
