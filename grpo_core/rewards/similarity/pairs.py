"""Scores samples against their target images."""

import math
from collections.abc import Callable

import torch
from PIL import Image
from torch import Tensor

from grpo_core.errors import InputError
from grpo_core.rewards.images import fit_to, shown_size, to_rgb, to_tensor
from grpo_core.rewards.protocol import NOT_APPLICABLE, Score, ScoringBatch
from grpo_core.rewards.scoring import not_finite

Measure = Callable[[Tensor, Tensor], Tensor]
"""From images and targets, each [N, 3, H, W] fp32 in [0, 1], to N raw quantities."""


def score_pairs(
    batch: ScoringBatch, measure: Measure, to_value: Callable[[float], float], *, name: str, min_side: int
) -> list[Score]:
    """One score a sample; not applicable where the sample has no target, a failure where no finite number comes out.

    The target is brought to its image's size. Pairs are measured one at a time: a convolution's last bits depend on
    the batch that it runs in, and a score must not; images may then differ in size, and memory does not grow
    with the batch.

    Args:
        batch: the samples.
        measure: the raw quantity of a pair.
        to_value: from the raw quantity to the value in [0, 1].
        name: the reward's name, for messages.
        min_side: smallest width or height in pixels that `measure` is defined for.

    Raises:
        InputError: an image is too small, of an unknown mode, or its target has another aspect ratio.
    """
    scores = []
    targets = batch.targets or [None] * len(batch)
    for sample_id, image, target in zip(batch.sample_ids, batch.images, targets, strict=True):
        if target is None:
            scores.append(NOT_APPLICABLE)
            continue
        image, fitted = prepare_pair(image, target, sample_id, name=name, min_side=min_side)
        with torch.inference_mode(), torch.autocast("cpu", enabled=False):
            raw = measure(to_tensor(image), to_tensor(fitted)).item()
        # A NaN would come out of the clamp as a value.
        scores.append(Score(to_value(raw), raw) if math.isfinite(raw) else Score.failed(not_finite(raw)))
    return scores


def prepare_pair(
    image: Image.Image, target: Image.Image, sample_id: str, *, name: str, min_side: int
) -> tuple[Image.Image, Image.Image]:
    """Image and target in RGB, both at the image's size.

    Raises:
        InputError: the image is too small, or the two cannot be brought together.
    """
    place = f"rewards.{name}, sample {sample_id}"
    image = to_rgb(image, place)
    if min(image.size) < min_side:
        hint = f"{name} needs sides of at least {min_side} pixels: generate larger images or take another reward."
        raise InputError(place, f"image of {shown_size(image)} pixels", hint)
    return image, fit_to(to_rgb(target, f"{place}, target"), image.size, f"{place}, target")
