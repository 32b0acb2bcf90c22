"""Tables of two artifacts: rows joined by their keys, columns compared in batches of rows, images pixel by pixel."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from jaxtyping import Int
from PIL import Image

from grpo_core.rollouts.images import decode_stored, open_image
from tasks.runs.samples import IMAGE
from tasks.storage.parquet import MEASURED, oversized, scan_tables
from tasks.verification.records import Difference
from tasks.verification.values import (
    NOTHING_CUT,
    Side,
    Tally,
    UnreadableError,
    compare_leaf,
    leaves_of,
)

_BATCH_BYTES, _BATCH_ROWS = 32 * 2**20, 4096
_TOKEN_IDS = "token_ids"

_FIRST = (
    *(
        "sample_id",
        "iteration",
        "group_id",
        "prompt_id",
        "dataset",
        "sibling",
        "token_sample",
        "image_number",
        "stream",
    ),
    *("prompt", "columns", "sources", "target_uri", "target_sha256"),
    *("seed", "noise_seed", "step_seed", "policy_version", "policy_digest"),
)
"""Columns that decide all others of a row, first; sampling settings and columns of other tables come after them."""

_OF_TOKENS = ("rollout_logprobs", "scored_logprobs", "ref_logprobs", "loss_mask")  # a value for each token
_LAST = (
    *(_TOKEN_IDS, "loss_mask", "length", "finished", "completion_start", "completion"),
    *("support_counts", "support_ids", "rollout_logprobs", "scored_logprobs", "ref_logprobs"),
    *("denoising_logprobs", "defect", IMAGE),
)
"""Columns of what was sampled, in the order in which they follow from another. What stands behind a token that differs
in its row follows from that token, so that it is not compared."""

_ITEMS: Mapping[str, str] = MappingProxyType(
    {"denoising_logprobs": "step", "reward_breakdown": "reward", "sources": "image"}
)
_CANCELLING = frozenset(
    {*("rollout_logprobs", "scored_logprobs", "ref_logprobs", "denoising_logprobs"), *("loss", "policy_loss", "kl")}
)
"""Columns of differences of numbers of the order of 1 or more, whose rounding they have however small they are."""

_SCORES = 4.0  # windows of SSIM subtract squares of means from means of squares
_PIXELS = 256.0  # with the default tolerance a level, to which a value between two levels can be rounded up or down
_CODES = pl.CompatLevel.oldest()

Follows = dict[str, int]
"""Samples with a token that differs, with its index; 0 for those that only one side has."""


@dataclass(frozen=True)
class Table:
    """A table of an artifact: the pattern of its files and the columns that tell its rows apart."""

    pattern: str
    keys: tuple[str, ...] = ("sample_id",)


def compare_table(table: Table, stored: Side, computed: Side, follows: Follows) -> Iterator[Difference]:
    """Yield the differences of a table, column by column; `follows` gets the samples whose tokens differ."""
    try:
        yield from _compare(table, (stored, computed), follows)
    except UnreadableError as error:
        yield error.difference(table.pattern)


def _compare(table: Table, sides: tuple[Side, Side], follows: Follows) -> Iterator[Difference]:
    opened = [_Opened(table, side) for side in sides]
    stored, computed = opened
    joined = stored.keys.join(computed.keys, on=[*table.keys, _NTH], how="full", nulls_equal=True, coalesce=True)
    joined = joined.sort([*table.keys, _NTH])
    yield from _rows_differ(table, joined, follows)
    common = joined.drop_nulls([_AT, f"{_AT}_right"])
    yield from _order_differs(table, common)
    columns: list[str] = []
    for name in _in_order({**computed.schema, **stored.schema}):
        kinds = [each.schema.get(name) for each in opened]
        if None in kinds or (kinds[0] != kinds[1] and pl.Null not in kinds):
            said = [f"column of {kind}" if kind is not None else "no such column" for kind in kinds]
            yield Difference(
                place=f"{table.pattern}, {name}", stored=said[0], computed=said[1], count=len(common), total=len(common)
            )
        elif name not in table.keys:
            columns.append(name)
    tallies: dict[str, Tally] = {}
    size = min(each.rows_at_once for each in opened)
    for batch in common.iter_slices(size):
        rows = [_named(table, row) for row in batch.select(table.keys).iter_rows()]
        frames = [
            each.rows(batch[at].to_numpy(), columns) for each, at in zip(opened, (_AT, f"{_AT}_right"), strict=True)
        ]
        _compare_batch(table, rows, columns, frames, tallies, follows)
    yield from filter(None, (tally.difference() for tally in tallies.values()))


_AT, _NTH = "\0at", "\0nth"
"""Columns of keys: where the row stands, and which of several rows with the same keys it is."""


class _Opened:
    """One side's files of a table."""

    def __init__(self, table: Table, side: Side) -> None:
        self._side, names = side, list(table.keys)
        with side.reading():
            size = rows = 0
            for path in side.files:
                if (reason := oversized(path, path.stat().st_size)) is not None:
                    raise ValueError(f"{path.name} {reason}")
                found = pq.read_metadata(path)
                for group in map(found.row_group, range(found.num_row_groups)):
                    # Numbers that repeat or ascend take more in memory.
                    numbers = sum(group.column(each).num_values for each in range(group.num_columns))
                    size += group.total_byte_size + 8 * numbers
                rows += found.num_rows
            self.rows_at_once = max(1, min(_BATCH_ROWS, _BATCH_BYTES * rows // max(size, 1)))
            scan = scan_tables(side.files)
            schema = scan.collect_schema()
            if missing := [name for name in names if name not in schema]:
                raise ValueError(f"no column {missing[0]}")
            self.schema = {name: kind for name, kind in schema.items() if name not in MEASURED}
            self._scan = scan
            keys = scan.select(names).collect()
            self.keys = keys.with_columns(
                pl.int_range(pl.len()).over(names).alias(_NTH), pl.int_range(pl.len()).alias(_AT)
            )

    def rows(self, places: Int[np.ndarray, " rows"], columns: Sequence[str]) -> pl.DataFrame:
        """Return the rows in these places, in this order, and read little more than them."""
        order = np.argsort(places, kind="stable")
        ordered, begin = places[order], 0
        parts: list[pl.DataFrame] = []
        with self._side.reading():
            while begin < len(ordered):
                first = int(ordered[begin])
                end = int(np.searchsorted(ordered, first + self.rows_at_once))
                part = self._scan.select(columns).slice(first, int(ordered[end - 1]) - first + 1).collect()
                parts.append(part[ordered[begin:end] - first])
                begin = end
        return pl.concat(parts)[np.argsort(order, kind="stable")]


def _in_order(names: Mapping[str, object]) -> list[str]:
    def rank(name: str) -> int:
        return _FIRST.index(name) if name in _FIRST else len(_FIRST) + (1 + _LAST.index(name) if name in _LAST else 0)

    return sorted(names, key=rank)


def _named(table: Table, row: Sequence[object]) -> tuple[str | None, str | None]:
    """Return a row's sample id, and its other keys as text."""
    named = dict(zip(table.keys, row, strict=True))
    sample_id = named.pop("sample_id", None)
    others = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in named.items())
    return None if sample_id is None else str(sample_id), others or None


def _rows_differ(table: Table, joined: pl.DataFrame, follows: Follows) -> Iterator[Difference]:
    single = joined.filter(pl.any_horizontal(pl.col(_AT, f"{_AT}_right").is_null()))
    if "sample_id" in table.keys:
        # The image of a row that is not there is not missing on its own.
        single = single.filter(~pl.col("sample_id").is_in([*follows]))
        follows |= dict.fromkeys(single["sample_id"].drop_nulls(), 0)
    if single.height:
        first = single.row(0, named=True)
        sample_id, index = _named(table, [first[name] for name in table.keys])
        said = ["no row" if first[at] is None else "a row" for at in (_AT, f"{_AT}_right")]
        yield Difference(
            place=f"{table.pattern}, rows",
            sample_id=sample_id,
            index=index,
            stored=said[0],
            computed=said[1],
            count=single.height,
            total=joined.height,
        )


def _order_differs(table: Table, common: pl.DataFrame) -> Iterator[Difference]:
    """Yield that rows stand in another order: minibatches are made of rows in their order."""
    stored, computed = (common.sort(at) for at in (_AT, f"{_AT}_right"))
    differ = np.flatnonzero((stored[_AT] != computed[_AT]).to_numpy())
    if differ.size:
        first = int(differ[0])
        said = [_named(table, each.select(table.keys).row(first)) for each in (stored, computed)]
        yield Difference(
            place=f"{table.pattern}, order of rows",
            sample_id=said[0][0],
            index=f"row {first}",
            stored=" ".join(filter(None, said[0])),
            computed=" ".join(filter(None, said[1])),
            count=differ.size,
            total=common.height,
        )


def _compare_batch(
    table: Table,
    rows: Sequence[tuple[str | None, str | None]],
    columns: Sequence[str],
    frames: Sequence[pl.DataFrame],
    tallies: dict[str, Tally],
    follows: Follows,
) -> None:
    for name in columns:
        cut = np.array([follows.get(sample_id or "", NOTHING_CUT) for sample_id, _ in rows], np.int64)
        if name not in _OF_TOKENS:
            cut = np.where((cut < NOTHING_CUT) & (name in _LAST), 0, NOTHING_CUT)
        sides = [frame[name].to_arrow(compat_level=_CODES) for frame in frames]
        if pa.types.is_null(sides[0].type) != pa.types.is_null(sides[1].type):
            kind = next(each.type for each in sides if not pa.types.is_null(each.type))
            sides = [each.cast(kind) for each in sides]
        if name == IMAGE and pa.types.is_struct(sides[0].type):
            tally = tallies.setdefault(IMAGE, Tally(f"{table.pattern}, pixels", magnitude=255.0, allowance=_PIXELS))
            files = zip(*(each.field("bytes").to_pylist() for each in sides), strict=True)
            names = [sample_id or "" for sample_id, _ in rows]
            for sample_id, compared, (theirs, ours) in zip(names, cut > 0, files, strict=True):
                if compared:
                    _compare_images(tally, sample_id, theirs, ours)
            sides = [each.field("path") for each in sides]
            name = f"{IMAGE}.path"
        for stored, computed in zip(*(leaves_of(name, each) for each in sides), strict=True):
            place, at_least = f"{table.pattern}, {stored.name}", 1.0 if name in _CANCELLING else 0.0
            tally = tallies.setdefault(
                stored.name, Tally(place, stored.numeric or computed.numeric, magnitude=at_least)
            )
            item = _ITEMS.get(name, "token" if name in _LAST else "entry")
            first = compare_leaf(tally, rows, stored, computed, item, cut)
            if name == _TOKEN_IDS:
                found = ((rows[int(at)][0], int(first[at])) for at in np.flatnonzero(first < NOTHING_CUT))
                follows |= {sample_id: index for sample_id, index in found if sample_id is not None}


def _compare_images(tally: Tally, sample_id: str, stored: bytes | None, computed: bytes | None) -> None:
    """Count the levels of two images that differ, 0 to 255; those of equal files are not decoded."""
    if stored == computed:
        tally.total += _levels_in(stored)
        return
    images = [_decoded(content, sample_id) for content in (stored, computed)]
    pixels = [each for each in images if not isinstance(each, str)]
    if len(pixels) < 2 or pixels[0].shape != pixels[1].shape:
        tally.add_uneven(1)
        tally.note(sample_id, None, *(each if isinstance(each, str) else _size(each) for each in images))
    elif (differ := tally.add(*pixels)).any():
        place = tuple(int(each[0]) for each in np.nonzero(differ))
        tally.note(sample_id, str([*place]), *(str(int(each[place])) for each in pixels))


def _levels_in(content: bytes | None) -> int:
    """Return how many levels an image has by its header; 0 for what is no image."""
    try:
        with Side("stored", Path(), ()).reading():
            width, height = open_image(content or b"", "image", ("PNG",)).size
    except UnreadableError:
        return 0
    return 3 * width * height


def _size(pixels: np.ndarray) -> str:
    height, width, _ = pixels.shape
    return f"{width}x{height} pixels"


def _decoded(content: bytes | None, sample_id: str) -> np.ndarray | str:
    """Return the levels of a stored image, or as text why there are none."""
    if content is None:
        return "no image"
    try:
        with Side("stored", Path(), ()).reading():
            image: Image.Image = decode_stored(content, sample_id)
            return np.asarray(image, np.float32)
    except UnreadableError as error:
        return f"unreadable: {error.reason}"
