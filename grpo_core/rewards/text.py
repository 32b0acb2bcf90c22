"""Rewards of completions by rule: nearness to a given answer, the required form, and boxes.

One of the two rule-based rewards of DeepSeek-AI, 2025, "DeepSeek-R1: Incentivizing Reasoning Capability in LLMs via
Reinforcement Learning" (arXiv:2501.12948), section 2.2.2.

Intersection over union: Everingham et al., 2010, "The PASCAL Visual Object Classes (VOC) Challenge", section 4.2; as
the reward of a policy that grounds a text in an image, Xu et al., 2025, "MedGround-R1" (arXiv:2507.02994).
"""

import functools
import json
import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, ClassVar, Literal

import numpy as np
import regex
from jaxtyping import Float64
from pydantic import Field
from pydantic.dataclasses import dataclass
from rapidfuzz.distance import Levenshtein

from grpo_core.errors import InputError
from grpo_core.rewards.reward import NOT_APPLICABLE, STRICT, Reward, Score, ScoringBatch, Text
from grpo_core.streams import Modality, has_visible_text


@dataclass(frozen=True, config=STRICT)
class AnswerReward(Reward):
    """1 - edit distance / length of the longer of the two (Levenshtein, 1966), or 1 for the very same and 0 otherwise.

    White space at both ends does not count.

    Attributes:
        column: the prompt file's column with the answer; a sample without one has no score.
        mode: ``similarity`` or ``exact``.
    """

    column: Text = "answer"
    mode: Literal["similarity", "exact"] = "similarity"

    name: ClassVar[str] = "answer"
    media: ClassVar[tuple[Modality, ...]] = ("text",)
    version: ClassVar[str] = "1"

    @property
    def needs_column(self) -> str:
        """Name the column of the answer."""
        return self.column

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """Score each sample; raw is the number of edits."""
        answers = batch.columns.get(self.column, [None] * len(batch))
        samples = zip(batch.sample_ids, batch.completions, answers, strict=True)
        return [self._score_text(sample_id, completion, answer) for sample_id, completion, answer in samples]

    def _score_text(self, sample_id: str, completion: str, answer: object) -> Score:
        if answer is None:
            return NOT_APPLICABLE
        if not isinstance(answer, str):
            hint = "Write the answer as text, in quotes."
            raise InputError(f"rewards.answer, sample {sample_id}, column {self.column}", answer, hint)
        given, wanted = completion.strip(), answer.strip()
        edits = Levenshtein.distance(given, wanted)
        if self.mode == "exact":
            return Score(float(edits == 0), float(edits))
        return Score(1.0 - edits / max(len(given), len(wanted), 1), float(edits))


FORMATS: Mapping[str, tuple[str, ...]] = MappingProxyType({"think_answer": ("think", "answer")})
"""Elements of each named format, in order."""

DEFAULT_FORMAT = "think_answer"

MAX_SECONDS = 1.0
"""How long one completion may be matched; some patterns take ages over some texts."""


@dataclass(frozen=True, config=STRICT)
class FormatReward(Reward):
    """1 if the complete text has the form, else 0; in mode partial, the share of the form that is present.

    ``think_answer`` is ``<think>...</think><answer>...</answer>``: each of the four tags exactly once and in this
    order, something visible between the tags of a pair (white space, zero-width, control and unassigned characters are
    not, and neither is a comment, ``<!-- -->``), and only white space outside them.

    In mode partial the parts are the tags, each of which must be there exactly once, and the complete form. Raw is
    the number of parts that are right: up to 5 for ``think_answer`` in either mode, 0 or 1 for a pattern.

    Attributes:
        format: a named format; ``think_answer`` unless a pattern is given.
        pattern: a regular expression, in its place, that must match the completion from end to end; a dot matches line
            breaks too.
        mode: ``strict``, or ``partial`` for a named format.
    """

    format: Literal["think_answer"] | None = None
    pattern: Text | None = None
    mode: Literal["strict", "partial"] = "strict"

    name: ClassVar[str] = "format"
    media: ClassVar[tuple[Modality, ...]] = ("text",)
    version: ClassVar[str] = "3"

    def __post_init__(self) -> None:
        if self.pattern is None:
            return
        if self.format is not None:
            raise InputError("rewards.format.pattern", self.pattern, "Set a pattern or a format, not both.")
        if self.mode == "partial":
            hint = "A pattern matches or it does not: set strict, or take a named format."
            raise InputError("rewards.format.mode", self.mode, hint)
        try:
            _compiled(self.pattern)
        except regex.error as error:
            hint = f"It is not a regular expression: {error}."
            raise InputError("rewards.format.pattern", self.pattern, hint) from error

    def settings(self) -> Mapping[str, object]:
        """Return the form that counts, and the mode."""
        named = None if self.pattern is not None else self.format or DEFAULT_FORMAT
        return {"format": named, "pattern": self.pattern, "mode": self.mode}

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """Score each sample; a failure where the pattern took more than MAX_SECONDS over it."""
        return [self._score_text(completion) for completion in batch.completions]

    def _score_text(self, completion: str) -> Score:
        if self.pattern is not None:
            try:
                matched = _compiled(self.pattern).fullmatch(completion, timeout=MAX_SECONDS) is not None
            except TimeoutError:
                return Score.failed(f"the pattern took more than {MAX_SECONDS:g} s over {len(completion)} characters")
            return Score(float(matched), float(matched))
        elements = FORMATS[self.format or DEFAULT_FORMAT]
        fits, tags = has_elements(completion, elements), tags_present_once(completion, elements)
        value = (tags + fits) / (2 * len(elements) + 1) if self.mode == "partial" else float(fits)
        return Score(value, float(tags + fits))


def tags_present_once(text: str, elements: Sequence[str]) -> int:
    """Count the opening and closing tags of these elements that the text has exactly once."""
    return sum(text.count(tag) == 1 for tag in _tags(elements))


def has_elements(text: str, elements: Sequence[str]) -> bool:
    """Say whether the text is these elements in this order, each once and not blank, with only white space around."""
    tags = _tags(elements)
    if any(text.count(tag) != 1 for tag in tags):
        return False
    parts, rest = [], text
    for tag in tags:
        before, found, rest = rest.partition(tag)
        if not found:
            return False
        parts.append(before)
    parts.append(rest)
    # Alternately outside an element and inside one.
    return not any(part.strip() for part in parts[::2]) and all(map(_shows_something, parts[1::2]))


def _shows_something(part: str) -> bool:
    """Say whether anything is visible outside of comments; one without an end reaches to the end."""
    shown, *commented = part.split("<!--")
    return has_visible_text(shown + "".join(each.partition("-->")[2] for each in commented))


def _tags(elements: Sequence[str]) -> list[str]:
    return [tag for element in elements for tag in (f"<{element}>", f"</{element}>")]


@functools.lru_cache(maxsize=64)
def _compiled(pattern: str) -> "regex.Pattern[str]":
    return regex.compile(pattern, regex.DOTALL)


Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""

MAX_COORDINATE = 1e6
"""Beyond any image; larger numbers would overflow the areas."""

_NUMBER = r"\s*([-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?(?:nan|inf|infinity|null|none))\s*"
_FOUR_NUMBERS = re.compile(rf"\[{_NUMBER},{_NUMBER},{_NUMBER},{_NUMBER}\]", re.IGNORECASE)

SCALES: Mapping[str, float | None] = MappingProxyType({"same": None, "unit": 1.0, "thousand": 1000.0})
"""What the image's width and height are in the completion's coordinates; None for those of the column."""


@dataclass(frozen=True, config=STRICT)
class BoxIouReward(Reward):
    """Mean IoU of the best one-to-one matching of given and wanted boxes, over the larger of the two numbers.

    The completion's boxes are its lists of four numbers, ``[left, top, right, bottom]``, of its last ``<answer>`` where
    it has one; plain, nested or in JSON (``{"bbox_2d": [...]}``). Boxes of its reasoning, up to the last ``</think>``,
    are not given. Each one too many costs its share, and a list that encloses no area (corners out of order, NaN)
    covers nothing and counts as given. No box at all is 0; nothing wanted (an empty list) and nothing given is 1.

    Raw is the mean IoU, value the same or, with a threshold, the share of boxes that reach it.

    Attributes:
        column: the prompt file's column with the wanted box, ``[left, top, right, bottom]``, or a list of boxes; a
            sample without has no score.
        threshold: IoU from which a pair of boxes counts 1, and below which 0.
        coordinates: of the completion: ``same`` as the column's, ``unit`` (0 to 1) or ``thousand`` (0 to 1000) across
            the image, the column being in pixels.
        width_column: the prompt file's column with the image's width in pixels; read unless coordinates are the same.
        height_column: the same for its height.
    """

    column: Text = "box"
    threshold: Annotated[float, Field(gt=0, le=1)] | None = None
    coordinates: Literal["same", "unit", "thousand"] = "same"
    width_column: Text = "width"
    height_column: Text = "height"

    name: ClassVar[str] = "box_iou"
    media: ClassVar[tuple[Modality, ...]] = ("text",)
    version: ClassVar[str] = "2"

    @property
    def needs_column(self) -> str:
        """Name the column of the wanted boxes."""
        return self.column

    def settings(self) -> Mapping[str, object]:
        """Return columns, threshold and coordinates; the columns of the sides only where they are read."""
        settings = super().settings()
        sides = ("width_column", "height_column") if SCALES[self.coordinates] is None else ()
        return {name: value for name, value in settings.items() if name not in sides}

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """Score each sample."""
        wanted = batch.columns.get(self.column, [None] * len(batch))
        return [NOT_APPLICABLE if wanted[row] is None else self._score_row(batch, row) for row in range(len(batch))]

    def _score_row(self, batch: ScoringBatch, row: int) -> Score:
        place = f"rewards.box_iou, sample {batch.sample_ids[row]}"
        wanted = wanted_boxes(batch.columns[self.column][row], f"{place}, column {self.column}")
        given = read_boxes(batch.completions[row])
        scale = SCALES[self.coordinates]
        if scale is not None:
            across, down = (
                _pixels(batch, row, column, place) / scale for column in (self.width_column, self.height_column)
            )
            given = [None if box is None else _scaled(box, across, down) for box in given]
        raw = matched_iou(given, wanted)
        return Score(raw if self.threshold is None else matched_iou(given, wanted, self.threshold), raw)


def read_boxes(completion: str) -> list[Box | None]:
    """Find every list of four numbers in square brackets, in order; None for one that is not a box.

    Boxes that the reasoning considers are not given as the answer: it ends with the last ``</think>``, and without one
    it reaches from ``<think>`` to the end. Of what is left the last ``<answer>`` counts, or everything where there is
    none. JSON such as ``[{"bbox_2d": [1, 2, 3, 4]}]`` is covered by its brackets.
    """
    # Cut by hand: an expression would search for the end from every beginning, which takes ages over spam.
    said = completion.rpartition("</think>")[2].partition("<think>")[0]
    parts = (part.partition("</answer>") for part in said.split("<answer>")[1:])
    answer = ([said] + [inside for inside, end, _ in parts if end])[-1]
    lists = (match.groups() for match in _FOUR_NUMBERS.finditer(answer))
    return [_as_box([_as_number(number) for number in numbers]) for numbers in lists]


def wanted_boxes(value: object, place: str) -> list[Box]:
    """Read the boxes of a prompt's column: four numbers, a list of such, or either as JSON text.

    Raises:
        InputError: anything else, or a box without area.
    """
    hint = "Give [left, top, right, bottom] with left < right and top < bottom, or a list of such."
    read = value
    if isinstance(value, str):
        try:
            read = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InputError(place, value, hint) from error
    if not isinstance(read, list | tuple):
        raise InputError(place, value, hint)
    several = all(isinstance(entry, list | tuple) for entry in read)
    boxes = [_as_box(entry) for entry in (read if several else [read])]
    if any(box is None for box in boxes):
        raise InputError(place, value, hint)
    return [box for box in boxes if box is not None]


def matched_iou(given: Sequence[Box | None], wanted: Sequence[Box], threshold: float | None = None) -> float:
    """Sum the intersections over unions of the best one-to-one matching, over the larger number of boxes.

    A box too many or too few costs its share, so that neither spamming boxes nor leaving hard ones out pays. The
    matching is that of Kuhn, 1955, "The Hungarian Method for the Assignment Problem".

    Args:
        given: None for something that is not a box; it matches nothing, and counts.
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
    """Compute the intersection over union of each box of one set with each of the other; every box has an area."""
    # torchvision has this too, but takes seconds to import, which a run on texts has no other use for.
    corners = np.maximum(first[:, None, :2], second[:, :2]), np.minimum(first[:, None, 2:], second[:, 2:])
    shared = (corners[1] - corners[0]).clip(min=0.0).prod(axis=2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(axis=1) for boxes in (first, second)]
    overlaps: Float64[np.ndarray, "first second"] = shared / (areas[0][:, None] + areas[1] - shared)
    return overlaps


def _scaled(box: Box, across: float, down: float) -> Box:
    left, top, right, bottom = box
    return left * across, top * down, right * across, bottom * down


def _pixels(batch: ScoringBatch, row: int, column: str, place: str) -> float:
    side = batch.columns[column][row] if column in batch.columns else None
    if not isinstance(side, int | float) or isinstance(side, bool) or not 1 <= side <= 1e6:
        hint = "Give the image's width and height in pixels, or set coordinates: same."
        raise InputError(f"{place}, column {column}", side, hint)
    return float(side)


def _as_number(text: str) -> float:
    return math.nan if text.lower().lstrip("+-") in ("null", "none") else float(text)


def _as_box(numbers: object) -> Box | None:
    """Return left, top, right, bottom of a box with an area; None for anything else."""
    if not isinstance(numbers, list | tuple) or len(numbers) != 4:
        return None
    if not all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers):
        return None
    # Negated where NaN must be refused with the rest.
    if not all(abs(number) <= MAX_COORDINATE for number in numbers):
        return None
    left, top, right, bottom = (float(number) for number in numbers)
    return (left, top, right, bottom) if left < right and top < bottom else None
