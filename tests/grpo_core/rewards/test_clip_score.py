""""""

import logging
from pathlib import Path

import open_clip
import pytest
import torch

from grpo_core.errors import InputError
from grpo_core.rewards.clip_rewards import NO_DIRECTION, ClipScoreReward
from grpo_core.rewards.reward import Score, ScoringBatch
from grpo_core.seeds import file_sha256
from tests.grpo_core.rewards.conftest import flat, noise, save_changed
from tests.grpo_core.rewards.conftest import make_batch as make_image_batch

PROMPTS = ("a red heart", "two blue squares", "a red heart", "nothing at all")


def make_batch(prompts: tuple[str, ...] = PROMPTS) -> ScoringBatch:
    images = [flat(255), noise(0, 40, 50), noise(1, 32, 32), flat(0)][: len(prompts)]
    return make_image_batch(images, prompts=prompts)


@pytest.fixture
def reward(clip_config: Path, clip_weights: Path) -> ClipScoreReward:
    return ClipScoreReward(model=str(clip_config), weights=str(clip_weights))


def test_value_and_raw_equal_open_clip_itself(reward: ClipScoreReward, clip_oracle: torch.nn.Module) -> None:
    batch, tokenizer = make_batch(), open_clip.get_tokenizer("ViT-B-32")
    scores = reward.score(batch)
    with torch.no_grad():
        pixels = torch.stack([clip_oracle.transform(image) for image in batch.images])
        images = clip_oracle.encode_image(pixels, normalize=True)
        texts = clip_oracle.encode_text(tokenizer(list(batch.prompts)), normalize=True)
    cosines = (images * texts).sum(1).tolist()
    assert [score.raw for score in scores] == pytest.approx(cosines, abs=1e-6)
    assert [score.value for score in scores] == pytest.approx([max(cosine, 0) for cosine in cosines], abs=1e-6)
    # Both sides of zero are among them, or the floor would not have been seen.
    assert min(cosines) < -0.01
    assert max(cosines) > 0.01


def test_scale_multiplies_and_ends_at_one(reward: ClipScoreReward, clip_config: Path, clip_weights: Path) -> None:
    raws = [score.raw for score in reward.score(make_batch())]
    for scale in (2.5, 100.0):
        scaled = ClipScoreReward(model=str(clip_config), weights=str(clip_weights), scale=scale).score(make_batch())
        assert [score.raw for score in scaled] == raws
        assert [s.value for s in scaled] == pytest.approx([min(max(scale * r, 0), 1) for r in raws if r is not None])


@pytest.mark.parametrize(("words", "long"), [(75, False), (76, True)])
def test_long_prompts_are_cut_with_a_warning_or_refused(
    clip_config: Path, clip_weights: Path, caplog: pytest.LogCaptureFixture, words: int, long: bool
) -> None:
    batch = make_batch(("short", "cat " * words, "dog " * words))
    settings = {"model": str(clip_config), "weights": str(clip_weights)}
    with caplog.at_level(logging.WARNING):
        cut = ClipScoreReward(**settings).score(batch)
    assert ("2 of 3 prompts are longer than the 77 tokens" in caplog.text) == long
    refusing = ClipScoreReward(**settings, long_prompts="refuse")
    if not long:
        assert refusing.score(batch) == cut
        return
    with pytest.raises(InputError, match="sample s1: got 'prompt of 78 tokens'"):
        refusing.score(batch)
    beginning = make_batch(("short", "cat " * 75, "dog " * 75))
    assert ClipScoreReward(**settings).score(beginning) == cut


def test_embedding_without_direction_is_a_failure(clip_config: Path, clip_weights: Path, tmp_path: Path) -> None:
    path = save_changed(clip_weights, tmp_path / "zero.safetensors", {"text_projection": torch.zeros_like})
    scores = ClipScoreReward(model=str(clip_config), weights=str(path)).score(make_batch())
    assert scores == [Score.failed(NO_DIRECTION)] * 4


def test_provenance_names_the_content_and_no_path(
    reward: ClipScoreReward, clip_config: Path, clip_weights: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "elsewhere.json"
    moved.write_bytes(clip_config.read_bytes())
    assert reward.weight_digests() == {"clip": file_sha256(str(clip_weights))}
    assert reward.version == f"1+open-clip-{open_clip.__version__}"
    assert ClipScoreReward(model=str(moved), weights=str(clip_weights)).settings() == reward.settings()
    assert str(clip_config) not in str(reward.settings())
    moved.write_text(clip_config.read_text().replace("0.4", "0.3"))
    assert ClipScoreReward(model=str(moved), weights=str(clip_weights)).settings() != reward.settings()
    assert ClipScoreReward().settings()["pretrained"] == "openai"


def test_preflight_reports_everything_at_once(clip_config: Path) -> None:
    absent = f"cuda:{torch.cuda.device_count()}"
    first, second = ClipScoreReward(device=absent).preflight()
    assert first.startswith("rewards.clip_score.weights: got None.")
    assert "hf://timm/vit_large_patch14_clip_224.openai/open_clip_model.safetensors" in first
    assert second.startswith(f"rewards.clip_score.device: got '{absent}'")
    for settings, start in (
        ({"model": "ViT-L-14"}, "model: got 'ViT-L-14'"),
        ({"model": "no.json"}, "model: got 'no.json'"),
        (
            {"model": str(clip_config), "weights": str(clip_config), "weights_sha256": "0" * 8},
            "weights_sha256: got '00000000'",
        ),
    ):
        message = ClipScoreReward(**settings).preflight()[0]
        assert message.startswith(f"rewards.clip_score.{start}")
