"""Images compared with targets: MSE, PSNR and SSIM by hand and against scikit-image, LPIPS against its package."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import lpips as lpips_package
import numpy as np
import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from skimage.metrics import mean_squared_error as skimage_mse
from skimage.metrics import structural_similarity as skimage_ssim
from torch import Tensor

from grpo_core.rewards.model_reward import Placed
from grpo_core.rewards.scoring_batch import NOT_APPLICABLE, Score
from grpo_core.rewards.similarity.lpips import MIN_SIDES, TRUNKS, LpipsReward, load_network, perceptual_distance
from grpo_core.rewards.similarity.pairs import MseReward, PairReward, PsnrReward, R2Reward, SsimReward
from grpo_core.rewards.similarity.tensors import structural_similarity, to_tensor
from grpo_core.rewards.weights import Weights
from tests.grpo_core.rewards.conftest import flat, make_batch, noise, refusal, refused

RED = Image.new("RGB", (32, 32), (255, 0, 0))
GREY = Image.fromarray((np.indices((32, 32)).sum(0) % 2 * 255).astype(np.uint8)).convert("RGB")
LEFT_RED, LEFT_YELLOW = (Image.new("RGB", (32, 32)) for _ in range(2))
LEFT_RED.paste((255, 0, 0), (0, 0, 16, 32))
LEFT_YELLOW.paste((255, 255, 0), (0, 0, 16, 32))
DOT = flat(100)
DOT.putpixel((5, 5), (100, 101, 100))


@dataclasses.dataclass(frozen=True)
class MeasuredReward(PairReward):
    """Scores by a function of the test."""

    function: Callable[[Tensor, Tensor], Tensor]
    smallest: int = 1
    name = "measured"
    version = "1"

    @property
    def min_side(self) -> int:  # type: ignore[override]
        return self.smallest

    def measure(self, images: Tensor, targets: Tensor) -> Tensor:
        return self.function(images, targets)


def test_samples_without_target_have_no_score_and_targets_take_the_images_size() -> None:
    shapes = []

    def record(images: Tensor, targets: Tensor) -> Tensor:
        shapes.append((tuple(images.shape), tuple(targets.shape)))
        return (images - targets).flatten(1).mean(1)

    images, targets = [flat(255, 40, 20), flat(51), flat(51, 16, 16)], [flat(0, 80, 40), None, flat(0, 64, 64)]
    first, second, third = MeasuredReward(record).score(make_batch(images, targets))
    assert (first, second) == (Score(1.0, 1.0), NOT_APPLICABLE)
    assert third.raw == pytest.approx(0.2)
    assert shapes == [((1, 3, 20, 40),) * 2, ((1, 3, 16, 16),) * 2]


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_nonfinite_is_a_failure_of_that_sample_alone(broken: float) -> None:
    def measure(images: Tensor, targets: Tensor) -> Tensor:
        return torch.tensor([broken if images.sum() > 0 else 0.5])

    first, second, third = MeasuredReward(measure).score(make_batch([flat(9), flat(0), flat(8)], [flat(0)] * 3))
    assert second == Score(0.5, 0.5)
    assert first == third == Score.failed(f"the reward is {broken}, not a finite number")


def test_a_target_of_one_colour_has_no_variance_to_explain() -> None:
    (score,) = R2Reward().score(make_batch([GREY], [flat(77)]))
    assert score == Score.failed("the target has a single colour, so there is no variance to explain")


def test_small_image_is_refused_with_its_size_and_sample() -> None:
    batch = make_batch([flat(0, 32, 10)], [flat(0, 32, 10)], ["p3/4"])
    refused = refusal(MeasuredReward(torch.sub, smallest=11).score, batch)
    assert refused == ("rewards.measured, sample p3/4", "image of 32x10 pixels")


@pytest.mark.parametrize(
    ("reward", "image", "target", "raw", "value"),
    [
        # 0.2^2 of 0.25; one channel of three is beyond the scale, and so is white; grey never is.
        (MseReward(), flat(51), flat(0), 0.04, 0.84),
        (MseReward(), RED, flat(0), 1 / 3, 0.0),
        (MseReward(), flat(255), flat(0), 1.0, 0.0),
        (MseReward(), flat(0), flat(0), 0.0, 1.0),
        (MseReward(), flat(128), GREY, (127**2 + 128**2) / 2 / 255**2, None),
        (MseReward(full_scale=1), flat(51), flat(0), 0.04, 0.96),
        (MseReward(full_scale=0.05), flat(51), flat(0), 0.04, 0.2),
        # MSE 0.2^2, 1/3 and 1.
        (PsnrReward(), flat(51), flat(0), 13.9794000867, 13.9794000867 / 50),
        (PsnrReward(), RED, flat(0), 4.7712125472, 4.7712125472 / 50),
        (PsnrReward(), flat(255), flat(0), 0.0, 0.0),
        # 1 - error / variance: the best single colour has 0, another less; contrast halved about the mean leaves 1/4.
        (R2Reward(), flat(128), GREY, 1 - (127**2 + 128**2) / 2 / 127.5**2, 0.0),
        (R2Reward(), flat(255), GREY, -1.0, 0.0),
        (R2Reward(), GREY, GREY, 1.0, 1.0),
        (R2Reward(), GREY.point(lambda level: 64 + level // 2), GREY, 1 - (64 / 127.5) ** 2, None),
        (R2Reward(), LEFT_RED, LEFT_YELLOW, 1 - (1 / 6) / (2 / 3 * 1 / 4), None),
        # Identical images reach the floor of the error; one level of one channel of one pixel counts.
        (PsnrReward(), noise(0, 9, 7), noise(0, 9, 7), 100.0, 1.0),
        (PsnrReward(), DOT, flat(100), -10 * math.log10((1 / 255) ** 2 / (3 * 32 * 32)), None),
        (PsnrReward(full_scale_db=20), flat(51), flat(0), 13.9794000867, 13.9794000867 / 20),
        (PsnrReward(full_scale_db=10), flat(51), flat(0), 13.9794000867, 1.0),
        # No variance: (2ab + C1) / (a^2 + b^2 + C1) with C1 = 1e-4. Each variance is a difference of two blurs, which
        # sum 22 products in fp32, beside C2 = 9e-4: the score is wrong by up to 44 * 2^-24 * (a + b)^2 / C2 of it, that
        # is by 4e-7 here, and by 1e-2 for bright colours.
        (SsimReward(), flat(255), flat(0), 1e-4 / 1.0001, None),
        (SsimReward(), flat(1), flat(2), (4 / 255**2 + 1e-4) / (5 / 255**2 + 1e-4), None),
        (SsimReward(), flat(0), flat(0), 1.0, 1.0),
    ],
)
def test_by_hand(reward: PairReward, image: Image.Image, target: Image.Image, raw: float, value: float | None) -> None:
    (score,) = reward.score(make_batch([image], [target]))
    assert score.raw == pytest.approx(raw, abs=1e-5)
    assert score.value == pytest.approx(reward.to_value(raw) if value is None else value, abs=1e-6)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), width=st.integers(1, 20), height=st.integers(1, 20))
def test_mse_agrees_with_scikit_image(seed: int, width: int, height: int) -> None:
    image, target = noise(seed, width, height), noise(seed + 1, width, height)
    (score,) = MseReward().score(make_batch([image], [target]))
    assert score.raw == pytest.approx(skimage_mse(np.asarray(image) / 255, np.asarray(target) / 255), abs=1e-7)


def skimage_valid_mean(a: np.ndarray, b: np.ndarray) -> float:
    """Mean of scikit-image's SSIM map where the 11x11 window lies inside the image."""
    _, ssim_map = skimage_ssim(
        a, b, data_range=1.0, gaussian_weights=True, sigma=1.5, use_sample_covariance=False, channel_axis=2, full=True
    )
    return float(ssim_map[5:-5, 5:-5].mean())


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    height=st.integers(11, 40),
    width=st.integers(11, 40),
    mix=st.floats(0, 1),
    contrast=st.sampled_from([0.02, 0.3, 1.0]),
)
def test_ssim_agrees_with_scikit_image(seed: int, height: int, width: int, mix: float, contrast: float) -> None:
    rng = np.random.default_rng(seed)
    a = rng.random((height, width, 3)) * contrast
    b = mix * a + (1 - mix) * rng.random((height, width, 3))
    tensors = [torch.from_numpy(x).permute(2, 0, 1).unsqueeze(0).float() for x in (a, b)]
    assert structural_similarity(*tensors).item() == pytest.approx(skimage_valid_mean(a, b), abs=1e-5)


def test_the_value_of_ssim_is_clamped_at_zero() -> None:
    image = noise(0, 32, 32)
    (score,) = SsimReward().score(make_batch([image], [image.point([255 - level for level in range(256)] * 3)]))
    assert score.raw is not None
    assert score.raw < -0.5
    assert score.value == 0.0


@pytest.fixture(scope="module")
def oracle(alexnet: torch.nn.Module) -> torch.nn.Module:
    """The lpips package's network, which cuts up the same AlexNet."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torchvision.models, "alexnet", lambda pretrained: alexnet)
        network: torch.nn.Module = lpips_package.LPIPS(net="alex", pnet_rand=True, verbose=False)
    return network.eval()


@pytest.fixture
def reward(trunk_file: Path) -> LpipsReward:
    return LpipsReward(weights=str(trunk_file))


def trunk(path: Path) -> Weights:
    return Weights("weights", str(path), None, TRUNKS["alex"])


@pytest.mark.parametrize("size", [(31, 31), (64, 64), (90, 47)])
def test_agrees_with_the_package(oracle: torch.nn.Module, reward: LpipsReward, size: tuple[int, int]) -> None:
    image, target = noise(0, *size), noise(1, *size)
    (score,) = reward.score(make_batch([image], [target]))
    levels = [torch.from_numpy(np.array(p)).permute(2, 0, 1)[None] for p in (image, target)]
    with torch.no_grad():
        right = oracle(*(x.float() / 127.5 - 1 for x in levels)).item()
        unit_range = oracle(*(x.float() / 255 for x in levels)).item()
    assert right > 0.01
    assert abs(right - unit_range) > 1e-3
    assert score.raw == pytest.approx(right, abs=1e-6)
    assert score.value == pytest.approx(1 - right, abs=1e-6)


def test_flat_images_score(reward: LpipsReward) -> None:
    different, same = reward.score(make_batch([flat(0), flat(255)], [flat(255), flat(255)]))
    assert same == Score(1.0, 0.0)
    assert different.raw is not None
    assert different.raw > 0


def test_wrong_tensors_never_reach_the_network(reward: LpipsReward, trunk_file: Path) -> None:
    network = load_network(trunk(trunk_file), "alex", Placed())
    good = to_tensor(noise(0, 32, 32))
    with pytest.raises(ValueError, match="expected levels"):
        perceptual_distance(network, good * 255, good)


def test_network_is_loaded_once_frozen_and_without_random_numbers(trunk_file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "again.pth"
    copy.write_bytes(trunk_file.read_bytes())
    before = torch.get_rng_state()
    network = load_network(trunk(copy), "alex", Placed())
    assert torch.equal(torch.get_rng_state(), before)
    assert load_network(trunk(copy), "alex", Placed()) is network
    assert not network.training
    assert not any(p.requires_grad or p.dtype != torch.float32 for p in network.parameters())


@pytest.mark.parametrize("net", ["alex", "vgg", "squeeze"])
def test_smallest_sides_are_those_of_the_trunks(net: str) -> None:
    with torch.device("meta"):
        builders = {"alex": "alexnet", "vgg": "vgg16", "squeeze": "squeezenet1_1"}
        features = getattr(torchvision.models, builders[net])(weights=None).features
    # The package stops before each trunk's last pooling; alex and vgg have it as their last layer.
    trunk = features[:-1] if net != "squeeze" else features
    side = MIN_SIDES[net]
    with torch.device("meta"):
        assert 0 not in trunk(torch.zeros(1, 3, side, side)).shape
        with pytest.raises(RuntimeError, match=r"too small|greater than"):
            trunk(torch.zeros(1, 3, side - 1, side - 1))


def test_tensors_of_another_network_are_refused(trunk_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.pth"
    state = torch.load(trunk_file, weights_only=True)
    torch.save({**state, "features.3.weight": torch.zeros(64, 64, 3, 3)}, path)
    error = refused(LpipsReward(weights=str(path)).score, make_batch([flat(0)], [flat(0)]))
    assert (error.place, error.value) == ("rewards.lpips.weights", str(path))
    assert "features.3.weight" in error.hint
