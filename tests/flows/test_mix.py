"""The shipped mix of rewards through a whole run: each where it applies, weighed by hand afterwards."""

import json
from pathlib import Path
from typing import Any

import open_clip
import polars as pl
import pytest
import safetensors.torch
import torch
import torchvision
import yaml
from typer.testing import CliRunner

from flows.command_line.main import application
from grpo_core.rewards.registry import REWARDS
from tests.flows.conftest import REPOSITORY, Runs

WIDTH = 12
CLIP = {
    "embed_dim": WIDTH,
    "quick_gelu": True,
    "vision_cfg": {"image_size": 32, "layers": 1, "width": 16, "head_width": 8, "patch_size": 16},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 1},
}
SHAPES = {"prompts": "data/prompts/shapes_train.jsonl", "targets": "data/targets", "target_column": "target"}
DATASETS = [{"name": "shapes", **SHAPES}, {"name": "signs", "prompts": "data/prompts/signs_train.jsonl"}]


@pytest.fixture
def weights(tmp_path: Path) -> dict[str, dict[str, object]]:
    """Small random networks in the files that the released ones come in; the settings that name them."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        torch.save(torchvision.models.alexnet(weights=None).state_dict(), tmp_path / "alexnet.pth")
        config = {"model_cfg": CLIP, "preprocess_cfg": {"mean": [0.5] * 3, "std": [0.5] * 3}}
        (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
        clip = open_clip.create_model(f"local-dir:{tmp_path}", load_weights=False)
        safetensors.torch.save_file(clip.state_dict(), tmp_path / "open_clip_model.safetensors")
        sizes = (WIDTH, 1024, 128, 64, 16, 1)
        places = (0, 2, 4, 6, 7)
        head = {}
        for place, before, after in zip(places, sizes, sizes[1:], strict=False):
            head[f"layers.{place}.weight"] = torch.randn(after, before) / before**0.5
            head[f"layers.{place}.bias"] = torch.full((after,), 1.0)
        torch.save(head, tmp_path / "head.pth")
    return {
        "lpips": {"weights": str(tmp_path / "alexnet.pth")},
        "aesthetic": {
            "model": str(tmp_path / "open_clip_config.json"),
            "weights": str(tmp_path / "open_clip_model.safetensors"),
            "head": str(tmp_path / "head.pth"),
        },
    }


def test_the_shipped_mix_weighs_what_applies(empty: Runs, weights: dict[str, dict[str, object]]) -> None:
    shipped = yaml.safe_load((REPOSITORY / "configs" / "glm_image_mix.yaml").read_text())["rewards"]
    mix = [{**each, "processes": 0, "settings": weights.get(each["reward"], {})} for each in shipped]
    changes: dict[str, Any] = {"run__iterations": 1, "rewards": mix, "data": {"datasets": DATASETS}}
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
    named = {each["reward"]: each for each in map(json.loads, provenance)}
    assert set(named["aesthetic"]["weights"]) == {"clip", "head"}
    assert all(len(digest) == 64 for each in named.values() for digest in each["weights"].values())
    assert named["text_accuracy"]["version"].startswith("2+rapidocr")


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


def test_the_program_lists_every_reward() -> None:
    result = CliRunner().invoke(application, ["rewards", "list", "--json"])
    assert result.exit_code == 0
    assert set(json.loads(result.stdout.splitlines()[-1])) == set(REWARDS)
