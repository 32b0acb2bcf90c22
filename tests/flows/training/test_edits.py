"""Trainings of the tiny GLM-Image that edits: images in prompts from the prompt file to the update."""

import json
from pathlib import Path

import polars as pl

from data.recipes.edits import choose_edits, split_edits, write_edit_file
from flows import train
from tests.flows.conftest import TINY_BOTH, Runs


def mixed_prompts(folder: Path) -> Path:
    """Two edits and a caption."""
    seen, _ = split_edits(0, 0.1)
    file = folder / "edits.jsonl"
    write_edit_file(choose_edits(seen, 2, 0), file, folder / "targets")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    caption = {**rows[0], "prompt": "a red circle in the center on a white background", "image": None}
    file.write_text("".join(json.dumps(row) + "\n" for row in (rows[0], caption, rows[1])))
    return file


def test_prompts_with_and_without_images_train_both_streams_of_one_run(empty: Runs, tmp_path: Path) -> None:
    file = mixed_prompts(tmp_path)
    changes = {
        "run.name": "run",
        "run.iterations": 1,
        "storage.root": str(empty.root),
        "policy.model": "data/models/tiny-glm-image-edit",
        "data.prompts": str(file),
        "data.image_column": "image",
        "data.targets": str(tmp_path / "targets"),
        "rollout.prompts_per_iteration": 3,
        "rollout.prompts_per_batch": 3,
        "rollout.group_size": 2,
        "rollout.images_per_sample": 2,
        "rollout.guidance_scale": 1.5,
        "rewards": [{"reward": "ssim"}],
        "update.tokens.minibatch_size": None,
        "update.denoising.minibatch_size": None,
        "evaluate": {"every": 0},
    }
    overrides = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    summary = train(TINY_BOTH, overrides=overrides, progress=False)
    assert summary.iterations == 1
    metrics = empty.metrics(1)
    assert metrics["sampling/sampling_logp_difference/max"] < 1e-4
    assert metrics["denoising/sampling/sampling_logp_difference/max"] < 1e-5
    rows = pl.read_parquet(empty.path("iteration_000001", "rollouts", "part-*.parquet"))
    of_prompts = {
        prompt: (images, length)
        for prompt, images, length in rows.select("prompt", pl.col("sources").list.len(), "length").unique().iter_rows()
    }
    assert sorted(of_prompts.values()) == [(0, 16 + 64), (1, 64), (1, 64)]
