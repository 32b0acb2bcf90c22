"""How unlike one another the images of a group are: falls when a policy draws the same image for every seed.

The mean distance of an image to its siblings: by LPIPS as in Zhu et al., 2017, "Toward Multimodal Image-to-Image
Translation" (arXiv:1711.11586); by the cosine of CLIP embeddings; or by the pixels themselves.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
import torch
from PIL import Image
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from grpo_core.errors import InputError
from grpo_core.rewards.embedding.clip import ClipReward
from grpo_core.rewards.embedding.clip_rewards import ClipModel, load_clip
from grpo_core.rewards.model_reward import batched, exact_inference
from grpo_core.rewards.reward import STRICT, Needs
from grpo_core.rewards.scoring_batch import NOT_APPLICABLE, Score, ScoringBatch, clamp_unit
from grpo_core.rewards.similarity.lpips import (
    MIN_SIDES,
    TRUNKS,
    Trunk,
    features_apart,
    features_of,
    heads_file,
    load_network,
)
from grpo_core.rewards.similarity.tensors import to_tensor
from grpo_core.rewards.weights import Weights
from grpo_core.rollouts.images import fit_to
from grpo_core.seeds import file_sha256

_PLACE = "rewards.diversity"
_T = TypeVar("_T")


@plain_dataclass(frozen=True)
class Distance(Generic[_T]):
    """A symmetric distance in two steps, `between` prepared images, so that a network sees each once."""

    prepare: Callable[[Sequence[Image.Image]], Sequence[_T]]
    between: Callable[[_T, _T], float]

    def means(self, images: Sequence[Image.Image]) -> list[float]:
        """Average each image's distance to the others (two or more of one size); NaN where one is not finite."""
        prepared = self.prepare(images)
        rows: list[list[float]] = [[] for _ in images]
        for later in range(len(prepared)):
            for earlier in range(later):
                apart = self.between(prepared[earlier], prepared[later])
                rows[earlier].append(apart)
                rows[later].append(apart)
        # Exactly rounded sums, so that the order of the siblings does not reach the last bit.
        return [math.fsum(row) / len(row) if all(map(math.isfinite, row)) else math.nan for row in rows]


@dataclass(frozen=True, config=STRICT)
class DiversityReward(ClipReward):
    """Value clip(raw, 0, 1); raw the mean distance of the image to each of its siblings, without which it has no score.

    Attributes:
        measure: ``pixels``, the root mean square difference over levels in [0, 1], needs no weights but takes a shift
            for a difference; ``lpips`` does less so; ``clip``, 1 - the cosine of the embeddings, sees what the images
            show and hardly how.
        weights: for ``lpips`` the trunk's state dict, for ``clip`` open_clip's: a path or ``hf://owner/repo/file``.
        net: the trunk of ``lpips``: ``alex``, ``vgg`` or ``squeeze``.
    """

    measure: Literal["pixels", "lpips", "clip"] = "pixels"
    net: Trunk = "alex"

    name: ClassVar[str] = "diversity"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.measure == "pixels" and self.weights is not None:
            hint = "The measure pixels needs no weights: set measure to lpips or clip, or leave them out."
            raise InputError(f"{_PLACE}.weights", self.weights, hint)
        for name, given in self.batching.items() if self.measure == "pixels" else ():
            hint = "The measure pixels has no network: set measure to lpips or clip, or leave it out."
            raise InputError(f"{_PLACE}.{name}", given, hint)

    @property
    def version(self) -> str:
        """Includes, for ``clip``, the library that prepares the images."""
        return super().version if self.measure == "clip" else "1"

    @property
    def needs(self) -> Needs:
        """Siblings, and of ``lpips`` a smallest side."""
        return Needs(group=True, min_side=MIN_SIDES[self.net] if self.measure == "lpips" else 1)

    def settings(self) -> Mapping[str, object]:
        """Return the measure and its network."""
        network: Mapping[str, object] = self.network_settings() if self.measure == "clip" else {}
        named = {"net": self.net} if self.measure == "lpips" else {}
        return {"measure": self.measure, **network, **named, **self.batching}

    def weight_sources(self) -> Mapping[str, Weights]:
        """Return those of the measure's network."""
        if self.measure == "pixels":
            return {}
        if self.measure == "clip":
            return super().weight_sources()
        return {"trunk": Weights(f"{_PLACE}.weights", self.weights, self.weights_sha256, TRUNKS[self.net])}

    def weight_digests(self) -> Mapping[str, str]:
        """Return the digests of the measure's network, with LPIPS's heads."""
        heads = {"heads": file_sha256(str(heads_file(self.net)))} if self.measure == "lpips" else {}
        return {**super().weight_digests(), **heads}

    def preflight(self) -> Sequence[str]:
        """List missing or wrong weights and a missing device; pixels need neither."""
        return [] if self.measure == "pixels" else super().preflight()

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """Score each sample; a distance that is not finite is a failure."""
        groups: dict[str, list[int]] = defaultdict(list)
        for row, group_id in enumerate(batch.group_ids):
            groups[group_id].append(row)
        with_siblings = [rows for rows in groups.values() if len(rows) > 1]
        scores = [NOT_APPLICABLE] * len(batch)
        if not with_siblings:
            return scores
        distance = self._distance()
        for rows in with_siblings:
            for row, mean in zip(rows, distance.means(self._images(batch.select(rows))), strict=True):
                scores[row] = Score.of(clamp_unit(mean), mean)
        return scores

    def _images(self, group: ScoringBatch) -> list[Image.Image]:
        images = list(group.rgb_images(self.name, self.needs.min_side))
        size = min((image.size for image in images), key=lambda size: (math.prod(size), size))
        return [fit_to(image, size, f"{_PLACE}, siblings of sample {group.sample_ids[0]}") for image in images]

    def _distance(self) -> Distance[Any]:
        if self.measure == "pixels":
            return pixel_distance()
        if self.measure == "clip":
            return clip_distance(load_clip(self), self.batch_size)
        network = load_network(self.weight_sources()["trunk"], self.net, self.runs_on)
        return lpips_distance(network, self.runs_on.device, self.batch_size)


def pixel_distance() -> Distance[np.ndarray]:
    """Compute the root mean square difference over levels in [0, 1]; 1 for black against white."""

    def between(first: np.ndarray, second: np.ndarray) -> float:
        total = int(np.square(first - second).sum(dtype=np.int64))
        return math.sqrt(total / first.size) / 255.0

    return Distance(lambda images: [np.asarray(image).astype(np.int32) for image in images], between)


def lpips_distance(network: nn.Module, device: str, batch_size: int = 1) -> Distance[list[Tensor]]:
    """Compute LPIPS, bitwise as ``perceptual_distance`` of the pair; 11 MB for an image of 512x512 pixels with alex."""

    def prepare(images: Sequence[Image.Image]) -> list[list[Tensor]]:
        prepared: list[list[Tensor]] = []
        for together in batched(images, batch_size):
            with exact_inference(device):
                pixels = torch.cat([to_tensor(image) for image in together]).to(device)
                layers = [features.split(1) for features in features_of(network, pixels)]
            prepared += [list(own) for own in zip(*layers, strict=True)]
        return prepared

    def between(first: list[Tensor], second: list[Tensor]) -> float:
        with exact_inference(device):
            return features_apart(network, first, second).item()

    return Distance(prepare, between)


def clip_distance(model: ClipModel, batch_size: int = 1) -> Distance[Tensor]:
    """Compute 1 - the cosine of the CLIP embeddings, in [0, 2]."""

    def between(first: Tensor, second: Tensor) -> float:
        # For vectors of length 1 this is 1 - their cosine, and neither below 0 nor above it for the same image.
        return (first - second).square().sum().item() / 2.0

    return Distance(lambda images: [each.double() for each in model.image_embeddings(images, batch_size)], between)
