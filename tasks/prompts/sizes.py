"""The image size of each prompt: that of its row, or else of its data set, or else of the rollout."""

import re
from collections.abc import Mapping, Sequence

from grpo_core.errors import InputError
from grpo_core.image_size import ImageSize
from tasks.prompts.read import Prompt

SIZE_COLUMNS = ("width", "height", "size")
"""Columns that give the size of a prompt's images: two of pixels, or one such as 512x768, width first."""

_SIDE = r"0*([1-9][0-9]{0,5})"
# Columns with empty cells often come as floats.
_ONE_SIDE, _BOTH_SIDES = re.compile(rf"{_SIDE}(?:\.0)?"), re.compile(f"{_SIDE} ?[xX×] ?{_SIDE}")
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
    width, height = (
        _numbers(_ONE_SIDE, columns.get(name), f"{place}, column {name}", _PIXELS) for name in SIZE_COLUMNS[:2]
    )
    if (width is None) != (height is None):
        given, missing = ("width", "height") if height is None else ("height", "width")
        hint = f"This row has no {missing}. Give both, or leave both empty for the size of the rollout."
        raise InputError(f"{place}, column {given}", columns[given], hint)
    both = _numbers(_BOTH_SIDES, columns.get("size"), f"{place}, column size", _TEXT)
    size = None if both is None else ImageSize(*both)
    own = None if width is None or height is None else ImageSize(*width, *height)
    if size is not None and own is not None and size != own:
        hint = f"The columns width and height of this row say {own}. Give one of the two, or the same."
        raise InputError(f"{place}, column size", columns["size"], hint)
    return size or own


def _numbers(form: re.Pattern[str], value: object, place: str, hint: str) -> tuple[int, ...] | None:
    """Return the numbers of pixels in a cell; None for an empty one."""
    text = "" if value is None else str(value).strip()
    if not text:
        return None
    found = form.fullmatch(text)
    if found is None:
        raise InputError(place, value, hint)
    return tuple(map(int, found.groups()))
