"""The table of an iteration's metrics, gathered from its stages."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from tasks.metrics.names import GUARDRAILS, HELDOUT, SECONDS, WALL_TIME
from tasks.metrics.pooled import stage_metrics
from tasks.runs.layout import ADVANTAGES, REWARDS, ROLLOUTS, STAGES, UPDATE, metrics_file
from tasks.runs.records import SamplingRound
from tasks.runs.run_view import EvaluationView
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.tables.parquet import joint_digest, part_digests, read_table, write_table
from tasks.storage.tables.schemas import METRICS

_KEPT = (HELDOUT, WALL_TIME)


def gather_metrics(
    rounds: Sequence[SamplingRound],
    advantages: ArtifactRef,
    update: ArtifactRef,
    evaluation: EvaluationView | None,
    previous: Mapping[str, float] | None = None,
) -> dict[str, float]:
    """Return the metrics of all stages of an iteration, with the seconds that each took when it ran.

    Args:
        rounds: rollouts and rewards; empty for a replay, which samples none.
        evaluation: that of the policy that the iteration made; None without one.
        previous: metrics of the iteration before; None for the first.
    """
    stages: dict[tuple[str, str], list[ArtifactRef]] = {}
    for each in rounds:
        stages.setdefault((ROLLOUTS, ""), []).append(each.rollouts)
        for label, scores in each.rewards.items():
            stages.setdefault((REWARDS, label), []).append(scores)
    stages |= {(ADVANTAGES, ""): [advantages], (UPDATE, ""): [update]}
    metrics = {f"{SECONDS}{stage}": 0.0 for stage in STAGES} | stage_metrics(stages, previous, sampling=ROLLOUTS)
    return metrics | ({} if evaluation is None else evaluation_metrics(evaluation))


def evaluation_metrics(evaluation: EvaluationView) -> dict[str, float]:
    """Return the held-out reward, where a sample has one, and the mean of each guardrail by their metrics' names."""
    reward = {} if evaluation.reward is None else {HELDOUT: evaluation.reward}
    return reward | {f"{GUARDRAILS}{label}": mean for label, mean in evaluation.guardrails.items()}


def read_metrics(store: ArtifactStore, iteration: int) -> dict[str, float]:
    """Read the table that an earlier start wrote; empty where there is none, or a damaged one."""
    content = store.read_file(metrics_file(iteration))
    return {} if content is None else _read_table(content)


def with_earlier(metrics: Mapping[str, float], earlier: Mapping[str, float], wall_time: float) -> dict[str, float]:
    """Add what only the start that ran an iteration knows: its time on the clock, and evaluations made then.

    Args:
        earlier: the table of that start; empty if it is this one.
        wall_time: seconds that the iteration took in this start.
    """
    kept = {name: value for name, value in earlier.items() if name in _KEPT or name.startswith(GUARDRAILS)}
    if earlier:
        return {**kept, **metrics}
    # An iteration lasts at least as long as its update: in less time a stored one was passed, whose time is not known.
    is_own = wall_time >= metrics.get(f"{SECONDS}{UPDATE}", 0.0)
    return {**metrics, WALL_TIME: wall_time} if is_own else dict(metrics)


def write_metrics(store: ArtifactStore, iteration: int, metrics: Mapping[str, float]) -> None:
    """Write the iteration's table, a row per metric."""
    names = sorted(metrics)
    columns: dict[str, list[Any]] = {
        "iteration": [iteration] * len(names),
        "metric": names,
        "value": [metrics[name] for name in names],
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.parquet"
        write_table(path, METRICS, columns)
        store.write_file(metrics_file(iteration), path.read_bytes())


def _read_table(content: bytes) -> dict[str, float]:
    """Read the values of a table; empty where it is damaged, since the verified stages have them all."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.parquet"
        path.write_bytes(content)
        try:
            stated = joint_digest(part_digests(path))
            columns = read_table(path.parent, METRICS).to_pydict()
            # It has no manifest: written again, its values must have the digest that the file states.
            valid = write_table(path, METRICS, columns) == stated
        except (pa.ArrowException, OSError, ValueError):
            return {}
    return dict(zip(columns["metric"], columns["value"], strict=True)) if valid else {}
