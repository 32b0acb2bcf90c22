"""The tools that open the tables: polars, DuckDB and datasets."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import duckdb
import polars as pl
import pyarrow as pa
import pytest
from PIL import Image

from tasks.storage.tables import schemas
from tasks.storage.tables.parquet import write_table
from tests.tasks.storage.table_rows import BREAKDOWNS, advantages, image, rollouts

Load = Callable[..., datasets.Dataset]
TABLES = {"part": schemas.IMAGE_ROLLOUTS, "images": schemas.IMAGES}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "iteration_000001" / "rollouts"
    for name, schema in TABLES.items():
        write_table(folder / f"{name}-00000.parquet", schema, rollouts(3))
    (folder.parent / "rollouts.manifest.json").write_text("{}")
    return folder


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Reads a folder or files with datasets, without a progress bar or the user's cache."""
    datasets.disable_progress_bars()

    def load_split(path: str, **options: Any) -> datasets.Dataset:
        return datasets.load_dataset(path, split="train", cache_dir=str(tmp_path / "datasets-cache"), **options)

    return load_split


@pytest.fixture
def broken_down(tmp_path: Path) -> Path:
    """A table of advantages with lists of structs."""
    path = tmp_path / "advantages" / "advantages.parquet"
    write_table(path, schemas.ADVANTAGES, advantages(BREAKDOWNS))
    return path


def test_polars(folder: Path, broken_down: Path) -> None:
    table = pl.read_parquet(folder / "part-*.parquet")
    assert table["sibling"].to_list() == [0, 1, 2]
    assert table["token_ids"].to_list() == [[1, 2, 3]] * 3
    assert table["rollout_logprobs"].to_list() == [[-0.5, -0.25, 0.0]] * 3
    assert table["seed"].to_list() == [2**63 - 1] * 3
    images = pl.read_parquet(folder / "images-*.parquet")
    assert images["image"].struct.field("bytes").to_list() == [image(shade) for shade in range(3)]
    assert pl.read_parquet(broken_down)["reward_breakdown"].to_list() == BREAKDOWNS


def test_duckdb(folder: Path, broken_down: Path) -> None:
    files = f"{folder.parent.parent}/iteration_*/rollouts/part-*.parquet"
    columns = "sibling, prompt, token_ids[1]"
    with duckdb.connect() as database:
        rows = database.sql(f"select {columns} from read_parquet('{files}')").fetchall()
        breakdowns = database.sql(f"select reward_breakdown from read_parquet('{broken_down}')").fetchall()
        query = (
            "select entry.reward, entry.value, entry.scaled from "
            f"(select unnest(reward_breakdown) as entry from read_parquet('{broken_down}'))"
        )
        entries = database.sql(query).fetchall()
    assert rows == [(shade, "a cup, 一只猫", 1) for shade in range(3)]
    assert [breakdown for (breakdown,) in breakdowns] == BREAKDOWNS
    assert entries == [tuple(each.values()) for breakdown in BREAKDOWNS for each in breakdown]


def test_datasets_shows_the_images(folder: Path, load: Load) -> None:
    parts, images = (load("parquet", data_files={"train": str(folder / f"{name}-*.parquet")}) for name in TABLES)
    assert isinstance(images.features["image"], datasets.Image)
    assert parts.features["token_ids"] == datasets.List(datasets.Value("int32"))
    for shade, (row, drawn) in enumerate(zip(parts, images, strict=True)):
        row = {**row, **drawn}
        assert isinstance(row["image"], Image.Image)
        assert row["image"].size == (4, 2)
        assert row["image"].getpixel((0, 0)) == (shade, 0, 255 - shade)
        assert row["rollout_logprobs"] == [-0.5, -0.25, 0.0]
        assert row["seed"] == 2**63 - 1


def test_datasets_reads_parts_that_have_different_digests(folder: Path, load: Load) -> None:
    write_table(folder / "images-00001.parquet", schemas.IMAGES, rollouts(2, seed=5))
    rows = load("parquet", data_files={"train": str(folder / "images-*.parquet")})
    assert [row["image"].getpixel((0, 0))[0] for row in rows] == [0, 1, 2, 0, 1]


def test_datasets_reads_lists_of_structs(broken_down: Path, load: Load) -> None:
    assert [row["reward_breakdown"] for row in load(str(broken_down.parent))] == BREAKDOWNS


@pytest.mark.parametrize("name", [name for name, value in vars(schemas).items() if isinstance(value, pa.Schema)])
def test_datasets_takes_the_features_of_every_table(name: str) -> None:
    schema: pa.Schema = getattr(schemas, name)
    features = datasets.Features.from_arrow_schema(schema)
    kinds = {field.name: field.type for field in features.arrow_schema}
    assert {field.name: field.type for field in schema} == {
        column: pa.struct([("bytes", pa.binary()), ("path", pa.string())]) if column == "image" else kind
        for column, kind in kinds.items()
    }
