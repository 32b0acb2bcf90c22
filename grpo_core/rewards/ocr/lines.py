"""Lines that an OCR engine reads, their order, and writing that it overlooks because of its size.

The networks that find lines know letters of some sizes. A look from afar, at the image shrunk, finds giant letters
behind the words; a look from near, at the busiest part that no line covers, small print beside them. What is found is
only counted, since a prompt does not ask for it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32
from PIL import Image

UNREAD = "\uffff"
"""Stands for a character that an engine sees and does not accept; no text has it (it is none of Unicode's)."""


@dataclass(frozen=True)
class Line:
    """A stretch of text in an image, with its left edge, upper and lower edge in pixels.

    `falls` says whether it runs from above to below, as Chinese columns and signs turned to the right do.
    """

    text: str
    left: float
    top: float
    bottom: float
    falls: bool = False


def unread(text: str) -> str:
    """Return the line that stands for one that was not accepted: a mark for each of its characters, one at least."""
    return UNREAD * max(1, len("".join(text.split())))


def in_reading_order(lines: Sequence[Line]) -> tuple[str, ...]:
    """Order lines row by row from the top, each row from the left; falling lines side by side from the right.

    Neighbours stand in one row where half the height of the lower one overlaps, at any size and not quite level.
    """
    rows: list[list[Line]] = []
    for line in sorted(lines, key=lambda line: (line.top + line.bottom, line.left)):
        if rows and _in_one_row(rows[-1][-1], line):
            rows[-1].append(line)
        else:
            rows.append([line])
    ordered = (sorted(row, key=lambda line: line.left, reverse=all(line.falls for line in row)) for row in rows)
    return tuple(line.text for row in ordered for line in row)


def _in_one_row(one: Line, other: Line) -> bool:
    overlap = min(one.bottom, other.bottom) - max(one.top, other.top)
    return 2 * overlap > min(one.bottom - one.top, other.bottom - other.top)


Rectangle = tuple[float, float, float, float]
"""Left, top, right, bottom in pixels."""

Reader = Callable[[Image.Image], Sequence[tuple[str, Rectangle]]]
"""Reads an image to its lines, each with its place; characters that are not accepted are UNREAD."""

FAR_SIDE = 128
"""Pixels of the long side from afar."""

_NEAR_SIDE, _MAGNIFIED = 40, 8
_MIN_LETTERS = 2
"""From afar a shape may look like one letter, in photographs too."""

_MIN_LINES = 3
"""From near a texture may look like a line or two."""

_MIN_DETAIL = 5.0
"""Levels by which neighbouring pixels differ on average where there may be small print."""

_KNOWN_SHARE = 0.25
"""Of its area that the lines found before cover, from which on writing is one of them."""


def find_giant_writing(image: Image.Image, known: Sequence[Rectangle], read: Reader) -> list[str]:
    """Read the image shrunk, and return the lines that are not among the known ones."""
    shrunk = image.copy()
    shrunk.thumbnail((FAR_SIDE, FAR_SIDE))
    if shrunk.size == image.size:
        return []
    across, down = image.width / shrunk.width, image.height / shrunk.height
    found = []
    for text, (left, top, right, bottom) in read(shrunk):
        place = left * across, top * down, right * across, bottom * down
        letters = sum(character.isalnum() for character in text)
        if letters >= _MIN_LETTERS and _covered_share(place, known) < _KNOWN_SHARE:
            found.append(text)
    return found


def find_small_print(image: Image.Image, known: Sequence[Rectangle], read: Reader) -> list[str]:
    """Look at the busiest part that no known line covers, magnified; return its lines if it is full of lines.

    So small, letters are seen and seldom read, so each line has as many as there is room for.
    """
    part = _busiest(_detail(image, known))
    if part is None:
        return []
    left, top, right, bottom = part
    size = (right - left) * _MAGNIFIED, (bottom - top) * _MAGNIFIED
    lines = read(image.crop(part).resize(size, Image.Resampling.BICUBIC))
    return [UNREAD * count_letters(place) for _, place in lines] if len(lines) >= _MIN_LINES else []


def _busiest(detail: Float32[np.ndarray, "height width"]) -> tuple[int, int, int, int] | None:
    height, width = (min(_NEAR_SIDE, side) for side in detail.shape)
    step = _NEAR_SIDE // 2
    busy = np.lib.stride_tricks.sliding_window_view(detail, (height, width))[::step, ::step].mean(axis=(2, 3))
    if busy.max() < _MIN_DETAIL:
        return None
    row, column = (int(index) for index in np.unravel_index(int(busy.argmax()), busy.shape))
    return column * step, row * step, column * step + width, row * step + height


def count_letters(place: Rectangle) -> int:
    """Estimate the letters of a line, each of which is about half as wide as the line is high."""
    left, top, right, bottom = place
    short, long = sorted((right - left, bottom - top))
    return max(1, round(2.0 * long / max(1.0, short)))


def _detail(image: Image.Image, known: Sequence[Rectangle]) -> Float32[np.ndarray, "height width"]:
    """Sum the differences of each pixel's grey level from its neighbours to the left and above; 0 in known lines."""
    levels = np.asarray(image.convert("L"), np.float32)
    detail = np.zeros_like(levels)
    detail[:, 1:] += np.abs(np.diff(levels, axis=1))
    detail[1:] += np.abs(np.diff(levels, axis=0))
    for left, top, right, bottom in known:
        detail[max(0, int(top)) : int(bottom) + 2, max(0, int(left)) : int(right) + 2] = 0.0
    return detail


def _covered_share(place: Rectangle, known: Sequence[Rectangle]) -> float:
    left, top, right, bottom = place
    shared = sum(
        max(0.0, min(right, other[2]) - max(left, other[0])) * max(0.0, min(bottom, other[3]) - max(top, other[1]))
        for other in known
    )
    return shared / max(1.0, (right - left) * (bottom - top))
