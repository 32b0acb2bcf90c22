"""`grpo rewards`, and the shipped mix of rewards weighed by hand."""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import yaml
from typer.testing import CliRunner

from flows.command_line.main import application
from grpo_core.rewards.registry import REWARDS
from tests.flows.conftest import REPOSITORY, Runs
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
