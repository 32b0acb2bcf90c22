"""Lines that an OCR engine reads, and their order."""

from collections.abc import Sequence
from dataclasses import dataclass

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

    Neighbours stand in one row where half the height of the lower one overlaps: unlike a number of pixels, this works
    for images of any size, and for rows that are not quite level.
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
