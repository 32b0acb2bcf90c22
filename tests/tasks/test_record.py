"""An iteration's figures in one table."""

import io
from pathlib import Path

import polars as pl
import pytest

from tasks.record import gather_metrics, write_metrics
from tasks.storage.reference import ArtifactRef
from tasks.storage.store import ArtifactStore


def artifact(folder: str, seconds: float, **metrics: float) -> ArtifactRef:
    return ArtifactRef(
        uri=f"run/{folder}", sha256="a", digest="b", schema_version=1, rows=1, seconds=seconds, metrics=metrics
    )


def kept(store: ArtifactStore) -> dict[str, float]:
    content = store.read_file("iteration_000001/metrics.parquet")
    assert content is not None
    table = pl.read_parquet(io.BytesIO(content))
    return dict(zip(table["metric"], table["value"], strict=True))


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(str(tmp_path), "run")


def test_figures_of_all_stages_with_their_seconds() -> None:
    stages = [artifact("iteration_000001/rollouts", 2.0, tokens=80.0), artifact("policies/000001", 0.5, kl=0.1)]
    heldout = artifact("evaluations/000001/advantages", 9.0, reward=0.7)
    assert gather_metrics(stages, heldout) == {
        "tokens": 80.0,
        "kl": 0.1,
        "seconds/rollouts": 2.0,
        "seconds/update": 0.5,
        "step_time": 2.5,
        "heldout_reward": 0.7,
    }


def test_a_heldout_reward_of_an_earlier_start_stays(store: ArtifactStore) -> None:
    write_metrics(store, 1, {"reward": 0.5, "heldout_reward": 0.7})
    write_metrics(store, 1, {"reward": 0.6})
    assert kept(store) == {"reward": 0.6, "heldout_reward": 0.7}
    write_metrics(store, 1, {"reward": 0.6, "heldout_reward": 0.8})
    assert kept(store)["heldout_reward"] == 0.8


def test_a_damaged_table_is_written_anew(store: ArtifactStore) -> None:
    store.write_file("iteration_000001/metrics.parquet", b"PAR1 damaged PAR1")
    write_metrics(store, 1, {"reward": 0.6})
    assert kept(store) == {"reward": 0.6}
