from pathlib import Path

import lpips as lpips_package
import numpy as np
import pytest
import torch
import torchvision

from grpo_core.rewards.scoring_batch import Score
from grpo_core.rewards.similarity.lpips import MIN_SIDES, TRUNKS, LpipsReward, load_network, perceptual_distance
from grpo_core.rewards.similarity.tensors import to_tensor
from grpo_core.rewards.weights import Weights
from tests.grpo_core.rewards.conftest import flat, make_batch, noise, refused


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
    network = load_network(trunk(trunk_file), "alex", "cpu")
    good = to_tensor(noise(0, 32, 32))
    with pytest.raises(ValueError, match="expected levels"):
        perceptual_distance(network, good * 255, good)


def test_network_is_loaded_once_frozen_and_without_random_numbers(trunk_file: Path, tmp_path: Path) -> None:
    copy = tmp_path / "again.pth"
    copy.write_bytes(trunk_file.read_bytes())
    before = torch.get_rng_state()
    network = load_network(trunk(copy), "alex", "cpu")
    assert torch.equal(torch.get_rng_state(), before)
    assert load_network(trunk(copy), "alex", "cpu") is network
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
