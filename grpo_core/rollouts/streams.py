"""What a policy generates, images or texts, and the streams of actions that train it."""

import functools
import math
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    import regex

Modality = Literal["image", "text"]
"""What a row of tokens is rendered to."""


MAX_PIXELS = 8192 * 8192
"""Largest width times height of an image from anywhere; a small file can unpack to more than fits in memory."""

PIXELS_AT_ONCE = 1024**2
"""An autoencoder decodes images with at most this many pixels together at once, and larger ones one by one."""


class ImageSize(NamedTuple):
    """Width and height of an image in pixels, in the order of PIL's `Image.size`; written 512x768."""

    width: int
    height: int

    @property
    def pixels(self) -> int:
        """Number of pixels."""
        return self.width * self.height

    def __str__(self) -> str:
        return f"{self.width}x{self.height}"


def nearest_multiple(size: ImageSize, unit: int) -> ImageSize:
    """Return the nearest size of at most MAX_PIXELS whose sides are multiples of `unit` pixels."""
    sides = [max(unit, round(side / unit) * unit) for side in size]
    if math.prod(sides) > MAX_PIXELS:
        shrink = math.sqrt(MAX_PIXELS / math.prod(sides))
        sides = [max(unit, math.floor(side * shrink / unit + 1e-9) * unit) for side in sides]
    return ImageSize(*sides)


@functools.cache
def _visible() -> "regex.Pattern[str]":
    # It takes as long to import as everything else here, and most commands need none of it.
    import regex

    return regex.compile(
        # Of the general categories \p{C} is control, format, private, unassigned and lone surrogates.
        r"[^\p{White_Space}\p{Default_Ignorable_Code_Point}\p{C}\p{Mn}\N{BRAILLE PATTERN BLANK}]"
    )


def has_visible_text(text: str) -> bool:
    """Return whether a text shows anything.

    White space, control, format and filler characters, those that Unicode has not assigned, and marks on others do not.
    """
    return _visible().search(text) is not None


Stream = Literal["tokens", "denoising"]
"""`tokens`: sampled ids. `denoising`: the noisy steps of a flow-matching sampler."""

STREAMS: tuple[Stream, ...] = ("tokens", "denoising")
"""Every stream, in the order in which they are listed and updated.

To train tokens, advantages compare the token samples of a prompt; to train denoising, the images of a token sample. A
pipeline without tokens makes all images of a prompt from one token sample, the prompt itself. Images of different token
samples are not compared: nearly all of their difference is the tokens', so it tells nothing about the denoising steps.
"""

UNEQUAL_PASSES: frozenset[Stream] = frozenset({"denoising"})
"""Streams whose microbatches take unequal numbers of passes: one for each prompt or image size among their rows."""
