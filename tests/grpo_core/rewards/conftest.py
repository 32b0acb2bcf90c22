"""Images and weights that the reward tests share."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

from grpo_core.rewards.reward import ScoringBatch


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def alexnet() -> torch.nn.Module:
    """A randomly initialised AlexNet; its construction leaves the global random state alone."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: torch.nn.Module = torchvision.models.alexnet(weights=None)
    return model.eval()


@pytest.fixture(scope="session")
def trunk_file(alexnet: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its state dict as torchvision names it, with one tensor of the classifier standing for all."""
    path = tmp_path_factory.mktemp("weights") / "trunk.pth"
    kept = {k: v for k, v in alexnet.state_dict().items() if k.startswith("features.") or k == "classifier.6.bias"}
    torch.save(kept, path)
    return path


def noise(seed: int, width: int, height: int) -> Image.Image:
    levels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(levels)


def flat(level: int, width: int = 32, height: int = 32) -> Image.Image:
    return Image.new("RGB", (width, height), (level, level, level))


def make_batch(
    images: Sequence[Image.Image],
    targets: Sequence[Image.Image | None] | None = None,
    sample_ids: Sequence[str] | None = None,
) -> ScoringBatch:
    """A batch with sample ids s0, s1, ... unless given, without targets unless given."""
    count = len(images)
    return ScoringBatch(
        sample_ids=list(sample_ids) if sample_ids is not None else [f"s{i}" for i in range(count)],
        prompts=[""] * count,
        images=list(images),
        targets=list(targets) if targets is not None else [None] * count,
    )
