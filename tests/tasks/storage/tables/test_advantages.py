"""Stored advantages with and without the column `stream`, and one row per sample of them."""

from pathlib import Path

import polars as pl
import pytest

from tasks.storage.tables.advantages import leading_stream, one_per_sample, read_advantages

UNEVEN = pl.DataFrame(
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
    pl.DataFrame({"reward": [0.5], "sample_id": ["z"]}).write_parquet(paths[0])
    UNEVEN.write_parquet(paths[1])
    return paths


def test_tables_without_streams_are_of_tokens(tables: list[Path]) -> None:
    table = read_advantages(tables, ("sample_id", "reward"))
    assert table.rows() == [("z", 0.5, "tokens"), *UNEVEN.select("sample_id", "reward", "stream").rows()]
    assert read_advantages(tables[:1])["stream"].to_list() == ["tokens"]
    assert read_advantages(tables[1:]).columns == UNEVEN.columns


def test_a_sample_has_the_row_of_its_first_stream() -> None:
    assert one_per_sample(UNEVEN).rows() == [("b", "tokens", 2.0), ("a", "tokens", 3.0), ("c", "denoising", 4.0)]


def test_equal_names_in_several_iterations_are_several_samples() -> None:
    table = pl.DataFrame({"sample_id": ["a", "a"], "iteration": [1, 2], "stream": ["tokens", "denoising"]})
    assert one_per_sample(table).height == 2


def test_statistics_are_of_the_first_stream() -> None:
    assert leading_stream(UNEVEN)["sample_id"].to_list() == ["b", "a"]
    assert leading_stream(UNEVEN.filter(stream="denoising"))["sample_id"].to_list() == ["a", "c"]
    assert leading_stream(UNEVEN.clear()).is_empty()
