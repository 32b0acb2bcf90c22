"""Parquet in and out: digests of values, what a reader refuses, and columns that change only with their version."""

import contextlib
import hashlib
import io
from pathlib import Path
from typing import Any

import datasets
import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tasks.storage import parquet, schemas
from tasks.storage.lists import padded, unpadded
from tasks.storage.parquet import (
    STREAM,
    TableWriter,
    joint_digest,
    leading_stream,
    part_digests,
    read_advantages,
    read_checked,
    read_table,
    write_table,
)
from tasks.storage.schemas import METRICS
from tests.tasks.storage.made_artifacts import BREAKDOWNS, Entry, advantages, entry, image, rollouts


class TestDigest:
    def scores(
        self, value: float | None = 0.5, seconds: float = 1.0, failure: str | None = None
    ) -> dict[str, list[object]]:
        return {
            "sample_id": ["a"],
            "iteration": [1],
            "reward": ["ssim"],
            "value": [value],
            "raw": [1.0],
            "failure": [failure],
            "seconds": [seconds],
            "provenance": ["{}"],
        }

    def digest(self, folder: Path, **changes: Any) -> str:
        return write_table(folder / "table.parquet", schemas.REWARDS, self.scores(**changes))

    def test_every_value_but_measured_seconds_is_in_it(self, tmp_path: Path) -> None:
        assert self.digest(tmp_path, seconds=1.0) == self.digest(tmp_path, seconds=2.0)
        digests = [self.digest(tmp_path, value=value) for value in (0.5, 0.5000000000000001, 0.0, None)]
        digests += [self.digest(tmp_path, value=None, failure=reason) for reason in ("timed out", "")]
        assert len(set(digests)) == 6
        pq.write_table(schemas.METRICS.empty_table(), tmp_path / "metrics.parquet")
        with pytest.raises(ValueError, match=r"metrics\.parquet"):
            part_digests(tmp_path / "metrics.parquet")

    def test_so_is_every_value_of_a_structs_list(self, tmp_path: Path) -> None:
        changes: list[list[Entry]] = [
            BREAKDOWNS[0],
            BREAKDOWNS[0][::-1],
            [*BREAKDOWNS[0], entry("jpeg", None, None)],
            [entry("ssim", 0.25, 0.5), BREAKDOWNS[0][1]],
            [entry("ssim", 0.25, None), BREAKDOWNS[0][1]],
            [],
        ]
        digests = [
            write_table(tmp_path / "table.parquet", schemas.ADVANTAGES, advantages([change])) for change in changes
        ]
        assert len(set(digests)) == 6
        # The same rows give the same bytes.
        first = write_table(tmp_path / "1.parquet", schemas.IMAGE_ROLLOUTS, rollouts(2))
        second = write_table(tmp_path / "2.parquet", schemas.IMAGE_ROLLOUTS, rollouts(2))
        assert first == second
        assert (tmp_path / "1.parquet").read_bytes() == (tmp_path / "2.parquet").read_bytes()

    def test_parts_of_several_workers_have_the_digest_of_one(self, tmp_path: Path) -> None:
        groups = [rollouts(2, seed=seed) for seed in (1, 2, 3)]

        def written(name: str, batches: list[dict[str, list[object]]]) -> tuple[Path, str]:
            writer = TableWriter(path := tmp_path / name, schemas.IMAGE_ROLLOUTS)
            for batch in batches:
                writer.write(batch)
            return path, writer.close()

        path, digest = written("whole.parquet", groups)
        first, _ = written("first.parquet", groups[:2])
        second, second_digest = written("second.parquet", groups[2:])
        assert part_digests(path) == part_digests(first) + part_digests(second)
        assert joint_digest(part_digests(first) + part_digests(second)) == digest
        assert joint_digest(part_digests(second) + part_digests(first)) != digest
        assert second_digest == write_table(tmp_path / "third.parquet", schemas.IMAGE_ROLLOUTS, groups[2])
        assert pq.read_metadata(path).num_row_groups == 1
        assert read_table(tmp_path, schemas.IMAGE_ROLLOUTS, ["seed"]).num_rows == 14

    def test_the_size_of_row_groups_changes_no_digest(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        groups = [rollouts(2, seed=seed) for seed in (1, 2, 3)]
        digests, found = set(), []
        for size in (1, parquet.ROW_GROUP_BYTES):
            monkeypatch.setattr(parquet, "ROW_GROUP_BYTES", size)
            writer = TableWriter(tmp_path / str(size) / "part.parquet", schemas.IMAGE_ROLLOUTS)
            for batch in groups:
                writer.write(batch)
            digests.add(writer.close())
            found.append(pq.read_metadata(tmp_path / str(size) / "part.parquet").num_row_groups)
        assert found == [3, 1]
        assert len(digests) == 1
        first, second = (read_table(folder, schemas.IMAGE_ROLLOUTS) for folder in sorted(tmp_path.iterdir()))
        assert first.equals(second)


class TestReadTable:
    def test_parts_come_in_the_order_of_their_names(self, tmp_path: Path) -> None:
        for part, seed in ((1, 11), (0, 10)):
            write_table(tmp_path / f"part-{part:05d}.parquet", schemas.IMAGE_ROLLOUTS, rollouts(2, seed=seed))
        assert read_table(tmp_path, schemas.IMAGE_ROLLOUTS, ["seed"])["seed"].to_pylist() == [10, 10, 11, 11]
        write_table(tmp_path / "scores.parquet", schemas.METRICS, {"iteration": [1], "metric": ["x"], "value": [1.0]})
        with pytest.raises(ValueError, match=r"scores\.parquet has another schema"):
            read_table(tmp_path, schemas.IMAGE_ROLLOUTS)


# Stored advantages have a row per sample and stream.
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
    assert leading_stream(UNEVEN)["sample_id"].to_pylist() == ["b", "a"]
    denoising = UNEVEN.filter(pa.array([True, False, False, True]))
    assert leading_stream(denoising)["sample_id"].to_pylist() == ["a", "c"]
    assert leading_stream(UNEVEN.slice(0, 0)).num_rows == 0


# The first digits of the sha256 of names and types: after a change of columns, raise SCHEMA_VERSION and write new ones.
VERSION = 10
SCHEMAS: dict[str, pa.Schema] = {
    **{name: value for name, value in vars(schemas).items() if isinstance(value, pa.Schema)},
    "images with both streams": schemas.rollout_schema("image", ["tokens", "denoising"]),
    "images made without tokens": schemas.rollout_schema("image", ["denoising"]),
    "images without a stream": schemas.rollout_schema("image", []),
}
DIGESTS: dict[str, str] = {
    "IMAGE_ROLLOUTS": "5de396499881d64a",
    "TEXT_ROLLOUTS": "97cd53880ca34525",
    "IMAGES": "b8df0fdabaa4665f",
    "BASELINES": "4056d298bc176aeb",
    "REWARDS": "3d7b8780ed64efae",
    "ADVANTAGES": "c2cb60185bbda9f0",
    "METRICS": "731d5254988a9344",
    "UPDATE_STEPS": "1d4cafbcd03bb648",
    "NFT_STEPS": "ce95903e6cbdb4a1",
    "VELOCITY_STEPS": "dd3bba4403a66a19",
    "images with both streams": "8cb2b39ced3dc680",
    "images made without tokens": "f972ed09c10ed852",
    "images without a stream": "62b86d55230d3b48",
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_change_of_columns_needs_another_schema_version(name: str, tmp_path: Path) -> None:
    schema = SCHEMAS[name]
    pq.write_table(schema.empty_table(), tmp_path / "table.parquet")
    written = pq.read_schema(tmp_path / "table.parquet")
    columns = [(field.name, str(field.type)) for field in written]
    digest = hashlib.sha256(repr(columns).encode()).hexdigest()
    assert (schemas.SCHEMA_VERSION, digest[:16]) == (VERSION, DIGESTS[name]), columns
    assert written.metadata[b"grpo.schema_version"] == str(VERSION).encode()


def test_lists_without_entries_come_back_as_rows_without_columns() -> None:
    column = unpadded(torch.zeros(3, 0), torch.zeros(3, 0, dtype=torch.bool))
    assert column.to_pylist() == [[]] * 3
    assert padded(pl.Series(column)).shape == (3, 0)


TABLES = {"part": schemas.IMAGE_ROLLOUTS, "images": schemas.IMAGES}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "iteration_000001" / "rollouts"
    for name, schema in TABLES.items():
        write_table(folder / f"{name}-00000.parquet", schema, rollouts(3))
    (folder.parent / "rollouts.manifest.json").write_text("{}")
    return folder


@pytest.fixture
def broken_down(tmp_path: Path) -> Path:
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
    with duckdb.connect() as database:
        rows = database.sql(f"select sibling, prompt, token_ids[1] from read_parquet('{files}')").fetchall()
        breakdowns = database.sql(f"select reward_breakdown from read_parquet('{broken_down}')").fetchall()
    assert rows == [(shade, "a cup, 一只猫", 1) for shade in range(3)]
    assert [breakdown for (breakdown,) in breakdowns] == BREAKDOWNS


def test_datasets_shows_the_images(folder: Path, tmp_path: Path) -> None:
    datasets.disable_progress_bars()
    parts, images = (
        datasets.load_dataset(
            "parquet",
            data_files={"train": str(folder / f"{name}-*.parquet")},
            split="train",
            cache_dir=str(tmp_path / "datasets-cache"),
        )
        for name in TABLES
    )
    assert isinstance(images.features["image"], datasets.Image)
    assert parts.features["token_ids"] == datasets.List(datasets.Value("int32"))
    for shade, (row, drawn) in enumerate(zip(parts, images, strict=True)):
        row = {**row, **drawn}
        assert row["image"].size == (4, 2)
        assert row["image"].getpixel((0, 0)) == (shade, 0, 255 - shade)
        assert row["rollout_logprobs"] == [-0.5, -0.25, 0.0]
        assert row["seed"] == 2**63 - 1


def test_a_flipped_bit_anywhere_but_in_the_writers_name_is_found() -> None:
    names = [f"metric {number}" for number in range(5)]
    columns = {"iteration": [1] * 5, "metric": names, "value": [number / 3 for number in range(5)]}
    write_table(written := io.BytesIO(), METRICS, columns)
    content, unnoticed = written.getvalue(), []
    assert read_checked(content, METRICS) == columns
    for place in range(0, len(content), 3):
        flipped = bytearray(content)
        flipped[place] ^= 1 << place % 8
        with contextlib.suppress(ValueError):
            assert read_checked(bytes(flipped), METRICS) == columns
            unnoticed.append(place)
    # The field's header and its length stand before it.
    name = pq.read_metadata(written).created_by.encode()
    assert {*unnoticed} <= {*range(content.index(name) - 2, content.index(name) + len(name))}
