"""Rewards that compare with a source image of the prompt, in place of its target."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from grpo_core.rewards.embedding.clip_rewards import ClipScoreReward, load_clip
from grpo_core.rewards.registry import build_reward
from grpo_core.rewards.reward import provenance_of
from grpo_core.rewards.scoring_batch import NOT_APPLICABLE, ScoringBatch
from grpo_core.rewards.similarity.pairs import MseReward, PsnrReward, R2Reward, SsimReward
from tests.grpo_core.rewards.conftest import flat, make_batch, noise, refusal

STRIPES = Image.new("RGB", (32, 32), (51, 51, 51))
STRIPES.paste((153, 153, 153), (0, 0, 32, 16))


def edits(images: list[Image.Image], sources: list[list[Image.Image]], **more: Any) -> ScoringBatch:
    return make_batch(images, source_images=sources, **more)


def test_samples_are_compared_with_their_source_and_not_with_their_target() -> None:
    batch = edits([flat(51), flat(51), flat(51)], [[flat(0)], [flat(51), flat(153)], []], targets=[flat(51)] * 3)
    scores = MseReward(against="source").score(batch)
    # 51 levels are 0.2, whose square is 0.04 of 0.25.
    assert [score.raw for score in scores] == [pytest.approx(0.04), 0.0, None]
    assert [score.value for score in scores] == [pytest.approx(0.84), 1.0, None]
    assert scores[2] == NOT_APPLICABLE
    second = MseReward(against="source", source_index=1).score(batch)
    # 102 levels are 0.4.
    assert [score.raw for score in second] == [None, pytest.approx(0.16), None]
    assert [score.raw for score in MseReward().score(batch)] == [0.0] * 3


def test_every_pairwise_reward_has_the_same_reference() -> None:
    batch = edits([STRIPES], [[STRIPES.transpose(Image.Transpose.FLIP_TOP_BOTTOM)]])
    # Each half is off by 0.4; the variance of the source is 0.2 squared.
    assert MseReward(against="source").score(batch)[0].raw == pytest.approx(0.16)
    assert PsnrReward(against="source").score(batch)[0].raw == pytest.approx(7.9588, abs=1e-4)
    assert R2Reward(against="source").score(batch)[0].raw == pytest.approx(-3.0)
    (same,) = SsimReward(against="source").score(edits([STRIPES], [[STRIPES]]))
    assert same.raw == pytest.approx(1.0)
    (score,) = R2Reward(against="source").score(edits([STRIPES], [[flat(77)]]))
    assert score.failure == "the source has a single colour, so there is no variance to explain"


def test_a_source_takes_the_size_of_the_sample_or_is_refused() -> None:
    wide, tall = flat(51, 64, 32), flat(51, 32, 64)
    (score,) = MseReward(against="source").score(edits([flat(0, 32, 16)], [[wide]]))
    assert score.raw == pytest.approx(0.04)
    found = refusal(MseReward(against="source").score, edits([flat(0, 32, 16)], [[tall]]))
    assert found == ("rewards.mse, sample s0, source", "target of 32x64 pixels")


def test_lpips_measures_the_distance_to_the_source(trunk_file: Path) -> None:
    settings = {"weights": str(trunk_file)}
    image, source = noise(0, 48, 48), noise(1, 48, 48)
    (with_target,) = build_reward("lpips", settings).score(make_batch([image], [source]))
    (with_source,) = build_reward("lpips", {**settings, "against": "source"}).score(edits([image], [[source]]))
    assert with_source == with_target
    assert with_source.raw is not None
    assert with_source.raw > 0


def test_clip_compares_embeddings_of_both_images(clip_config: Path, clip_weights: Path) -> None:
    settings = {"model": str(clip_config), "weights": str(clip_weights)}
    image, source = noise(0, 40, 50), noise(1, 96, 32)
    reward = ClipScoreReward(**settings, against="source")
    # A prompt that CLIP does not read may have any length.
    prompts = ["word " * 200] * 3
    same, other, none = reward.score(edits([image] * 3, [[image], [source], []], prompts=prompts))
    model = load_clip(reward)
    first, second = model.image_embeddings([image, source])
    cosine = float(first @ second)
    assert same.raw == pytest.approx(1.0)
    assert other.raw == pytest.approx(cosine, abs=1e-6)
    assert none == NOT_APPLICABLE
    (target,) = ClipScoreReward(**settings, against="target").score(make_batch([image], [source]))
    assert target == other
    assert cosine < 0.999


def test_the_reference_is_part_of_the_provenance_where_it_is_not_the_usual_one() -> None:
    """What was scored before there was a choice has the provenance that it had."""
    assert MseReward().settings() == {"full_scale": 0.25}
    assert SsimReward(against="target").settings() == {}
    assert MseReward(against="source").settings() == {"full_scale": 0.25, "against": "source", "source_index": 0}
    digests = {
        provenance_of(reward)["settings_digest"]
        for reward in (SsimReward(), SsimReward(against="source"), SsimReward(against="source", source_index=1))
    }
    assert len(digests) == 3
    assert "against" not in ClipScoreReward().settings()
    assert ClipScoreReward(against="source").settings()["against"] == "source"
    assert (SsimReward().needs.target, SsimReward().needs.source) == (True, None)
    changed = dataclasses.replace(SsimReward(), against="source", source_index=1)
    assert (changed.needs.target, changed.needs.source) == (False, 1)
    assert (ClipScoreReward().needs.target, ClipScoreReward().needs.source) == (False, None)


@pytest.mark.parametrize(
    ("name", "settings", "place"),
    [
        ("ssim", {"against": "prompt"}, "rewards.ssim.against"),
        ("ssim", {"against": "source", "source_index": -1}, "rewards.ssim.source_index"),
        ("ssim", {"source_index": 1}, "rewards.ssim.source_index"),
        ("lpips", {"source_index": 1}, "rewards.lpips.source_index"),
        ("clip_score", {"source_index": 1}, "rewards.clip_score.source_index"),
        ("clip_score", {"against": "sources"}, "rewards.clip_score.against"),
    ],
)
def test_a_reference_that_the_reward_does_not_have_is_refused(name: str, settings: dict[str, Any], place: str) -> None:
    assert refusal(build_reward, name, settings)[0] == place


def test_outside_of_a_run_the_sources_are_given() -> None:
    reward = MseReward(against="source")
    (score,) = reward([flat(51)], source_images=[[flat(0)]])
    assert score.raw == pytest.approx(0.04)
    assert refusal(reward, [flat(51)])[0] == "rewards.mse, source_images"
    assert refusal(reward, [flat(51)], source_images=[])[0] == "rewards.mse, source_images"
