"""Stored advantages with and without the column `stream`."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.storage.tables.advantages import leading_stream, read_advantages

UNEVEN = pa.table(
    {
        "sample_id": ["a", "b", "a", "c"],
        "stream": ["denoising", "tokens", "tokens", "denoising"],
        "reward": [1.0, 2.0, 3.0, 4.0],
    }
)


@pytest.fixture
def tables(tmp_path: Path) -> list[Path]:
    """One of a run that knew no streams, and one of both."""
    paths = [tmp_path / "old.parquet", tmp_path / "new.parquet"]
    pq.write_table(pa.table({"reward": [0.5], "sample_id": ["z"]}), paths[0])
    pq.write_table(UNEVEN, paths[1])
    return paths


def rows(table: pa.Table) -> list[tuple[object, ...]]:
    return [tuple(row.values()) for row in table.to_pylist()]


def test_tables_without_streams_are_of_tokens(tables: list[Path]) -> None:
    table = read_advantages(tables, ("sample_id", "reward"))
    assert rows(table) == [("z", 0.5, "tokens"), *rows(UNEVEN.select(["sample_id", "reward", "stream"]))]
    assert read_advantages(tables[:1])["stream"].to_pylist() == ["tokens"]
    assert read_advantages(tables[1:]).equals(UNEVEN)
    assert read_advantages(tables).num_rows == 5


def test_statistics_are_of_the_first_stream() -> None:
    assert leading_stream(UNEVEN)["sample_id"].to_pylist() == ["b", "a"]
    denoising = UNEVEN.filter(pa.array([True, False, False, True]))
    assert leading_stream(denoising)["sample_id"].to_pylist() == ["a", "c"]
    assert leading_stream(UNEVEN.slice(0, 0)).num_rows == 0
