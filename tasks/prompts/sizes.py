"""The image size of each prompt: that of its row, or else of its data set, or else of the rollout."""

import re
from collections.abc import Mapping, Sequence

from grpo_core.errors import InputError
from grpo_core.image_size import ImageSize
from tasks.prompts.read import Prompt

SIZE_COLUMNS = ("width", "height", "size")
"""Columns that give the size of a prompt's images: two of pixels, or one such as 512x768, width first."""

_DIGITS = re.compile(r"[0-9]{1,6}")
_BOTH_SIDES = re.compile(r"([0-9]{1,6}) ?[xX×] ?([0-9]{1,6})")
_PIXELS = "Give a whole number of pixels above 0, or leave both cells empty for the size of the rollout."
_TEXT = "Give width and height in pixels as in 512x768, or leave the cell empty for the size of the rollout."


def read_sizes(prompts: Sequence[Prompt], *, source: str, default: ImageSize) -> tuple[ImageSize, ...]:
    """Return the size of each prompt's images, in the order of the prompts.

    Args:
        prompts: the complete set, in the order of the file.
        source: the prompt file.
        default: for prompts whose row gives none.

    Raises:
        InputError: a size that is not one, a width without a height or the reverse, or a row with two sizes.
    """
    return tuple(
        _size_of(prompt.columns, size_place(source, row)) or default for row, prompt in enumerate(prompts, start=1)
    )


def size_place(source: str, row: int) -> str:
    """Name a row of a prompt file, counted from 1 over its prompts, in an error about its size."""
    return f"data.prompts: {source}, row {row}"


def _size_of(columns: Mapping[str, object], place: str) -> ImageSize | None:
    width, height = (_pixels(columns.get(name), f"{place}, column {name}") for name in SIZE_COLUMNS[:2])
    if (width is None) != (height is None):
        given, missing = ("width", "height") if height is None else ("height", "width")
        hint = f"This row has no {missing}. Give both, or leave both empty for the size of the rollout."
        raise InputError(f"{place}, column {given}", columns[given], hint)
    size = _both_sides(columns.get("size"), f"{place}, column size")
    own = None if width is None or height is None else ImageSize(width, height)
    if size is not None and own is not None and size != own:
        hint = f"The columns width and height of this row say {own}. Give one of the two, or the same."
        raise InputError(f"{place}, column size", columns["size"], hint)
    return size or own


def _pixels(value: object, place: str) -> int | None:
    """Return a number of pixels that a cell gives as a number or as text; None for an empty cell."""
    if _is_empty(value):
        return None
    text = value.strip() if isinstance(value, str) else value
    number: float | None = None
    if isinstance(text, str):
        number = int(text) if _DIGITS.fullmatch(text) else None
    elif isinstance(text, int | float) and not isinstance(text, bool):
        number = text
    # Negated, so that NaN is refused with the rest.
    if number is None or not 0 < number < 1_000_000 or int(number) != number:
        raise InputError(place, value, _PIXELS)
    return int(number)


def _both_sides(value: object, place: str) -> ImageSize | None:
    if _is_empty(value):
        return None
    found = _BOTH_SIDES.fullmatch(value.strip()) if isinstance(value, str) else None
    size = ImageSize(int(found[1]), int(found[2])) if found else None
    if size is None or not all(size):
        raise InputError(place, value, _TEXT)
    return size


def _is_empty(value: object) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())
