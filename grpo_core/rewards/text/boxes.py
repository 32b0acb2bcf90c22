"""The reward of a policy that finds things in an image: the boxes of its answer beside those of the data.

Intersection over union: Everingham et al., 2010, "The PASCAL Visual Object Classes (VOC) Challenge", section 4.2; as
the reward of a policy that grounds a text in an image, Xu et al., 2025, "MedGround-R1" (arXiv:2507.02994).
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

import numpy as np
from jaxtyping import Float64
from pydantic import Field
from pydantic.dataclasses import dataclass

from grpo_core.errors import InputError
from grpo_core.rewards.reward import STRICT, Needs, Reward, Text
from grpo_core.rewards.scoring_batch import NOT_APPLICABLE, Score, ScoringBatch
from grpo_core.uses import Uses

Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""

Size = tuple[float, float]
"""Width, height."""

MAX_COORDINATE = 1e6
"""Beyond any image; larger numbers would overflow the areas."""

MAX_ASPECT = 200
"""Long side over short side from which transformers' resize refuses an image."""

_NUMBER = r"[-+]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?(?:nan|inf|infinity|null|none)"
_ONE_NUMBER = re.compile(_NUMBER, re.IGNORECASE)
_FOUR_NUMBERS = re.compile(r"\[" + ",".join([rf"\s*({_NUMBER})\s*"] * 4) + r"\]", re.IGNORECASE)

PositiveInt = Annotated[int, Field(gt=0)]
Coordinates = Literal["pixels", "input_pixels", "thousand", "unit"]


@dataclass(frozen=True, config=STRICT)
class BoxIouReward(Reward):
    """Mean IoU of the best one-to-one matching of given and wanted boxes, over the larger of the two numbers.

    The completion's boxes are its lists of four numbers, ``[left, top, right, bottom]``, of its last ``<answer>`` where
    it has one, after the last ``</think>``; plain, nested or in JSON (``{"bbox_2d": [...]}``). An answer of nothing but
    four numbers is a box too. One that encloses no area or reaches beyond the image covers nothing and counts as given.
    No box at all is 0; nothing wanted (an empty list) and nothing given is 1.

    The wanted boxes are in pixels of the image in the data: of the prompt's, or of the size in two columns. One that
    reaches beyond it is refused. Raw is the mean IoU, value the same or the share of boxes that reach the threshold.

    Attributes:
        column: the prompt file's column with the wanted box, ``[left, top, right, bottom]``, or a list of boxes; a
            sample without has no score.
        threshold: IoU from which a pair of boxes counts 1, and below which 0.
        coordinates: of the completion. ``pixels`` of the image in the data; ``input_pixels`` of the image as the
            processor resizes it for the model (Qwen2.5-VL); ``thousand``: 0 to 1000 across the image (Qwen2-VL,
            Qwen3-VL, GLM-4.5V); ``unit``: 0 to 1 (Kimi-VL).
        factor: of input_pixels: the sides are multiples of it, patch size times merge size.
        min_pixels: of input_pixels: width times height at least, as in the folder's preprocessor_config.json.
        max_pixels: the same at most.
        image: which of the prompt's images the boxes are in, from 0.
        width_column: the prompt file's column with the image's width in pixels, for prompts without an image.
        height_column: the same for its height.
    """

    column: Annotated[Text, Uses.NOTHING] = "box"
    threshold: Annotated[float, Field(gt=0, le=1)] | None = None
    coordinates: Coordinates = "pixels"
    factor: PositiveInt = 28
    min_pixels: PositiveInt = 56 * 56
    max_pixels: PositiveInt = 12845056
    image: Annotated[int, Field(ge=0)] = 0
    width_column: Annotated[Text, Uses.NOTHING] = "width"
    height_column: Annotated[Text, Uses.NOTHING] = "height"

    name: ClassVar[str] = "box_iou"
    version: ClassVar[str] = "3"

    def __post_init__(self) -> None:
        if self.min_pixels > self.max_pixels:
            hint = f"It is below min_pixels, {self.min_pixels}."
            raise InputError("rewards.box_iou.max_pixels", self.max_pixels, hint)

    @property
    def needs(self) -> Needs:
        """The column of the wanted boxes, and the size of the prompt's image."""
        return Needs(("text",), column=self.column, sources="optional")

    def settings(self) -> Mapping[str, object]:
        """Return what determines the scores; the resize and the columns of the sides only where they are read."""
        resize = ("factor", "min_pixels", "max_pixels") if self.coordinates != "input_pixels" else ()
        sides = ("width_column", "height_column") if self.coordinates == "pixels" else ()
        return {name: value for name, value in super().settings().items() if name not in (*resize, *sides)}

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """Score each sample."""
        wanted = batch.columns.get(self.column, [None] * len(batch))
        return [NOT_APPLICABLE if wanted[row] is None else self._score_row(batch, row) for row in range(len(batch))]

    def _score_row(self, batch: ScoringBatch, row: int) -> Score:
        columns = {name: values[row] for name, values in batch.columns.items()}
        sizes = [image.size for image in batch.source_images[row]] if batch.source_images else []
        try:
            wanted, size, extent = self._data_of(columns, sizes)
        except InputError as error:
            place = f"rewards.box_iou, sample {batch.sample_ids[row]}, {error.place}"
            raise InputError(place, error.value, error.hint) from error
        given = read_boxes(batch.completions[row])
        if size is not None and extent is not None:
            given = [None if box is None else _rescaled(box, extent, size) for box in given]
        raw = matched_iou(given, wanted)
        return Score(raw if self.threshold is None else matched_iou(given, wanted, self.threshold), raw)

    def check_prompt(self, columns: Mapping[str, object], sizes: Sequence[tuple[int, int]], prompt: str = "") -> None:
        """Refuse a prompt with wrong boxes, boxes beyond its image, or an image of unknown or impossible size."""
        if columns.get(self.column) is not None:
            self._data_of(columns, sizes)

    def _data_of(
        self, columns: Mapping[str, object], sizes: Sequence[tuple[int, int]]
    ) -> tuple[list[Box], Size | None, Size | None]:
        """Return the wanted boxes, the image's size, and the coordinates of its lower right corner in a completion.

        The latter two are None where the size is neither known nor needed.
        """
        size = self._size_of(columns, sizes)
        wanted = wanted_boxes(columns[self.column], f"column {self.column}", size)
        return wanted, size, None if size is None else self._extent(size)

    def _size_of(self, columns: Mapping[str, object], sizes: Sequence[tuple[int, int]]) -> Size | None:
        if sizes:
            if self.image >= len(sizes):
                hint = f"The prompt has {len(sizes)} images, and the first is number 0."
                raise InputError("image", self.image, hint)
            return sizes[self.image]
        if self.coordinates == "pixels":
            return None
        width, height = (_side(columns, name) for name in (self.width_column, self.height_column))
        return width, height

    def _extent(self, size: Size) -> Size:
        if self.coordinates == "input_pixels":
            if max(size) > MAX_ASPECT * min(size):
                hint = f"The processor takes images of at most {MAX_ASPECT} to 1: crop it."
                raise InputError("image", f"{size[0]:g}x{size[1]:g} pixels", hint)
            return resized_size(size, self.factor, self.min_pixels, self.max_pixels)
        return {"pixels": size, "thousand": (1000.0, 1000.0), "unit": (1.0, 1.0)}[self.coordinates]


def resized_size(size: Size, factor: int, min_pixels: int, max_pixels: int) -> Size:
    """Return width and height of an image as the processors of Qwen2-VL, Qwen2.5-VL and Qwen3-VL resize it.

    The sides become multiples of `factor`, patch size times merge size (28, and 32 for Qwen3-VL), and their product is
    within the bounds where the factor permits it: the rule of `smart_resize` in transformers, slow to import.
    """
    area = size[0] * size[1]
    # Python rounds halves to even numbers, as there.
    width, height = (round(side / factor) * factor for side in size)
    if width * height > max_pixels:
        shrink = math.sqrt(area / max_pixels)
        width, height = (max(factor, math.floor(side / shrink / factor) * factor) for side in size)
    elif width * height < min_pixels:
        grow = math.sqrt(min_pixels / area)
        width, height = (math.ceil(side * grow / factor) * factor for side in size)
    return width, height


def read_boxes(completion: str) -> list[Box | None]:
    """Find every list of four numbers in square brackets, in order; None for one that is not a box.

    Of what follows the last ``</think>`` (without one, precedes ``<think>``) the last ``<answer>`` counts, or all where
    there is none. Four numbers with spaces or commas between them are a box if they are all that is left.
    """
    # Cut by hand: an expression would search for the end from every beginning, which takes ages over spam.
    said = completion.rpartition("</think>")[2].partition("<think>")[0]
    parts = (part.partition("</answer>") for part in said.split("<answer>")[1:])
    answer = ([said] + [inside for inside, end, _ in parts if end])[-1]
    bare = answer.replace(",", " ").split()
    if len(bare) == 4 and all(map(_ONE_NUMBER.fullmatch, bare)):
        return [_as_box([_as_number(number) for number in bare])]
    lists = (match.groups() for match in _FOUR_NUMBERS.finditer(answer))
    return [_as_box([_as_number(number) for number in numbers]) for numbers in lists]


def wanted_boxes(value: object, place: str, size: Size | None = None) -> list[Box]:
    """Read the boxes of a prompt's column: four numbers, a list of such, or either as JSON text.

    InputError for anything else, a box without area, or one beyond an image of this size, if it is known.
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
    known = [box for box in boxes if box is not None]
    if len(known) < len(boxes):
        raise InputError(place, value, hint)
    if size is not None and not all(_is_within(box, size) for box in known):
        hint = f"It reaches beyond the image of {size[0]:g}x{size[1]:g} pixels: give pixels of the image in the data."
        raise InputError(place, value, hint)
    return known


def matched_iou(given: Sequence[Box | None], wanted: Sequence[Box], threshold: float | None = None) -> float:
    """Sum the intersections over unions of the best one-to-one matching, over the larger number of boxes.

    In [0, 1]; 1 where nothing is wanted and nothing given. None, not a box, matches nothing and counts. With a
    threshold a pair counts 1 from this IoU on and 0 below. The matching is that of Kuhn, 1955, "The Hungarian Method
    for the Assignment Problem".
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


def _rescaled(box: Box, extent: Size, size: Size) -> Box | None:
    """Return a box of the completion in pixels of the image; None for one that reaches beyond it."""
    if not _is_within(box, extent):
        return None
    across, down = size[0] / extent[0], size[1] / extent[1]
    return box[0] * across, box[1] * down, box[2] * across, box[3] * down


def _is_within(box: Box, extent: Size) -> bool:
    return min(box[:2]) >= 0 and box[2] <= extent[0] and box[3] <= extent[1]


def _side(columns: Mapping[str, object], column: str) -> float:
    side = columns.get(column)
    if not isinstance(side, int | float) or isinstance(side, bool) or not 1 <= side <= MAX_COORDINATE:
        hint = "Give the image's width and height in pixels, or set coordinates: pixels."
        raise InputError(f"column {column}", side, hint)
    return float(side)


def _as_number(text: str) -> float:
    return math.nan if text.lower().lstrip("+-") in ("null", "none") else float(text)


def _as_box(numbers: object) -> Box | None:
    if not isinstance(numbers, list | tuple) or len(numbers) != 4:
        return None
    if not all(isinstance(number, int | float) and not isinstance(number, bool) for number in numbers):
        return None
    # Negated where NaN must be refused with the rest.
    if not all(abs(number) <= MAX_COORDINATE for number in numbers):
        return None
    left, top, right, bottom = (float(number) for number in numbers)
    return (left, top, right, bottom) if left < right and top < bottom else None
