"""How well the boxes in a completion cover those beside its prompt.

Intersection over union: Everingham et al., 2010, "The PASCAL Visual Object Classes (VOC) Challenge", section 4.2; as
the reward of a policy that grounds a text in an image, Xu et al., 2025, "MedGround-R1" (arXiv:2507.02994).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

from grpo_core.errors import InputError
from grpo_core.records import Modality
from grpo_core.rewards.protocol import NOT_APPLICABLE, Reward, Score, ScoringBatch
from grpo_core.rewards.settings import check_choice
from grpo_core.rewards.text.boxes import Box, matched_iou, read_boxes, wanted_boxes

SCALES: Mapping[str, float | None] = MappingProxyType({"same": None, "unit": 1.0, "thousand": 1000.0})
"""What the image's width and height are in the completion's coordinates; None for those of the column."""


@dataclass(frozen=True)
class BoxIouReward(Reward):
    """Mean IoU of the best one-to-one matching of given and wanted boxes, over the larger of the two numbers.

    The completion's boxes are its lists of four numbers, ``[left, top, right, bottom]``, inside ``<answer>`` tags where
    it has them; plain, nested or in JSON (``{"bbox_2d": [...]}``). A list that encloses no area (corners out of order,
    NaN) covers nothing and counts as given. No box at all is 0; nothing wanted (an empty list) and nothing given is 1.

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

    column: str = "box"
    threshold: float | None = None
    coordinates: str = "same"
    width_column: str = "width"
    height_column: str = "height"

    name: ClassVar[str] = "box_iou"
    media: ClassVar[tuple[Modality, ...]] = ("text",)
    version: ClassVar[str] = "1"

    def __post_init__(self) -> None:
        for field in ("column", "width_column", "height_column"):
            if not isinstance(getattr(self, field), str) or not getattr(self, field):
                hint = "Give the name of a column, as text."
                raise InputError(f"rewards.box_iou.{field}", getattr(self, field), hint)
        check_choice("rewards.box_iou.coordinates", self.coordinates, tuple(SCALES))
        number = isinstance(self.threshold, int | float) and not isinstance(self.threshold, bool)
        if self.threshold is not None and not (number and 0 < self.threshold <= 1):
            raise InputError("rewards.box_iou.threshold", self.threshold, "Set an IoU above 0 and up to 1, or null.")

    @property
    def needs_column(self) -> str:
        """The wanted boxes'."""
        return self.column

    def settings(self) -> Mapping[str, object]:
        """Columns, threshold and coordinates."""
        sides = {"width_column": self.width_column, "height_column": self.height_column}
        return {
            "column": self.column,
            "threshold": self.threshold if self.threshold is None else float(self.threshold),
            "coordinates": self.coordinates,
            **(sides if SCALES[self.coordinates] is not None else {}),
        }

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """One score a sample.

        Raises:
            InputError: a column holds something else than boxes or, where they are read, sides in pixels.
        """
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


def _scaled(box: Box, across: float, down: float) -> Box:
    left, top, right, bottom = box
    return left * across, top * down, right * across, bottom * down


def _pixels(batch: ScoringBatch, row: int, column: str, place: str) -> float:
    side = batch.columns[column][row] if column in batch.columns else None
    if not isinstance(side, int | float) or isinstance(side, bool) or not 1 <= side <= 1e6:
        hint = "Give the image's width and height in pixels, or set coordinates: same."
        raise InputError(f"{place}, column {column}", side, hint)
    return float(side)
