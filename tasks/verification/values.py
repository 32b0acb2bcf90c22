"""Values of two artifacts next to each other: which differ, how many, the first of them, and how far they are apart."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Bool, Float, Int
from safetensors import SafetensorError

from grpo_core.errors import InputError
from tasks.verification.records import Difference

FLOAT32_DIGITS = 24  # binary digits of a float32, the leading one included

NOTHING_CUT = np.iinfo(np.int64).max
_LONGEST_TEXT = 120

SideName = Literal["stored", "computed"]

_ERRORS = (
    *(OSError, ValueError, TypeError, KeyError, RecursionError, InputError),
    *(pa.ArrowException, pl.exceptions.PolarsError, pl.exceptions.PanicException, SafetensorError),
)
"""What the readers of Parquet, safetensors, PNG and JSON raise for files that are none, or that promise other data."""


class UnreadableError(Exception):
    """A file of one of the two artifacts cannot be read."""

    def __init__(self, side: SideName, reason: str) -> None:
        super().__init__(reason)
        self.side, self.reason = side, reason

    def difference(self, place: str) -> Difference:
        """Return the difference that it is of the other artifact's file in this place."""
        said, other = f"unreadable: {self.reason}", "readable"
        stored, computed = (said, other) if self.side == "stored" else (other, said)
        return Difference(place=place, stored=stored, computed=computed, count=1, total=1)


@dataclass(frozen=True)
class Side:
    """Files of one of the two artifacts, in the order in which their rows are read."""

    name: SideName
    folder: Path
    files: Sequence[Path]

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Turn what readers raise for a damaged file into an UnreadableError without paths of this machine."""
        try:
            yield
        except _ERRORS as error:
            said = (str(error).splitlines() or [""])[0].replace(f"{self.folder}/", "")
            raise UnreadableError(self.name, f"{type(error).__name__} {said[:_LONGEST_TEXT]}".strip()) from error


@dataclass
class Tally:
    """Counts the values of a column or of tensors that differ, and keeps the first and the largest distance.

    Attributes:
        numeric: whether the values are numbers.
        magnitude: the largest finite magnitude of a number so far, or what it is taken to be at least.
        allowance: as of the Difference.
    """

    place: str
    numeric: bool = True
    count: int = 0
    total: int = 0
    distance: float = 0.0
    magnitude: float = 0.0
    allowance: float = 1.0
    _first: dict[str, Any] = field(default_factory=dict)

    def add(self, stored: Float[np.ndarray, "..."], computed: Float[np.ndarray, "..."]) -> Bool[np.ndarray, "..."]:
        """Count numbers, of which NaN stands for none, and return which differ."""
        differ = floats_differ(stored, computed)
        self.count, self.total = self.count + int(differ.sum()), self.total + differ.size
        for each in (stored, computed):
            self.magnitude = max(self.magnitude, float(np.abs(each).max(initial=0.0, where=np.isfinite(each))))
        if differ.any():
            with np.errstate(invalid="ignore", over="ignore"):
                apart = np.abs(computed[differ] - stored[differ])
            self.distance = max(self.distance, float(np.where(np.isnan(apart), math.inf, apart).max()))
        return differ

    def add_uneven(self, count: int) -> None:
        """Count values that only one of both sides has."""
        self.count, self.total, self.distance = self.count + count, self.total + count, math.inf

    def note(self, sample_id: str | None, index: str | None, stored: str, computed: str) -> None:
        """Keep the first values that differ; others that come later are not kept."""
        if not self._first:
            self._first = {"sample_id": sample_id, "index": index, "stored": stored, "computed": computed}

    @property
    def differs(self) -> bool:
        """Whether values that differ were counted."""
        return self.count > 0

    def difference(self) -> Difference | None:
        """Return what was found; None where nothing differs."""
        if not self.differs:
            return None
        return Difference(
            place=self.place,
            count=self.count,
            total=self.total,
            largest=self.distance / last_place(self.magnitude) if self.numeric else None,
            allowance=self.allowance,
            **self._first,
        )


def last_place(magnitude: float) -> float:
    """Return the unit in the last place of float32 at a magnitude."""
    exponent = math.frexp(magnitude)[1] if magnitude else -125
    return math.ldexp(1.0, max(exponent, -125) - FLOAT32_DIGITS)


def floats_differ(stored: Float[np.ndarray, "..."], computed: Float[np.ndarray, "..."]) -> Bool[np.ndarray, "..."]:
    """Return which numbers are not the same bits; NaN is NaN, and 0 is not -0."""
    same = (stored == computed) & (np.signbit(stored) == np.signbit(computed))
    both: Bool[np.ndarray, ...] = ~(same | (np.isnan(stored) & np.isnan(computed)))
    return both


@dataclass(frozen=True)
class Leaf:
    """Values of a column: one a row, or those of all rows' lists one after another with their lengths.

    Attributes:
        lengths: of the rows' lists, -1 for a null; None where a row has one value.
    """

    name: str
    values: pa.Array
    lengths: Int[np.ndarray, " rows"] | None

    @property
    def numeric(self) -> bool:
        """Whether the values are numbers with a distance; ids, counts and seeds are not."""
        return bool(pa.types.is_floating(self.values.type))

    def element(self, row: int, index: int) -> str:
        """Return a value as text, in full precision."""
        if self.lengths is None:
            return shown(self.values[row])
        if self.lengths[row] < 0:
            return "null"
        start = int(self.lengths[:row].clip(0).sum())
        return shown(self.values[start + index]) if index < self.lengths[row] else f"ends after {self.lengths[row]}"


def leaves_of(name: str, column: pa.Array, lengths: Int[np.ndarray, " rows"] | None = None) -> list[Leaf]:
    """Return the values of a column, of structs those of each field."""
    kind = column.type
    if lengths is None and (pa.types.is_list(kind) or pa.types.is_large_list(kind)):
        counted = pc.fill_null(pc.list_value_length(column), -1).to_numpy(zero_copy_only=False).astype(np.int64)
        return leaves_of(name, column.flatten(), counted)
    if pa.types.is_struct(kind):
        fields = [(kind.field(index).name, pc.struct_field(column, index)) for index in range(kind.num_fields)]
        return [leaf for field_name, values in fields for leaf in leaves_of(f"{name}.{field_name}", values, lengths)]
    if pa.types.is_nested(kind):
        column = pa.array([repr(value) for value in column.to_pylist()], pa.string())
    return [Leaf(name, column, lengths)]


def shown(scalar: pa.Scalar) -> str:
    """Return a value as text, in full precision."""
    value = scalar.as_py()
    if value is None:
        return "null"
    return str(np.float32(value)) if scalar.type == pa.float32() else repr(value)


def compare_leaf(
    tally: Tally,
    rows: Sequence[tuple[str | None, str | None]],
    stored: Leaf,
    computed: Leaf,
    item: str,
    cut: Int[np.ndarray, " rows"],
) -> Int[np.ndarray, " rows"]:
    """Count the values of a column that differ.

    Args:
        rows: sample id of each row, and what else tells it from others.
        item: what an entry of a list is called.
        cut: from which entry of a row's list, or 0 from which value, nothing is compared.

    Returns:
        Index of the first entry of each row that differs, NOTHING_CUT for rows that do not.
    """
    lengths = [np.ones(len(rows), np.int64) if each.lengths is None else each.lengths for each in (stored, computed)]
    shorter, longer = np.minimum(*lengths), np.maximum(*lengths)
    common = np.minimum(shorter.clip(0), cut)
    of_row = np.repeat(np.arange(len(rows)), common)
    within = np.arange(len(of_row)) - np.repeat(common.cumsum() - common, common)
    values = [
        each.values.take(pa.array(np.repeat(own.clip(0).cumsum() - own.clip(0), common) + within))
        for each, own in zip((stored, computed), lengths, strict=True)
    ]
    differ = _differ(tally, *values)
    first = np.full(len(rows), NOTHING_CUT)
    np.minimum.at(first, of_row[differ], within[differ])
    uneven = (shorter < longer) & (cut >= longer)
    if uneven.any():
        tally.add_uneven(int(np.maximum(longer[uneven] - shorter[uneven].clip(0), 1).sum()))
        first[uneven] = np.minimum(first[uneven], shorter[uneven].clip(0))
    if (found := np.flatnonzero(first < NOTHING_CUT)).size:
        row, index = int(found[0]), int(first[found[0]])
        _note(tally, rows[row], stored, computed, row, index, item)
    return first


def _differ(tally: Tally, stored: pa.Array, computed: pa.Array) -> Bool[np.ndarray, " entries"]:
    if tally.numeric:
        numbers = [pc.fill_null(each.cast(pa.float64()), math.nan).to_numpy() for each in (stored, computed)]
        # A null is no NaN, though both have no distance.
        apart = tally.add(*numbers)
        others = _is_valid(stored) != _is_valid(computed)
        if (more := int((others & ~apart).sum())) > 0:
            tally.count, tally.distance = tally.count + more, math.inf
        both: Bool[np.ndarray, " entries"] = apart | others
        return both
    equal = pc.fill_null(pc.equal(stored, computed), False).to_numpy(zero_copy_only=False)
    differ: Bool[np.ndarray, " entries"] = ~equal & (_is_valid(stored) | _is_valid(computed))
    tally.count, tally.total = tally.count + int(differ.sum()), tally.total + len(differ)
    return differ


def _is_valid(values: pa.Array) -> Bool[np.ndarray, " entries"]:
    valid: Bool[np.ndarray, " entries"] = values.is_valid().to_numpy(zero_copy_only=False)
    return valid


def _note(
    tally: Tally, row: tuple[str | None, str | None], stored: Leaf, computed: Leaf, at: int, index: int, item: str
) -> None:
    texts, place = [each.element(at, index) for each in (stored, computed)], row[1]
    if stored.lengths is not None or computed.lengths is not None:
        place = ", ".join(filter(None, [row[1], f"{item} {index}"]))
    elif max(map(len, texts)) > _LONGEST_TEXT:
        # Of long texts, such as prompts and provenance, where they begin to differ.
        begin = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
        place = ", ".join(filter(None, [row[1], f"character {max(begin - 1, 0)}"]))
        texts = [f"...{text[max(begin - 20, 0) : begin + _LONGEST_TEXT // 2]}..." for text in texts]
    tally.note(row[0], place, *texts)
