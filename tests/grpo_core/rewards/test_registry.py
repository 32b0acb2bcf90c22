import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from grpo_core.errors import InputError
from grpo_core.records import Modality
from grpo_core.rewards.registry import REWARDS, build_reward, reward_class
from grpo_core.rewards.reward import Reward, Score
from tests.grpo_core.rewards.conftest import flat, make_batch, noise

# What a reward needs to be asked anything; None where that is weights or a server, which tests of its own provide.
ASKED_WITH: Mapping[str, Mapping[str, object] | None] = {
    "ssim": {},
    "psnr": {},
    "mse": {},
    "lpips": {},
    "text_accuracy": {},
    "clip_score": None,
    "aesthetic": None,
    "pickscore": None,
    "hpsv2": None,
    "jpeg": {},
    "edge_density": {},
    "sharpness": {},
    "colour_entropy": {},
    "diversity": {},
    "answer": {},
    "format": {"format": "think_answer"},
    "box_iou": {},
    "reward_model": None,
    "judge": None,
    "function": {"function": "trl.rewards:think_format_reward"},
    "remote": None,
}


def all_rewards(trunk_file: Path, modality: Modality = "image") -> list[Reward]:
    given = {**ASKED_WITH, "lpips": {"weights": str(trunk_file)}}
    built = [build_reward(name, settings) for name, settings in given.items() if settings is not None]
    # Any function says that it takes images too.
    return [
        reward for reward in built if modality in reward.media and (modality == "text" or reward.name != "function")
    ]


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("sim", {}, r"rewards: got 'sim'. There is no such reward. Did you mean ssim\? Known: .*jpeg"),
        ("clip", {}, r"rewards: got 'clip'. There is no such reward. Did you mean .*clip_score.*\? Known: "),
        ("zzz", {}, r"rewards: got 'zzz'. There is no such reward. Known: ssim, psnr, mse, lpips, .*, remote\."),
        ("jpeg", {"qualty": 3}, r"rewards.jpeg: got 'qualty'.*Did you mean quality\?"),
        ("lpips", {"weight": "x"}, r"rewards.lpips: got 'weight'.*Did you mean weights or weights_sha256\?"),
        ("ssim", {"window": 7}, r"rewards.ssim: got 'window'.*It takes no settings"),
        ("jpeg", {"quality": "high"}, r"rewards.jpeg.quality: got 'high'"),
        # Fixed properties of a reward are no settings.
        ("jpeg", {"version": "2"}, r"rewards.jpeg: got 'version'"),
        ("jpeg", {"needs_target": True}, r"rewards.jpeg: got 'needs_target'"),
    ],
)
def test_wrong_names_and_settings_are_told_with_the_nearest(
    name: str, settings: Mapping[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        build_reward(name, settings)


def test_every_reward_keeps_the_protocol(trunk_file: Path) -> None:
    rewards = [*all_rewards(trunk_file), *all_rewards(trunk_file, "text")]
    assert set(REWARDS) == set(ASKED_WITH) == {str(reward_class(name).name) for name in REWARDS}
    for reward in rewards:
        assert isinstance(reward, Reward)
        assert json.loads(json.dumps(reward.settings())) == reward.settings()
        assert str(trunk_file.parent) not in json.dumps(reward.settings())
        assert reward.preflight() == []
        if reward.media == ("image",):
            (score,) = reward.score(make_batch([flat(7)]))
            # Without a target, siblings or quoted words there is nothing to say.
            silent = reward.needs_target or reward.needs_group or reward.name == "text_accuracy"
            assert (score == Score(None, None)) == silent


def test_settings_build_the_same_reward_again() -> None:
    reward = build_reward("jpeg", {"quality": 30, "direction": "incompressible"})
    assert build_reward("jpeg", reward.settings()) == reward


SAMPLES: list[tuple[Image.Image, Image.Image | None]] = [
    (noise(0, 32, 32), noise(1, 32, 32)),
    (noise(2, 32, 32), noise(1, 32, 32)),
    (flat(60, 48, 33), noise(3, 96, 66)),
    (noise(4, 40, 31), None),
    (flat(0), flat(255)),
    (noise(5, 64, 64), noise(5, 64, 64)),
]


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.lists(st.integers(0, len(SAMPLES) - 1), min_size=1, max_size=8))
def test_a_score_depends_on_its_sample_alone(trunk_file: Path, order: list[int]) -> None:
    images, targets = zip(*(SAMPLES[i] for i in order), strict=True)
    for reward in all_rewards(trunk_file):
        together = reward.score(make_batch(images, targets))
        alone = [reward.score(make_batch([image], [target]))[0] for image, target in zip(images, targets, strict=True)]
        assert list(together) == alone
        for score in together:
            assert score.value is None or 0 <= score.value <= 1


def test_images_are_left_as_they_were(trunk_file: Path) -> None:
    image, target = noise(0, 32, 32), noise(1, 64, 64)
    before = image.tobytes(), target.tobytes()
    for reward in all_rewards(trunk_file):
        reward.score(make_batch([image], [target]))
    assert (image.tobytes(), target.tobytes()) == before
