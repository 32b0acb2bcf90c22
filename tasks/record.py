"""An iteration's figures, gathered from its stages into one table."""

import io
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tasks.compute_advantages import Draw
from tasks.draw_figures import over_draws
from tasks.storage.reference import ArtifactRef
from tasks.storage.schemas import METRICS
from tasks.storage.store import ArtifactStore
from tasks.storage.tables import write_table

HELDOUT = "heldout_reward"


def gather_metrics(
    draws: Sequence[Draw], advantages: ArtifactRef, update: ArtifactRef, heldout: ArtifactRef | None
) -> dict[str, float]:
    """The figures of all stages of an iteration, with the seconds that each took when it ran.

    Args:
        draws: rollouts and rewards; figures of several draws are means over their samples, and tokens are summed.
        advantages: of all draws.
        update: the checkpoint.
        heldout: advantages of the evaluation of the policy that the iteration made, if there was one.
    """
    metrics: dict[str, float] = {}
    for stages in (tuple(rollouts for rollouts, _ in draws), tuple(rewards for _, rewards in draws)):
        metrics |= over_draws(stages)
    for stage in (advantages, update):
        metrics |= stage.metrics
    seconds = {
        "rollouts": sum(rollouts.seconds for rollouts, _ in draws),
        "rewards": sum(rewards.seconds for _, rewards in draws),
        "advantages": advantages.seconds,
        "update": update.seconds,
    }
    metrics |= {f"seconds/{name}": value for name, value in seconds.items()}
    metrics["step_time"] = sum(seconds.values())
    if heldout is not None and "reward" in heldout.metrics:
        metrics[HELDOUT] = heldout.metrics["reward"]
    return metrics


def _place(iteration: int) -> str:
    return f"iteration_{iteration:06d}/metrics.parquet"


def has_metrics(store: ArtifactStore, iteration: int) -> bool:
    """Whether the iteration's table has been written."""
    return bool(store.filesystem.exists(store.path(_place(iteration))))


def write_metrics(store: ArtifactStore, iteration: int, metrics: Mapping[str, float]) -> None:
    """Write `iteration_NNNNNN/metrics.parquet`, a row a metric; a held-out reward of an earlier start stays."""
    metrics = {**_heldout_before(store, iteration), **metrics}
    names = sorted(metrics)
    columns: dict[str, list[Any]] = {
        "iteration": [iteration] * len(names),
        "metric": names,
        "value": [metrics[name] for name in names],
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.parquet"
        write_table(path, METRICS, columns)
        store.write_file(_place(iteration), path.read_bytes())


def _heldout_before(store: ArtifactStore, iteration: int) -> dict[str, float]:
    content = store.read_file(_place(iteration))
    if content is None:
        return {}
    try:
        table = pq.read_table(io.BytesIO(content)).to_pydict()
    except pa.ArrowInvalid:
        # Damaged: it is gathered anew from the stages, whose own files are verified.
        return {}
    known = dict(zip(table["metric"], table["value"], strict=True))
    return {HELDOUT: known[HELDOUT]} if HELDOUT in known else {}
