"""`grpo rewards`, and rewards through a whole run: the shipped mix weighed by hand, a service that breaks down."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml
from typer.testing import CliRunner

from configs.scoring import RewardSection
from flows.command_line.main import application
from flows.rewards.server import create_app
from grpo_core.errors import FailedSamplesError
from grpo_core.rewards.registry import REWARDS
from tests.flows.conftest import REPOSITORY, Runs, Start
from tests.flows.rewards.test_server import QUICK, serving_app
from tests.grpo_core.rewards.conftest import (
    aesthetic_head,
    alexnet,
    clip_config,
    clip_oracle,
    clip_weights,
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
