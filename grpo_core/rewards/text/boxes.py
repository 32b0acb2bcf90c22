"""Boxes: read from a completion or a prompt's column, and how far two sets of them cover one another."""

import json
import math
import re
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64

from grpo_core.errors import InputError

Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""

MAX_COORDINATE = 1e6
"""Beyond any image; larger numbers would overflow the areas."""

_NUMBER = r"\s*([-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf|infinity|null|none))\s*"
_FOUR_NUMBERS = re.compile(rf"\[{_NUMBER},{_NUMBER},{_NUMBER},{_NUMBER}\]", re.IGNORECASE)


def read_boxes(completion: str) -> list[Box | None]:
    """Every list of four numbers in square brackets, in order; None for one that is no box.

    Between ``<answer>`` and ``</answer>`` where the completion has them, everywhere else: boxes that the reasoning
    considers are not given as the answer. JSON such as ``[{"bbox_2d": [1, 2, 3, 4]}]`` is covered by its brackets.
    """
    # Cut by hand: an expression would look for the end anew from every beginning, which takes ages over spam.
    parts = (part.partition("</answer>") for part in completion.split("<answer>")[1:])
    answers = [inside for inside, end, _ in parts if end] or [completion]
    lists = (match.groups() for answer in answers for match in _FOUR_NUMBERS.finditer(answer))
    return [_as_box([_as_number(number) for number in numbers]) for numbers in lists]


def wanted_boxes(value: object, place: str) -> list[Box]:
    """The boxes of a prompt's column: four numbers, a list of such, or either as JSON text.

    Args:
        value: what the column holds.
        place: of the sample and column, for messages.

    Raises:
        InputError: anything else, or a box without area.
    """
    hint = "Give [left, top, right, bottom] with left < right and top < bottom, or a list of such."
    read = value
    if isinstance(value, str):
        try:
            read = json.loads(value)
        except json.JSONDecodeError as error:
            raise InputError(place, value, hint) from error
    if not isinstance(read, list | tuple):
        raise InputError(place, value, hint)
    several = all(isinstance(entry, list | tuple) for entry in read)
    boxes = [_as_box(entry) for entry in (read if several else [read])]
    if any(box is None for box in boxes):
        raise InputError(place, value, hint)
    return [box for box in boxes if box is not None]


def matched_iou(given: Sequence[Box | None], wanted: Sequence[Box], threshold: float | None = None) -> float:
    """The best one-to-one matching's sum of intersections over unions, over the larger number of boxes.

    A box too many or too few costs its share, so that neither spamming boxes nor leaving hard ones out pays. The
    matching is that of Kuhn, 1955, "The Hungarian Method for the Assignment Problem".

    Args:
        given: None for something that is no box; it matches nothing, and counts.
        wanted: the truth.
        threshold: a pair counts 1 from this IoU on and 0 below; None counts the IoU itself.

    Returns:
        In [0, 1]; 1 where nothing is wanted and nothing given.
    """
    # Imported where it is used: the import takes longer than reading a configuration, which only needs the names.
    from scipy.optimize import linear_sum_assignment

    if not given and not wanted:
        return 1.0
    boxes = [box for box in given if box is not None]
    if not boxes or not wanted:
        return 0.0
    overlaps = box_iou(np.array(boxes), np.array(wanted))
    if threshold is not None:
        overlaps = (overlaps >= threshold).astype(np.float64)
    rows, columns = linear_sum_assignment(overlaps, maximize=True)
    # Exactly rounded, so that the order of the boxes does not reach the last bit.
    return math.fsum(overlaps[rows, columns].tolist()) / max(len(given), len(wanted))


def box_iou(
    first: Float64[np.ndarray, "first 4"], second: Float64[np.ndarray, "second 4"]
) -> Float64[np.ndarray, "first second"]:
    """Intersection over union of every box of the one set with every box of the other, each with some area."""
    # torchvision has this too, but takes seconds to import, which a run on texts has no other use for.
    corners = np.maximum(first[:, None, :2], second[:, :2]), np.minimum(first[:, None, 2:], second[:, 2:])
    shared = (corners[1] - corners[0]).clip(min=0.0).prod(axis=2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(axis=1) for boxes in (first, second)]
    overlaps: Float64[np.ndarray, "first second"] = shared / (areas[0][:, None] + areas[1] - shared)
    return overlaps


def _as_number(text: str) -> float:
    return math.nan if text.lower().lstrip("+-") in ("null", "none") else float(text)


def _as_box(numbers: object) -> Box | None:
    """Left, top, right, bottom with some area inside of it; None for anything else."""
    if not isinstance(numbers, list | tuple) or len(numbers) != 4:
        return None
    if not all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers):
        return None
    # Negated where NaN must be refused with the rest.
    if not all(abs(number) <= MAX_COORDINATE for number in numbers):
        return None
    left, top, right, bottom = (float(number) for number in numbers)
    return (left, top, right, bottom) if left < right and top < bottom else None
