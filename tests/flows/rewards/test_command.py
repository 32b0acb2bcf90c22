"""`grpo rewards`, rewards through a whole run, a service that breaks down; answers of a server, and what it refuses."""

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import polars as pl
import pytest
import yaml
from typer.testing import CliRunner

from configs.scoring import RewardSection
from flows.command_line.main import application
from flows.rewards.answers import RequestLimits, answer_request, describe_reward
from flows.rewards.server import create_app
from grpo_core.errors import FailedSamplesError
from grpo_core.rewards.image_statistics import JpegReward
from grpo_core.rewards.ocr.text_accuracy import MAX_ASPECT, TextAccuracyReward
from grpo_core.rewards.registry import REWARDS
from grpo_core.rewards.remote import wire
from grpo_core.rewards.reward import Needs, Reward
from grpo_core.rewards.scoring_batch import Score, ScoringBatch
from grpo_core.rewards.similarity.lpips import LpipsReward
from grpo_core.rewards.similarity.pairs import SsimReward
from grpo_core.rewards.text.rules import AnswerReward
from grpo_core.rollouts.streams import MAX_PIXELS
from tasks.progress import listen
from tests.flows.conftest import REPOSITORY, Runs, Start
from tests.flows.rewards.test_server import QUICK, serving_app
from tests.grpo_core.rewards.conftest import (
    aesthetic_head,
    alexnet,
    clip_config,
    clip_oracle,
    clip_weights,
    flat,
    make_batch,
    make_texts,
    noise,
    trunk_file,
)

__all__ = ["aesthetic_head", "alexnet", "clip_config", "clip_oracle", "clip_weights", "trunk_file"]

SHAPES = {"prompts": "data/prompts/shapes_train.jsonl", "targets": "data/targets", "target_column": "target"}
DATASETS = [{"name": "shapes", **SHAPES}, {"name": "signs", "prompts": "data/prompts/signs_train.jsonl"}]


@pytest.fixture
def weights(
    trunk_file: Path, clip_config: Path, clip_weights: Path, aesthetic_head: Path
) -> dict[str, dict[str, object]]:
    """Small random networks in the files that the released ones come in; the settings that name them."""
    clip = {"model": str(clip_config), "weights": str(clip_weights)}
    return {"lpips": {"weights": str(trunk_file)}, "aesthetic": {**clip, "head": str(aesthetic_head)}}


def test_the_shipped_mix_weighs_what_applies(empty: Runs, weights: dict[str, dict[str, object]]) -> None:
    shipped = yaml.safe_load((REPOSITORY / "configs" / "glm_image_mix.yaml").read_text())["rewards"]
    mix = [{**each, "processes": 0, "settings": weights.get(each["reward"], {})} for each in shipped]
    # Of this seed's two prompts each set has one.
    changes: dict[str, Any] = {"run__iterations": 1, "run__seed": 1, "rewards": mix, "data": {"datasets": DATASETS}}
    run = empty.start(**changes)
    assert sorted(stage for stage in run.stages if "score" in stage) == [
        f"iteration 1: score {name}" for name in ("aesthetic", "lpips", "ssim", "text_accuracy")
    ]
    table = pl.read_parquet(empty.path("iteration_000001", "advantages", "advantages.parquet"))
    assert set(table["dataset"]) == {"shapes", "signs"}
    for row in table.iter_rows(named=True):
        values = {each["reward"]: each["value"] for each in row["reward_breakdown"]}
        # A reward is left out of the groups that it is not meant for, as if they had been configured without it.
        if row["dataset"] == "shapes":
            assert values["text_accuracy"] is None
            expected = 0.4 * values["lpips"] + 0.2 * values["ssim"] + 0.1 * values["aesthetic"]
        else:
            assert values["lpips"] is values["ssim"] is None
            expected = 0.3 * values["text_accuracy"] + 0.1 * values["aesthetic"]
        assert row["reward"] == pytest.approx(expected)
    provenance = pl.read_parquet(empty.path("iteration_000001", "rewards", "*", "scores.parquet"))["provenance"]
    named = {each["reward"]: each for each in map(json.loads, provenance.drop_nulls())}
    assert set(named["aesthetic"]["weights"]) == {"clip", "head"}
    assert all(len(digest) == 64 for each in named.values() for digest in each["weights"].values())
    assert "+rapidocr-" in named["text_accuracy"]["version"]


def test_missing_weights_are_told_before_the_run_with_who_publishes_them(empty: Runs) -> None:
    mix = REPOSITORY / "configs" / "rewards" / "mix.yaml"
    rewards = json.dumps(yaml.safe_load(mix.read_text())["rewards"])
    result = CliRunner().invoke(
        application,
        ["train", "configs/tiny.yaml", "--set", f"rewards={rewards}", "--set", f"storage.root={empty.root}"],
    )
    assert result.exit_code == 2
    for told in ("alexnet-owt-7be5be79.pth", "download.pytorch.org", "linearMSE.pth", "improved-aesthetic-predictor"):
        assert told in result.output
    assert not empty.root.exists()


def test_a_command_that_is_gone_says_where_weights_come_from() -> None:
    result = CliRunner().invoke(application, ["rewards", "fetch", "lpips", "--to", "weights", "--yes"])
    assert result.exit_code == 2
    assert "hf://owner/repo/file" in result.stderr
    assert "fetch" not in CliRunner().invoke(application, ["rewards", "--help"]).stdout


def test_the_program_lists_every_reward() -> None:
    result = CliRunner().invoke(application, ["rewards", "list", "--json"])
    assert result.exit_code == 0
    assert set(json.loads(result.stdout.splitlines()[-1])) == set(REWARDS)


class Mortal:
    """The server's application; after so many answers it breaks down over every request."""

    def __init__(self, answers: int) -> None:
        self.app: Any = create_app([RewardSection(reward="answer")])
        self.left = answers

    async def __call__(self, scope: Mapping[str, Any], receive: Any, send: Any) -> None:
        if scope.get("path") == "/v1/score":
            self.left -= 1
            if self.left < 0:
                raise ConnectionAbortedError("broken down")
        await self.app(scope, receive, send)


@pytest.mark.slow
def test_the_run_stops_by_name_keeps_what_it_has_and_goes_on_when_the_service_is_back(empty: Runs) -> None:
    def start(runs: Runs) -> Start:
        remote = {"url": url, "reward": "answer", "batch_size": 4, **QUICK}
        rewards = [{"reward": "remote", "settings": remote, "max_failures": 0.1}, {"reward": "answer"}]
        sizes = {"rollout__prompts_per_iteration": 2, "rollout__group_size": 8, "update__minibatch_size": 16}
        return runs.start_text(run__iterations=3, rewards=rewards, evaluate__prompts=None, **sizes)

    mortal = Mortal(10_000)
    with serving_app(mortal) as url:
        undisturbed = start(Runs(empty.root / "golden"))
        # Four requests an iteration: the second iteration gets half of its answers.
        mortal.left = 6
        with pytest.raises(FailedSamplesError) as caught:
            start(empty)
        assert (caught.value.reward, len(caught.value.failed), caught.value.total) == ("remote", 8, 16)
        assert "status 500" in caught.value.failed[0]
        second = empty.path("iteration_000002", run="text")
        assert not (second / "rewards" / "remote.manifest.json").exists()
        assert (second / "rollouts.manifest.json").exists()
        assert (second / "rewards" / "answer.manifest.json").exists()
        mortal.left = 10_000
        again = start(empty)
    assert again.stages[0] == "iteration 2: score remote"
    assert not {"iteration 2: collect rollouts", "iteration 2: score answer"} & set(again.stages)
    assert again.summary.policy_digest == undisturbed.summary.policy_digest


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


SERVED: Mapping[str, Reward] = {
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
    status, answer = answer_request(SERVED, RequestLimits(**limits), content)
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
    assert answer_request(SERVED, RequestLimits(max_characters=characters), body("answer", batch))[0] == 200
    status, said = refused(body("answer", batch), max_characters=characters - 1)
    assert (status, f"{characters} characters" in said) == (413, True)


def test_images_beyond_the_limits_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    within = make_batch([flat(1, 30, 10), flat(2, 20, 10)], [flat(1, 30, 10), flat(2, 20, 10)])
    beyond = make_batch([*within.images, flat(3, 1, 1)], [*within.targets, None])
    assert answer_request(SERVED, RequestLimits(max_pixels=1000), body("jpeg", within))[0] == 200
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
