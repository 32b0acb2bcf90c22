"""Source images that a pipeline is tried with."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

import diffusers
import numpy as np
from PIL import Image

from grpo_core.actions import Sources
from grpo_core.images import SourceImage, encode_png
from grpo_core.policies.diffusers.source_images import SourceArgument
from grpo_core.streams import ImageSize

_SIZES = "calculate_dimensions"
"""Function of a pipeline's module that returns the size to which a source image is scaled, from area and aspect."""

_PIXELS = 64**2


def alike_sources(size: ImageSize, argument: SourceArgument) -> tuple[SourceImage, SourceImage]:
    """Return two different images of noise in one size: this one, or a multiple that the class takes."""
    levels = _noise(size, argument)
    return _source(levels), _source(levels[::-1])


def trial_sources(size: ImageSize, argument: SourceArgument | None) -> list[Sources | None]:
    """Return the source images of two prompts for each trial: without any, where that is possible, and with some.

    They have two sizes; where a class takes several, the second prompt has two.
    """
    if argument is None:
        return [None]
    levels = _noise(size, argument)
    one, other = _source(levels), _source(levels.swapaxes(0, 1))
    several = (one,) if argument.most == 1 else (one, other)
    return [((other,), several)] if argument.required else [None, ((other,), several)]


def _noise(size: ImageSize, argument: SourceArgument) -> np.ndarray:
    larger = -(-argument.min_side // min(size))
    shape = (size.height * larger, size.width * larger, 3)
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def _source(levels: np.ndarray) -> SourceImage:
    return SourceImage.of(encode_png(Image.fromarray(np.ascontiguousarray(levels))))


@contextmanager
def reduced_sources(class_name: str) -> Iterator[None]:
    """Let a pipeline that scales source images to a megapixel make them small in this context.

    Args:
        class_name: of the pipeline; its module is changed, where it has a function for their sizes.
    """
    module = inspect.getmodule(getattr(diffusers, class_name))
    own = getattr(module, _SIZES, None)
    if own is None:
        yield
        return
    setattr(module, _SIZES, lambda area, ratio: own(min(area, _PIXELS), ratio))
    try:
        yield
    finally:
        setattr(module, _SIZES, own)
