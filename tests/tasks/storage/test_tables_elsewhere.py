"""The tools that open the tables as they are: polars, DuckDB, pandas and datasets."""

from pathlib import Path

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from PIL import Image

from tasks.storage.tables import schemas
from tasks.storage.tables.parquet import write_table
from tests.tasks.storage import table_rows
from tests.tasks.storage.table_rows import BREAKDOWNS, advantages, image, rollouts
from tests.tasks.storage.tables.test_schemas import PINNED

folder = table_rows.folder


class TestOtherTools:
    def test_polars(self, folder: Path) -> None:
        table = pl.read_parquet(folder / "*.parquet")
        assert table["sibling"].to_list() == [0, 1, 2]
        assert table["token_ids"].to_list() == [[1, 2, 3]] * 3
        assert table["rollout_logprobs"].to_list() == [[-0.5, -0.25, 0.0]] * 3
        assert table["seed"].to_list() == [2**63 - 1] * 3
        assert table["image"].struct.field("bytes").to_list() == [image(shade) for shade in range(3)]

    def test_duckdb(self, folder: Path) -> None:
        files = f"{folder.parent.parent}/iteration_*/rollouts/*.parquet"
        with duckdb.connect() as database:
            query = f"select sibling, prompt, token_ids[1], image.path, image.bytes from read_parquet('{files}')"
            rows = database.sql(query).fetchall()
        assert rows == [(shade, "a cup, 一只猫", 1, f"{shade}.png", image(shade)) for shade in range(3)]

    @pytest.fixture
    def cache(self, tmp_path: Path) -> str:
        return str(tmp_path / "datasets-cache")

    @pytest.mark.parametrize("way", ["files", "folder"])
    def test_datasets_shows_the_images(self, folder: Path, cache: str, way: str) -> None:
        import datasets

        datasets.disable_progress_bars()
        if way == "files":
            files = {"train": str(folder / "*.parquet")}
            table = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=cache)
        else:
            table = datasets.load_dataset(str(folder), split="train", cache_dir=cache)
        assert isinstance(table.features["image"], datasets.Image)
        assert table.features["token_ids"] == datasets.List(datasets.Value("int32"))
        for shade, row in enumerate(table):
            assert isinstance(row["image"], Image.Image)
            assert row["image"].size == (4, 2)
            assert row["image"].getpixel((0, 0)) == (shade, 0, 255 - shade)
            assert row["rollout_logprobs"] == [-0.5, -0.25, 0.0]
            assert row["seed"] == 2**63 - 1

    def test_datasets_reads_parts_that_hold_different_digests(self, folder: Path, cache: str) -> None:
        import datasets

        datasets.disable_progress_bars()
        write_table(folder / "part-00001.parquet", schemas.IMAGE_ROLLOUTS, rollouts(2, seed=5))
        table = datasets.load_dataset(str(folder), split="train", cache_dir=cache)
        assert [row["image"].getpixel((0, 0))[0] for row in table] == [0, 1, 2, 0, 1]

    @pytest.fixture
    def broken_down(self, tmp_path: Path) -> Path:
        path = tmp_path / "advantages" / "advantages.parquet"
        write_table(path, schemas.ADVANTAGES, advantages(BREAKDOWNS))
        return path

    def test_lists_of_structs_in_polars(self, broken_down: Path) -> None:
        table = pl.read_parquet(broken_down)
        assert table["reward_breakdown"].to_list() == BREAKDOWNS
        # As a person asks for it: a row a sample and reward.
        long = table.select(pl.int_range(pl.len()).alias("row"), "reward_breakdown").explode("reward_breakdown")
        long = long.drop_nulls("reward_breakdown").unnest("reward_breakdown")
        assert long.rows() == [(row, *each.values()) for row, breakdown in enumerate(BREAKDOWNS) for each in breakdown]

    def test_lists_of_structs_in_duckdb(self, broken_down: Path) -> None:
        with duckdb.connect() as database:
            told = database.sql(f"select reward_breakdown from read_parquet('{broken_down}')").fetchall()
            query = (
                "select entry.reward, entry.value, entry.scaled from "
                f"(select unnest(reward_breakdown) as entry from read_parquet('{broken_down}'))"
            )
            rows = database.sql(query).fetchall()
        assert [breakdown for (breakdown,) in told] == BREAKDOWNS
        assert rows == [tuple(each.values()) for breakdown in BREAKDOWNS for each in breakdown]

    def test_lists_of_structs_in_datasets(self, broken_down: Path, cache: str) -> None:
        import datasets

        datasets.disable_progress_bars()
        table = datasets.load_dataset(str(broken_down.parent), split="train", cache_dir=cache)
        number = datasets.Value("float64")
        kinds = {"reward": datasets.Value("string"), "value": number, "scaled": number}
        assert table.features["reward_breakdown"] == datasets.List(kinds)
        assert [row["reward_breakdown"] for row in table] == BREAKDOWNS

    @pytest.mark.parametrize("name", PINNED)
    def test_datasets_takes_the_features_of_every_table(self, name: str) -> None:
        import datasets

        schema: pa.Schema = getattr(schemas, name)
        features = datasets.Features.from_arrow_schema(schema)
        kinds = {field.name: field.type for field in features.arrow_schema}
        assert {field.name: field.type for field in schema} == {
            column: pa.struct([("bytes", pa.binary()), ("path", pa.string())]) if column == "image" else kind
            for column, kind in kinds.items()
        }
