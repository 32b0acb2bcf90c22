"""Source images of a prompt, as the calls of pipelines that edit images take them; what they do not take is refused.

A call makes the images of one prompt: what `image` means for several prompts differs between classes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from PIL import Image

from grpo_core.errors import InputError
from grpo_core.rollouts.images import SourceImage, fits_reward, shown_bounds
from grpo_core.rollouts.streams import ImageSize


@dataclass(frozen=True)
class SourceArgument:
    """How the call of a class takes source images, by its argument `image`.

    Attributes:
        required: whether it makes no image without one.
        most: how many images a prompt may have; None: any number.
        as_list: whether it takes a list of them; False: the image itself.
        pixels: what it scales every source to, as an area, up or down; None: it takes them in their own size.
        max_aspect: largest ratio of the long side to the short one.
        usual: whether its prompts usually have one, so that estimates of memory count one.
        shrinks: whether a source with more pixels than the image to make is scaled down to as many, which the class
            itself does not do: its positions are as many as the source's pixels.
    """

    required: bool = False
    most: int | None = 1
    as_list: bool = False
    pixels: int | None = None
    min_side: int = 1
    max_aspect: float = math.inf
    usual: bool = False
    shrinks: bool = False

    def argument(self, sources: Sequence[SourceImage], size: ImageSize) -> Any:
        """Return the value of `image` for a prompt and an image of this size; InputError if a source is broken."""
        images = [self._fitted(each.open(), size) for each in sources]
        return images if self.as_list else images[0]

    def _fitted(self, image: Image.Image, size: ImageSize) -> Image.Image:
        share = (size.pixels / (image.width * image.height)) ** 0.5
        if not self.shrinks or share >= 1:
            return image
        fitted = (max(1, round(image.width * share)), max(1, round(image.height * share)))
        return image.resize(fitted, Image.Resampling.LANCZOS)

    def area(self, target: ImageSize) -> int:
        """Return the pixels of a source as the model reads it, where the source itself has as many as the target."""
        return target.pixels if self.pixels is None else self.pixels


_ONE_MEGAPIXEL = 1024**2
_QWEN_IMAGE_EDIT = SourceArgument(required=True, pixels=_ONE_MEGAPIXEL, usual=True)
_REFERENCES = SourceArgument(most=None, as_list=True, min_side=64, max_aspect=8)

SOURCES: Mapping[str, SourceArgument] = MappingProxyType(
    {
        "Flux2KleinPipeline": _REFERENCES,
        "Flux2Pipeline": _REFERENCES,
        "FluxKontextPipeline": SourceArgument(usual=True, shrinks=True),
        "QwenImageEditPipeline": _QWEN_IMAGE_EDIT,
        "QwenImageEditPlusPipeline": replace(_QWEN_IMAGE_EDIT, most=None, as_list=True),
        "ZImageOmniPipeline": _REFERENCES,
    }
)
"""Classes whose signatures do not tell; of any other, `image` is one image, which text-to-image classes can do without.

In diffusers 0.42.1 every class has `image=None`, those that fail without one too.
"""


def refuse_sources(
    name: str,
    argument: SourceArgument | None,
    unit: int | None,
    prompts: Sequence[str],
    images: Sequence[Sequence[ImageSize]],
) -> None:
    """Raise InputError for a prompt with another number of source images than a class takes, or with too small ones.

    A source has at least `unit` pixels a side, those of a position of the transformer, if they are known.
    """
    for number, (prompt, sizes) in enumerate(zip(prompts, images or ((),) * len(prompts), strict=True), start=1):
        place = f"prompt {number}"
        count = f"{len(sizes)} source images"
        if argument is None:
            if sizes:
                hint = f"A {name} makes images from text alone; remove them, or set an edit model. The prompt: {prompt}"
                raise InputError(place, count, hint)
            continue
        if argument.required and not sizes:
            hint = f"A {name} edits an image; give each prompt one. The prompt: {prompt}"
            raise InputError(place, count, hint)
        if argument.most is not None and len(sizes) > argument.most:
            hint = f"A {name} takes {argument.most} of them; remove the others. The prompt: {prompt}"
            raise InputError(place, count, hint)
        min_side = max(argument.min_side, unit or 1) if argument.pixels is None else argument.min_side
        for size in sizes:
            if not fits_reward(size, min_side, argument.max_aspect):
                hint = f"A {name} reads images of {shown_bounds(min_side, argument.max_aspect)}. The prompt: {prompt}"
                raise InputError(place, f"source image of {size} pixels", hint)
