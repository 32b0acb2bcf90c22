"""An iteration's figures, gathered from its stages into one table."""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from tasks.storage.reference import ArtifactRef
from tasks.storage.schemas import METRICS
from tasks.storage.store import ArtifactStore
from tasks.storage.tables import write_table


def write_iteration_metrics(
    store: ArtifactStore, iteration: int, stages: Sequence[ArtifactRef], heldout: ArtifactRef | None
) -> dict[str, float]:
    """Write `iteration_NNNNNN/metrics.parquet`, a row a metric, and return the same figures.

    Args:
        store: the run's folder.
        iteration: its number.
        stages: the artifacts of its stages.
        heldout: advantages of the evaluation of the policy that it made, if there was one.
    """
    metrics: dict[str, float] = {}
    for stage in stages:
        metrics |= stage.metrics
        metrics[f"seconds/{_stage_name(stage)}"] = stage.seconds
    metrics["step_time"] = sum(stage.seconds for stage in stages)
    if heldout is not None and "reward" in heldout.metrics:
        metrics["heldout_reward"] = heldout.metrics["reward"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.parquet"
        names = sorted(metrics)
        values = [metrics[name] for name in names]
        write_table(path, METRICS, {"iteration": [iteration] * len(names), "metric": names, "value": values})
        store.write_file(f"iteration_{iteration:06d}/metrics.parquet", path.read_bytes())
    return metrics


def _stage_name(artifact: ArtifactRef) -> str:
    first, last = artifact.folder.split("/")
    return "update" if first == "policies" else last
