"""Which stored rows an update trains: those with an advantage in its stream."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from grpo_core.policies.protocol import policy_family
from grpo_core.records import TrainingRows
from grpo_core.streams import Stream
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.tables.parquet import write_table
from tasks.storage.tables.schemas import ADVANTAGES, IMAGE_ROLLOUTS, SCHEMA_VERSION
from tasks.update.rows import read_training_rows

POLICY = PolicyRef(version=0, digest="d" * 64)


def commit(store: ArtifactStore, folder: str, schema: pa.Schema, columns: dict[str, Any]) -> ArtifactRef:
    rows = len(columns["sample_id"])
    table = {name: columns.get(name, [None] * rows) for name in schema.names}
    with store.staging() as staged:
        digest = write_table(staged / "part-00000.parquet", schema, table)
        return store.commit(
            staged, folder, digest=digest, schema_version=SCHEMA_VERSION, rows=rows, seconds=0.0, metrics={}
        )


def rollouts(store: ArtifactStore, names: list[str], iteration: int = 1) -> ArtifactRef:
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
    return commit(store, f"iteration_{iteration:06d}/rollouts", IMAGE_ROLLOUTS, columns)


def advantages(
    store: ArtifactStore, values: list[tuple[str, Stream, float | None]], reward: float | None = 0.5
) -> ArtifactRef:
    names, streams, numbers = zip(*values, strict=True)
    columns = {
        "sample_id": names,
        "stream": streams,
        "advantage": numbers,
        "reward": [reward] * len(values),
    }
    return commit(store, "iteration_000009/advantages", ADVANTAGES, columns)


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


def test_tables_of_several_rounds_are_read_as_one(store: ArtifactStore, tmp_path: Path) -> None:
    parts = [rollouts(store, ["a", "b"]), rollouts(store, ["c"], 2)]
    scores = advantages(store, [("a", "tokens", 1.0), ("b", "tokens", None), ("c", "tokens", 3.0)])
    rows = read(store, parts, scores, tmp_path)
    assert rows.sample_ids == ("a", "c")
    assert rows.advantages.tolist() == [1.0, 3.0]
    assert (rows.max_length, rows.rollout_logprobs.tolist()) == (9, [[-1.0], [-1.0]])


def test_a_stream_without_advantages_is_refused(store: ArtifactStore, tmp_path: Path) -> None:
    drawn, scores = rollouts(store, ["a"]), advantages(store, [("a", "tokens", 1.0)])
    with pytest.raises(ValueError, match="no sample has an advantage in its denoising"):
        read(store, [drawn], scores, tmp_path, "denoising")


def test_samples_without_any_reward_are_refused(store: ArtifactStore, tmp_path: Path) -> None:
    drawn, scores = rollouts(store, ["a"]), advantages(store, [("a", "tokens", None)], reward=None)
    with pytest.raises(ValueError, match="every reward of every sample is null"):
        read(store, [drawn], scores, tmp_path)


def test_where_no_advantage_is_left_there_are_no_rows(store: ArtifactStore, tmp_path: Path) -> None:
    rows = read(store, [rollouts(store, ["a"])], advantages(store, [("a", "tokens", None)]), tmp_path)
    assert (len(rows), rows.max_length) == (0, 9)
