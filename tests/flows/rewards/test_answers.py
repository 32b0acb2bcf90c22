"""Answers of a server of rewards: what is scored, and what is refused before anything large is decoded."""

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from flows.rewards.answers import RequestLimits, answer_request, describe_reward
from grpo_core.rewards.image_statistics import JpegReward
from grpo_core.rewards.ocr.text_accuracy import MAX_ASPECT, TextAccuracyReward
from grpo_core.rewards.remote import wire
from grpo_core.rewards.reward import Needs, Reward
from grpo_core.rewards.scoring_batch import Score, ScoringBatch
from grpo_core.rewards.similarity.lpips import LpipsReward
from grpo_core.rewards.similarity.pairs import SsimReward
from grpo_core.rewards.text.rules import AnswerReward
from grpo_core.rollouts.streams import MAX_PIXELS
from tasks.progress import listen
from tests.grpo_core.rewards.conftest import flat, make_batch, make_texts, noise


@dataclass(frozen=True)
class Broken(Reward):
    """Raises what a server's clients should not read."""

    siblings: bool = False

    name: ClassVar[str] = "broken"
    version: ClassVar[str] = "1"

    def settings(self) -> Mapping[str, object]:
        return {}

    @property
    def needs(self) -> Needs:
        return Needs(("text",), group=self.siblings)

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        raise RuntimeError("a secret of the server")


REWARDS: Mapping[str, Reward] = {
    "jpeg": JpegReward(),
    "likeness": SsimReward(),
    "answer": AnswerReward(),
    "broken": Broken(),
    "siblings": Broken(siblings=True),
}


def body(reward: str, batch: ScoringBatch) -> bytes:
    return wire.write_request(reward, batch, with_targets=True)


def with_sample(reward: str = "jpeg", **sample: Any) -> bytes:
    samples = [{"sample_id": "s", "prompt": "p", **sample}]
    return json.dumps({"protocol": 1, "reward": reward, "samples": samples}).encode()


def refused(content: bytes, **limits: int) -> tuple[int, str]:
    status, answer = answer_request(REWARDS, RequestLimits(**limits), content)
    return status, str(answer["error"])


@pytest.mark.parametrize(
    ("content", "status", "word"),
    [
        (b"", 422, "JSON"),
        (b'{"protocol": 1, "reward": "jpeg", "samples": []}', 422, "samples"),
        (body("jpg", make_batch([flat(1)])), 404, "answer, broken, jpeg, likeness"),
        (body("siblings", make_texts("a")), 422, "group_id"),
        (body("jpeg", make_texts("a")), 422, "these samples are texts"),
        (body("answer", make_batch([flat(1)])), 422, "these samples are images"),
        (body("likeness", make_batch([noise(0, 40, 40)], [noise(0, 40, 60)])), 422, "aspect"),
        (body("likeness", make_batch([noise(0, 8, 8)], [noise(1, 8, 8)])), 422, "11 pixels"),
        (body("answer", make_texts("a", columns={"answer": [3.5]})), 422, "column answer"),
        (with_sample(image=base64.b64encode(b"GIF89a").decode()), 422, "sample s, image: "),
        # A column is bounded like a prompt and a completion, in whatever form.
        (with_sample("answer", completion="a", columns={"answer": "a" * 99_999}), 422, "columns.answer"),
        (with_sample("answer", completion="a", columns={"answer": [["a" * 100] * 1000]}), 422, "columns.answer"),
        (with_sample("answer", completion="a", columns={str(n): n for n in range(257)}), 422, "columns"),
        (with_sample("answer", completion="a", token_ids=[1] * 100_001), 422, "token_ids"),
    ],
)
def test_wrong_requests_are_refused_with_the_reason(content: bytes, status: int, word: str) -> None:
    found, said = refused(content)
    assert (found, word in said) == (status, True)


def test_the_texts_of_a_request_are_bounded_together() -> None:
    # Two prompts of 6 characters, completions of 3 and 3, and the values "cat" and null.
    batch = make_texts("cat", "dog", columns={"answer": ["cat", None]})
    characters = sum(map(len, batch.prompts)) + 3 + 3 + 3
    assert answer_request(REWARDS, RequestLimits(max_characters=characters), body("answer", batch))[0] == 200
    status, said = refused(body("answer", batch), max_characters=characters - 1)
    assert (status, f"{characters} characters" in said) == (413, True)


def test_images_beyond_the_limits_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    within = make_batch([flat(1, 30, 10), flat(2, 20, 10)], [flat(1, 30, 10), flat(2, 20, 10)])
    beyond = make_batch([*within.images, flat(3, 1, 1)], [*within.targets, None])
    assert answer_request(REWARDS, RequestLimits(max_pixels=1000), body("jpeg", within))[0] == 200
    monkeypatch.setattr(wire, "read_batch", None)
    status, said = refused(body("jpeg", beyond), max_pixels=1000)
    assert (status, "1001 pixels" in said) == (413, True)
    # One image has as many pixels as one of a run.
    header = bytearray(base64.b64decode(wire.encode_image(flat(1, 1, 1), "it")))
    header[16:24] = (8193).to_bytes(4, "big") + (8192).to_bytes(4, "big")
    header[29:33] = zlib.crc32(bytes(header[12:29])).to_bytes(4, "big")
    status, said = refused(with_sample(image=base64.b64encode(bytes(header)).decode()))
    assert (status, str(MAX_PIXELS) in said) == (422, True)


def test_what_a_reward_raises_is_for_those_who_run_the_server() -> None:
    lines: list[str] = []

    class Kept:
        def advance(self, stage: str, done: int, total: int) -> None: ...

        def log(self, line: str) -> None:
            lines.append(line)

    listen(Kept())
    status, said = refused(body("broken", make_texts("a")))
    assert (status, "RuntimeError" in said, "secret" in said) == (500, True, False)
    assert "a secret of the server" in lines[0]


def test_versions_follow_settings_and_weights(tmp_path: Path) -> None:
    (trunk := tmp_path / "trunk.pth").write_bytes(b"weights")  # nothing loads them
    jpeg = describe_reward("jpeg", JpegReward())
    assert (jpeg.max_aspect, describe_reward("text", TextAccuracyReward()).max_aspect) == (None, MAX_ASPECT)
    assert describe_reward("other name", JpegReward()).version == jpeg.version
    assert describe_reward("jpeg", JpegReward(quality=90)).version != jpeg.version
    lpips = describe_reward("lpips", LpipsReward(weights=str(trunk))).model_dump_json()
    assert (hashlib.sha256(b"weights").hexdigest() in lpips, str(trunk) in lpips) == (True, False)
