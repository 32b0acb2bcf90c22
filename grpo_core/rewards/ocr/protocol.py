"""The interface of OCR engines, and the reading order of lines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from PIL import Image

UNREAD = "\uffff"
"""Stands for a character that an engine sees and does not accept; no text has it (it is none of Unicode's)."""


class Engine(Protocol):
    """Reads images; its settings are fixed when it is built, so that no call changes another's result."""

    @property
    def version(self) -> str:
        """Name the libraries that determine what is read, with their versions.

        Raises:
            InputError: they are not there.
        """

    def model_digests(self) -> Mapping[str, str]:
        """Return the sha256 of every model file by role.

        Raises:
            InputError: a file is missing.
        """

    def find_problems(self) -> Sequence[str]:
        """List what is missing, each with its hint; empty when the engine can read. Loads no model."""

    def read(self, image: Image.Image) -> tuple[str, ...]:
        """Return the lines of an 8-bit RGB image in reading order; none where nothing looks like text.

        A line that is seen and not accepted, upside down or of low confidence, is given as :func:`unread`.

        Raises:
            ScoringError: it broke down, or took too long.
            InputError: the engine is not installed, or only in part.
        """


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
