"""Parquet in and out: pinned schemas, digests of values, and the tools that open the files as they are."""

import io
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tasks.storage import schemas
from tasks.storage.tables import TableWriter, joint_digest, part_digests, read_table, write_table

SAMPLE = [
    ("sample_id", "string"),
    ("group_id", "string"),
    ("prompt_id", "string"),
    ("dataset", "string"),
    ("sibling", "int32"),
    ("prompt", "string"),
    ("columns", "string"),
]
TOKENS = [
    ("token_ids", "list<element: int32>"),
    ("rollout_logprobs", "list<element: float>"),
    ("scored_logprobs", "list<element: float>"),
    ("ref_logprobs", "list<element: float>"),
    ("loss_mask", "list<element: bool>"),
    ("support_ids", "list<element: int32>"),
    ("support_counts", "list<element: int32>"),
    ("length", "int32"),
    ("max_length", "int32"),
    ("finished", "bool"),
    ("temperature", "double"),
    ("top_p", "double"),
    ("top_k", "int32"),
    ("min_p", "double"),
]
ORIGIN = [("seed", "int64"), ("policy_version", "int32"), ("policy_digest", "string")]
PINNED = {
    "PICTURE_ROLLOUTS": [
        *SAMPLE,
        ("target_uri", "string"),
        ("target_sha256", "string"),
        *TOKENS,
        ("height", "int32"),
        ("width", "int32"),
        ("num_inference_steps", "int32"),
        ("guidance_scale", "double"),
        ("noise_seed", "int64"),
        *ORIGIN,
        ("defect", "string"),
        ("image", "struct<bytes: binary, path: string>"),
    ],
    "TEXT_ROLLOUTS": [
        *SAMPLE,
        *TOKENS,
        ("max_completion_length", "int32"),
        ("stop", "string"),
        ("system_prompt", "string"),
        ("chat_template", "bool"),
        *ORIGIN,
        ("completion", "string"),
    ],
    "REWARDS": [
        ("sample_id", "string"),
        ("value", "double"),
        ("raw", "double"),
        ("failure", "string"),
        ("seconds", "double"),
        ("provenance", "string"),
    ],
    "ADVANTAGES": [
        ("sample_id", "string"),
        ("group_id", "string"),
        ("prompt_id", "string"),
        ("dataset", "string"),
        ("reward", "double"),
        ("kl_penalty", "double"),
        ("advantage", "double"),
        ("group_mean", "double"),
        ("group_std", "double"),
        ("dropped", "bool"),
        ("imputed", "int32"),
        ("reward_breakdown", "list<element: struct<reward: string, value: double, scaled: double>>"),
    ],
    "METRICS": [("iteration", "int32"), ("metric", "string"), ("value", "double")],
    "UPDATE_STEPS": [
        ("optimizer_step", "int64"),
        ("loss", "double"),
        ("grad_norm", "double"),
        ("learning_rate", "double"),
        ("kl", "double"),
        ("entropy", "double"),
        ("clip_low", "double"),
        ("clip_high", "double"),
        ("clip_low_min", "double"),
        ("clip_high_max", "double"),
        ("ratio_mean", "double"),
        ("mismatch_weight", "double"),
        ("trained_tokens", "double"),
    ],
}


@pytest.mark.parametrize("name", PINNED)
def test_columns_are_those_of_schema_version_3(name: str, tmp_path: Path) -> None:
    assert schemas.SCHEMA_VERSION == 3
    schema: pa.Schema = getattr(schemas, name)
    pq.write_table(schema.empty_table(), tmp_path / "table.parquet")
    written = pq.read_schema(tmp_path / "table.parquet")
    assert [(field.name, str(field.type)) for field in written] == PINNED[name]
    assert written.metadata[b"grpo.schema_version"] == b"3"


def test_every_table_is_pinned() -> None:
    assert {name for name, value in vars(schemas).items() if isinstance(value, pa.Schema)} == set(PINNED)


def picture(shade: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (4, 2), (shade, 0, 255 - shade)).save(buffer, "PNG")
    return buffer.getvalue()


def rollouts(rows: int, *, seed: int = 2**63 - 1) -> dict[str, list[object]]:
    one = {
        "sample_id": "i000001.p0000.s00",
        "group_id": "i000001.p0000",
        "prompt_id": "0123456789abcdef",
        "dataset": "default",
        "prompt": "a cup, 一只猫",
        "columns": '{"tag": "x"}',
        "target_uri": None,
        "target_sha256": None,
        "token_ids": [1, 2, 3],
        "rollout_logprobs": [-0.5, -0.25, 0.0],
        "scored_logprobs": None,
        "ref_logprobs": None,
        "loss_mask": [True, True, False],
        "support_ids": None,
        "support_counts": None,
        "length": 2,
        "max_length": 3,
        "finished": True,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "height": 2,
        "width": 4,
        "num_inference_steps": 1,
        "guidance_scale": 1.0,
        "seed": seed,
        "noise_seed": 7,
        "policy_version": 0,
        "policy_digest": "d" * 64,
        "defect": None,
    }
    columns: dict[str, list[object]] = {name: [value] * rows for name, value in one.items()}
    columns["sibling"] = list(range(rows))
    columns["image"] = [{"bytes": picture(shade), "path": f"{shade}.png"} for shade in range(rows)]
    return columns


Entry = dict[str, str | float | None]


def entry(reward: str, value: float | None, scaled: float | None) -> Entry:
    return {"reward": reward, "value": value, "scaled": scaled}


BREAKDOWNS: list[list[Entry]] = [
    [entry("ssim", 0.25, 0.25), entry("ein Maß", 2.0, 1.0)],
    [entry("ssim", None, 0.75), entry("ein Maß", None, None)],
    [],
]


def advantages(breakdowns: list[list[Entry]]) -> dict[str, list[Any]]:
    one = {
        "sample_id": "i000001.p0000.s00",
        "group_id": "i000001.p0000",
        "prompt_id": "0123456789abcdef",
        "dataset": "default",
        "reward": 0.5,
        "kl_penalty": None,
        "advantage": -0.5,
        "group_mean": 0.75,
        "group_std": 0.25,
        "dropped": False,
        "imputed": 0,
    }
    columns: dict[str, list[Any]] = {name: [value] * len(breakdowns) for name, value in one.items()}
    return {**columns, "reward_breakdown": breakdowns}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "run" / "iteration_000001" / "rollouts"
    write_table(folder / "part-00000.parquet", schemas.PICTURE_ROLLOUTS, rollouts(3))
    (folder.parent / "rollouts.manifest.json").write_text("{}")
    return folder


class TestOtherTools:
    def test_polars(self, folder: Path) -> None:
        table = pl.read_parquet(folder / "*.parquet")
        assert table["sibling"].to_list() == [0, 1, 2]
        assert table["token_ids"].to_list() == [[1, 2, 3]] * 3
        assert table["rollout_logprobs"].to_list() == [[-0.5, -0.25, 0.0]] * 3
        assert table["seed"].to_list() == [2**63 - 1] * 3
        assert table["image"].struct.field("bytes").to_list() == [picture(shade) for shade in range(3)]

    def test_duckdb(self, folder: Path) -> None:
        files = f"{folder.parent.parent}/iteration_*/rollouts/*.parquet"
        with duckdb.connect() as database:
            query = f"select sibling, prompt, token_ids[1], image.path, image.bytes from read_parquet('{files}')"
            rows = database.sql(query).fetchall()
        assert rows == [(shade, "a cup, 一只猫", 1, f"{shade}.png", picture(shade)) for shade in range(3)]

    @pytest.fixture
    def cache(self, tmp_path: Path) -> str:
        return str(tmp_path / "datasets-cache")

    @pytest.mark.parametrize("way", ["files", "folder"])
    def test_datasets_shows_the_pictures(self, folder: Path, cache: str, way: str) -> None:
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
        write_table(folder / "part-00001.parquet", schemas.PICTURE_ROLLOUTS, rollouts(2, seed=5))
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


class TestDigest:
    def scores(
        self, value: float | None = 0.5, seconds: float = 1.0, failure: str | None = None
    ) -> dict[str, list[object]]:
        return {
            "sample_id": ["a"],
            "value": [value],
            "raw": [1.0],
            "failure": [failure],
            "seconds": [seconds],
            "provenance": ["{}"],
        }

    def digest(self, folder: Path, **changes: Any) -> str:
        return write_table(folder / "table.parquet", schemas.REWARDS, self.scores(**changes))

    def test_measured_seconds_are_not_among_the_values(self, tmp_path: Path) -> None:
        assert self.digest(tmp_path, seconds=1.0) == self.digest(tmp_path, seconds=2.0)

    def test_every_other_value_is(self, tmp_path: Path) -> None:
        digests = [self.digest(tmp_path, value=value) for value in (0.5, 0.5000000000000001, 0.0, None)]
        digests += [self.digest(tmp_path, value=None, failure=reason) for reason in ("timed out", "")]
        assert len(set(digests)) == 6

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

    def test_same_rows_give_the_same_bytes(self, tmp_path: Path) -> None:
        first = write_table(tmp_path / "1.parquet", schemas.PICTURE_ROLLOUTS, rollouts(2))
        second = write_table(tmp_path / "2.parquet", schemas.PICTURE_ROLLOUTS, rollouts(2))
        assert first == second
        assert (tmp_path / "1.parquet").read_bytes() == (tmp_path / "2.parquet").read_bytes()

    def test_parts_of_several_workers_come_to_the_digest_of_one(self, tmp_path: Path) -> None:
        groups = [rollouts(2, seed=seed) for seed in (1, 2, 3)]

        def written(name: str, batches: list[dict[str, list[object]]]) -> tuple[Path, str]:
            writer = TableWriter(path := tmp_path / name, schemas.PICTURE_ROLLOUTS)
            for batch in batches:
                writer.write(batch)
            return path, writer.close()

        path, whole = written("whole.parquet", groups)
        first, _ = written("first.parquet", groups[:2])
        second, alone = written("second.parquet", groups[2:])
        assert part_digests(path) == part_digests(first) + part_digests(second)
        assert joint_digest(part_digests(first) + part_digests(second)) == whole
        assert joint_digest(part_digests(second) + part_digests(first)) != whole
        assert alone == write_table(tmp_path / "third.parquet", schemas.PICTURE_ROLLOUTS, groups[2])
        assert pq.read_metadata(path).num_row_groups == 3
        assert read_table(tmp_path, schemas.PICTURE_ROLLOUTS, ["seed"]).num_rows == 14

    def test_file_without_digests_is_refused_by_name(self, tmp_path: Path) -> None:
        pq.write_table(schemas.METRICS.empty_table(), tmp_path / "metrics.parquet")
        with pytest.raises(ValueError, match=r"metrics\.parquet holds no digests"):
            part_digests(tmp_path / "metrics.parquet")

    def test_order_of_tables_counts(self) -> None:
        assert joint_digest(["a", "b"]) != joint_digest(["b", "a"])


class TestReadTable:
    def test_parts_come_in_the_order_of_their_names(self, tmp_path: Path) -> None:
        for part, seed in ((1, 11), (0, 10)):
            write_table(tmp_path / f"part-{part:05d}.parquet", schemas.PICTURE_ROLLOUTS, rollouts(2, seed=seed))
        assert read_table(tmp_path, schemas.PICTURE_ROLLOUTS, ["seed"])["seed"].to_pylist() == [10, 10, 11, 11]

    def test_batches_of_a_writer_are_one_table(self, tmp_path: Path) -> None:
        writer = TableWriter(tmp_path / "part-00000.parquet", schemas.PICTURE_ROLLOUTS)
        for seed in (1, 2):
            writer.write(rollouts(2, seed=seed))
        writer.close()
        assert writer.rows == 4
        assert read_table(tmp_path, schemas.PICTURE_ROLLOUTS)["seed"].to_pylist() == [1, 1, 2, 2]

    def test_other_schema_is_refused_by_name(self, tmp_path: Path) -> None:
        write_table(tmp_path / "scores.parquet", schemas.METRICS, {"iteration": [1], "metric": ["x"], "value": [1.0]})
        with pytest.raises(ValueError, match=r"scores\.parquet has another schema"):
            read_table(tmp_path, schemas.PICTURE_ROLLOUTS)
