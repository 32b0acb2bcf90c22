"""What rewards that compare a sample with its target image have in common."""

import abc
from collections.abc import Sequence
from typing import ClassVar

import torch
from PIL import Image
from torch import Tensor

from grpo_core.rewards.images import fit_to, to_rgb
from grpo_core.rewards.reward import NOT_APPLICABLE, Reward, Score, ScoringBatch
from grpo_core.rewards.tensors import to_tensor


class PairReward(Reward):
    """A reward of an image and its target; a sample without a target has no score.

    The target is resized to its image. Pairs are measured one at a time: a convolution's last bits depend on the batch
    that it runs in, and a score must not; images may then differ in size, and memory does not grow with the batch.
    """

    needs_target: ClassVar[bool] = True

    @abc.abstractmethod
    def measure(self, images: Tensor, targets: Tensor) -> Tensor:
        """Return the raw quantities [N] of images and targets, each [N, 3, H, W] fp32 in [0, 1]."""

    @abc.abstractmethod
    def to_value(self, raw: float) -> float:
        """Return the value in [0, 1] of a raw quantity."""

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """Score each sample; a raw quantity that is not finite is a failure.

        Raises:
            InputError: an image is too small, of an unknown mode, or its target has another aspect ratio.
        """
        targets = batch.targets or [None] * len(batch)
        rows = [row for row, target in enumerate(targets) if target is not None]
        scores = [NOT_APPLICABLE] * len(batch)
        chosen = batch.select(rows)
        images = chosen.rgb_images(self.name, self.min_side)
        for row, sample_id, image, target in zip(rows, chosen.sample_ids, images, chosen.targets, strict=True):
            assert target is not None, "only samples with a target are chosen"
            scores[row] = self._score(image, target, f"rewards.{self.name}, sample {sample_id}, target")
        return scores

    def _score(self, image: Image.Image, target: Image.Image, place: str) -> Score:
        fitted = fit_to(to_rgb(target, place), image.size, place)
        with torch.inference_mode(), torch.autocast("cpu", enabled=False):
            raw = self.measure(to_tensor(image), to_tensor(fitted)).item()
        return Score.of(self.to_value(raw), raw)
