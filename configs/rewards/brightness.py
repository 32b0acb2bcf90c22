"""A reward function of one's own, as in docs/rewards.md: `function: configs/rewards/brightness.py:brightness`."""

from collections.abc import Sequence

from PIL import Image, ImageStat


def brightness(images: Sequence[Image.Image], **columns: object) -> list[float]:
    """Return the mean level of each image over its pixels and channels, from 0, black, to 1, white."""
    return [sum(ImageStat.Stat(image).mean) / 3 / 255 for image in images]
