"""Distances between images that are compared each with each: the network sees an image once, not once a pair."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from PIL import Image
from torch import Tensor, nn

from grpo_core.rewards.devices import exact_inference
from grpo_core.rewards.embedding.clip_model import ClipModel
from grpo_core.rewards.images import to_tensor

_T = TypeVar("_T")


@dataclass(frozen=True)
class Distance(Generic[_T]):
    """A distance in two steps; it must be the same, to the bit, whichever of two images stands first.

    Attributes:
        prepare: what is needed of an RGB image.
        between: the distance of two prepared images; 0 for the same.
    """

    prepare: Callable[[Image.Image], _T]
    between: Callable[[_T, _T], float]

    def means(self, images: Sequence[Image.Image]) -> list[float]:
        """Of each of two images or more, all of one size, the mean distance to the others; NaN where one is none."""
        prepared = [self.prepare(image) for image in images]
        rows: list[list[float]] = [[] for _ in images]
        for later in range(len(prepared)):
            for earlier in range(later):
                apart = self.between(prepared[earlier], prepared[later])
                rows[earlier].append(apart)
                rows[later].append(apart)
        # Exactly rounded sums, so that the order of the siblings does not reach the last bit.
        return [math.fsum(row) / len(row) if all(map(math.isfinite, row)) else math.nan for row in rows]


def pixel_distance() -> Distance[np.ndarray]:
    """Root mean square difference over levels in [0, 1]; 1 for black against white."""

    def between(first: np.ndarray, second: np.ndarray) -> float:
        total = int(np.square(first - second).sum(dtype=np.int64))
        return math.sqrt(total / first.size) / 255.0

    return Distance(lambda image: np.asarray(image).astype(np.int32), between)


def lpips_distance(network: nn.Module, device: str) -> Distance[list[Tensor]]:
    """LPIPS, as :func:`grpo_core.rewards.similarity.lpips.perceptual_distance` gives it for one pair, to the bit.

    An image's features are kept while its group is compared: some 11 MB for 512x512 pixels with alex.

    Args:
        network: from ``load_network``, on `device`.
        device: where it is.
    """
    import lpips

    def prepare(image: Image.Image) -> list[Tensor]:
        with exact_inference(device):
            scaled = network.scaling_layer(2.0 * to_tensor(image).to(device) - 1.0)  # type: ignore[operator]
            return [lpips.normalize_tensor(features) for features in network.net(scaled)]  # type: ignore[operator]

    def between(first: list[Tensor], second: list[Tensor]) -> float:
        with exact_inference(device):
            layers = zip(network.lins, first, second, strict=True)  # type: ignore[arg-type]
            distance: float = sum(lpips.spatial_average(head((a - b) ** 2)) for head, a, b in layers).item()
            return distance

    return Distance(prepare, between)


def clip_distance(model: ClipModel) -> Distance[Tensor]:
    """1 - the cosine of the CLIP embeddings, in [0, 2]."""

    def between(first: Tensor, second: Tensor) -> float:
        # For vectors of length 1 this is 1 - their cosine, and neither below 0 nor above it for the same image.
        return (first - second).square().sum().item() / 2.0

    return Distance(lambda image: model.image_embedding(image).double(), between)
