"""The stages with broken images and missing rewards."""

import hashlib
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from diffusers import AutoencoderKL
from torch import Tensor

from configs.scoring import RewardSection
from grpo_core.rewards.image_statistics.statistics import JpegReward
from tasks.prompts.targets import TargetReference
from tasks.storage.artifacts.store import ArtifactStore
from tests.tasks.stage_calls import (
    MIX,
    base,
    collect,
    compare,
    compare_rounds,
    plan,
    score,
    scores_of,
    scoring,
    table_of,
    update,
)


def test_an_image_with_broken_pixels_gets_the_lowest_score(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By every reward that applies to it; the first prompt has a target to compare with, the second none."""
    whole = table_of(store, collect(base(), plan()))
    content = whole["image"][0]["bytes"]
    (tmp_path / "target.png").write_bytes(content)
    target = TargetReference(str(tmp_path / "target.png"), hashlib.sha256(content).hexdigest())
    real = AutoencoderKL.decode

    def without_a_corner(self: AutoencoderKL, *arguments: Any, **options: Any) -> tuple[Tensor]:
        (pixels,) = real(self, *arguments, **options)
        pixels[1, :, :16, :8] = torch.nan
        return (pixels,)

    monkeypatch.setattr(AutoencoderKL, "decode", without_a_corner)
    rollouts = collect(base(), plan(targets=(target, None)))
    rows = table_of(store, rollouts)
    reason = "12.5% of the pixels are not numbers"
    assert rows["defect"].to_list() == [None, reason] * 2
    assert whole["defect"].to_list() == [None] * 4
    assert rows["image"].to_list()[::2] == whole["image"].to_list()[::2]
    mix = (*MIX, RewardSection(reward="ssim"))
    judged = score(rollouts, mix=mix)
    jpeg, ssim = (scores_of(store, judged, label) for label in ("jpeg", "ssim"))
    for scores, applies in ((jpeg, (0, 1, 2, 3)), (ssim, (0, 1))):
        for row, scored in enumerate(scores.iter_rows(named=True)):
            assert scored["failure"] is None
            if row not in applies:
                assert (scored["value"], scored["raw"]) == (None, None)
            elif row % 2:
                assert (scored["value"], scored["raw"]) == (0.0, None)
            else:
                assert scored["value"] > 0
    assert judged.rewards["jpeg"].metrics["rewards/jpeg/null"] == 0.0
    assert judged.rewards["ssim"].metrics["rewards/ssim/null"] == 2.0
    advantages = table_of(store, compare_rounds((judged,), mix=mix))["advantage"].to_list()
    assert min(advantages[::2]) > 0 > max(advantages[1::2])


def test_samples_without_a_reward_are_left_out_and_none_at_all_is_refused(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts = collect(base(), plan())
    by_name = {"i000001.p0000.s00": 1.0, "i000001.p0000.s01": 0.0}
    monkeypatch.setattr(JpegReward, "score", scoring(by_name.get))
    advantages = compare(score(rollouts))
    table = pl.read_parquet(store.local_files(advantages) / "advantages.parquet")
    assert [value is None for value in table["advantage"]] == [False, False, True, True]
    assert advantages.metrics["advantage/mean"] == pytest.approx(table["advantage"].mean())
    assert advantages.metrics["advantage/std"] == pytest.approx(table["advantage"].std())
    policy = update(base(), rollouts, advantages)
    assert policy.checkpoint is not None
    assert policy.checkpoint.rows == 2
    monkeypatch.setattr(JpegReward, "score", scoring(lambda name: None))
    nothing = compare(score(rollouts))
    assert not [name for name in nothing.metrics if name.startswith("advantage/")]
    with pytest.raises(ValueError, match="every reward of every sample is null"):
        update(base(), rollouts, nothing)
    assert store.find("policies/000001") == policy.checkpoint
