"""Stored advantages, which have a row per sample and stream."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.storage.parquet import STREAM, leading_stream, read_advantages

UNEVEN = pa.table(
    {
        "sample_id": ["a", "b", "a", "c"],
        "stream": ["denoising", "tokens", "tokens", "denoising"],
        "reward": [1.0, 2.0, 3.0, 4.0],
    }
)


def test_tables_are_read_with_their_streams(tmp_path: Path) -> None:
    paths = [tmp_path / "1.parquet", tmp_path / "2.parquet"]
    for path in paths:
        pq.write_table(UNEVEN, path)
    assert read_advantages(paths[:1]).equals(UNEVEN)
    table = read_advantages(paths, ("sample_id",))
    assert (table.column_names, table.num_rows) == (["sample_id", STREAM], 2 * UNEVEN.num_rows)


def test_statistics_are_of_the_first_stream() -> None:
    assert leading_stream(UNEVEN)["sample_id"].to_pylist() == ["b", "a"]
    denoising = UNEVEN.filter(pa.array([True, False, False, True]))
    assert leading_stream(denoising)["sample_id"].to_pylist() == ["a", "c"]
    assert leading_stream(UNEVEN.slice(0, 0)).num_rows == 0
