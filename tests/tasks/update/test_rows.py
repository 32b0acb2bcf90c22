"""Which stored rows an update trains: those with an advantage in its stream, of tables of this version and the last."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from grpo_core.policies.protocol import policy_family
from grpo_core.records import TrainingRows
from grpo_core.streams import Stream
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.tables.parquet import write_table
from tasks.storage.tables.schemas import ADVANTAGES, IMAGE_ROLLOUTS
from tasks.update.rows import read_training_rows

POLICY = PolicyRef(version=0, digest="d" * 64)
NEW = {"token_sample", "image_number", "stream"}
"""Columns that tables of version 5 do not have."""


def commit(store: ArtifactStore, folder: str, schema: pa.Schema, columns: dict[str, Any], version: int) -> ArtifactRef:
    rows = len(columns["sample_id"])
    kept = [field for field in schema if version > 5 or field.name not in NEW]
    table = {field.name: columns.get(field.name, [None] * rows) for field in kept}
    with store.staging() as staged:
        digest = write_table(staged / "part-00000.parquet", pa.schema(kept, metadata=schema.metadata), table)
        return store.commit(staged, folder, digest=digest, schema_version=version, rows=rows, seconds=0.0, metrics={})


def rollouts(store: ArtifactStore, names: list[str], iteration: int = 1, version: int = 7) -> ArtifactRef:
    """Tokens [1], [1, 2], ... with log-probs of -1 each."""
    rows = len(names)
    lengths = range(1, rows + 1)
    columns = {
        "sample_id": names,
        "prompt": ["a cup"] * rows,
        "token_ids": [[*range(1, length + 1)] for length in lengths],
        "rollout_logprobs": [[-1.0] * length for length in lengths],
        "loss_mask": [[True] * length for length in lengths],
        "finished": [True] * rows,
        "max_length": [9] * rows,
        "temperature": [1.0] * rows,
        "top_k": [0] * rows,
        "top_p": [1.0] * rows,
        "min_p": [0.0] * rows,
        "height": [32] * rows,
        "width": [32] * rows,
        "num_inference_steps": [2] * rows,
        "guidance_scale": [1.0] * rows,
        "policy_version": [0] * rows,
        "policy_digest": [POLICY.digest] * rows,
    }
    return commit(store, f"iteration_{iteration:06d}/rollouts", IMAGE_ROLLOUTS, columns, version)


def advantages(
    store: ArtifactStore, values: list[tuple[str, Stream, float | None]], version: int = 7, reward: float | None = 0.5
) -> ArtifactRef:
    names, streams, numbers = zip(*values, strict=True)
    columns = {
        "sample_id": names,
        "stream": streams,
        "advantage": numbers,
        "reward": [reward] * len(values),
    }
    return commit(store, "iteration_000009/advantages", ADVANTAGES, columns, version)


def read(
    store: ArtifactStore, parts: list[ArtifactRef], scores: ArtifactRef, folder: Path, stream: Stream = "tokens"
) -> TrainingRows:
    family = policy_family("glm_image")
    return read_training_rows(store, parts, scores, POLICY, family, folder, stream=stream, max_staleness=0).rows


def test_rows_with_an_advantage_in_the_stream_and_no_others(store: ArtifactStore, tmp_path: Path) -> None:
    drawn = rollouts(store, ["a", "b", "c", "d"])
    scores = advantages(
        store, [("a", "tokens", 1.0), ("a", "denoising", 7.0), ("b", "denoising", 8.0), ("c", "tokens", None)]
    )
    rows = read(store, [drawn], scores, tmp_path)
    assert rows.sample_ids == ("a",)
    assert rows.advantages.tolist() == [1.0]


@pytest.mark.parametrize("versions", [(5, 5, 5), (5, 6, 6)])
def test_tables_of_version_5_are_read_as_tokens(
    store: ArtifactStore, tmp_path: Path, versions: tuple[int, int, int]
) -> None:
    """Also beside those of this version, as in a run that goes on with it."""
    first, second, scored = versions
    parts = [rollouts(store, ["a", "b"], version=first), rollouts(store, ["c"], 2, version=second)]
    scores = advantages(store, [("a", "tokens", 1.0), ("b", "tokens", None), ("c", "tokens", 3.0)], scored)
    rows = read(store, parts, scores, tmp_path)
    assert rows.sample_ids == ("a", "c")
    assert rows.advantages.tolist() == [1.0, 3.0]
    assert (rows.max_length, rows.rollout_logprobs.tolist()) == (9, [[-1.0], [-1.0]])
    assert [path.name for path in Path(store.path("iteration_000001/rollouts")).iterdir()] == ["part-00000.parquet"]
    found = pq.read_schema(Path(store.path("iteration_000001/rollouts")) / "part-00000.parquet").names
    assert ("token_sample" in found) == (first > 5)


@pytest.mark.parametrize("version", [5, 6])
def test_a_stream_without_advantages_is_refused(store: ArtifactStore, tmp_path: Path, version: int) -> None:
    drawn, scores = rollouts(store, ["a"], version=version), advantages(store, [("a", "tokens", 1.0)], version)
    with pytest.raises(ValueError, match="no sample has an advantage in its denoising"):
        read(store, [drawn], scores, tmp_path, "denoising")


def test_samples_without_any_reward_are_refused(store: ArtifactStore, tmp_path: Path) -> None:
    drawn, scores = rollouts(store, ["a"]), advantages(store, [("a", "tokens", None)], reward=None)
    with pytest.raises(ValueError, match="every reward of every sample is null"):
        read(store, [drawn], scores, tmp_path)


def test_where_no_advantage_is_left_there_are_no_rows(store: ArtifactStore, tmp_path: Path) -> None:
    rows = read(store, [rollouts(store, ["a"])], advantages(store, [("a", "tokens", None)]), tmp_path)
    assert (len(rows), rows.max_length) == (0, 9)
