"""An iteration's figures, gathered from its stages into one table."""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from tasks.metrics.names import GUARDRAILS, RUNNING
from tasks.metrics.pooled import pool_rounds
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.sampling_round import SamplingRound
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.tables.parquet import joint_digest, part_digests, read_table, write_table
from tasks.storage.tables.schemas import METRICS

HELDOUT = "heldout_reward"


def gather_metrics(
    rounds: Sequence[SamplingRound],
    advantages: ArtifactRef,
    update: ArtifactRef,
    heldout: ArtifactRef | None,
    guardrails: Mapping[str, ArtifactRef] | None = None,
) -> dict[str, float]:
    """The figures of all stages of an iteration, with the seconds that each took when it ran.

    Args:
        draws: rollouts and rewards; figures of several draws are means over their samples, and tokens are summed.
        advantages: of all draws.
        update: the checkpoint.
        heldout: advantages of the evaluation of the policy that the iteration made, if there was one.
        guardrails: scores of the same evaluation by label.
    """
    metrics: dict[str, float] = {}
    if rounds:
        metrics |= pool_rounds([draw.rollouts for draw in rounds])
        for label in rounds[0].rewards:
            metrics |= pool_rounds([draw.rewards[label] for draw in rounds])
    metrics |= {name: value for name, value in advantages.metrics.items() if not name.startswith(RUNNING)}
    metrics |= update.metrics
    seconds = {
        "rollouts": sum(draw.rollouts.seconds for draw in rounds),
        # The rewards of a draw are computed side by side.
        "rewards": sum(max(scored.seconds for scored in draw.rewards.values()) for draw in rounds),
        "advantages": advantages.seconds,
        "update": update.seconds,
    }
    metrics |= {f"seconds/{name}": value for name, value in seconds.items()}
    metrics["step_time"] = sum(seconds.values())
    if heldout is not None and "reward" in heldout.metrics:
        metrics[HELDOUT] = heldout.metrics["reward"]
    for label, scores in (guardrails or {}).items():
        if f"rewards/{label}/mean" in scores.metrics:
            metrics[f"{GUARDRAILS}{label}"] = scores.metrics[f"rewards/{label}/mean"]
    return metrics


def _place(iteration: int) -> str:
    return f"iteration_{iteration:06d}/metrics.parquet"


def has_metrics(store: ArtifactStore, iteration: int) -> bool:
    """Whether the iteration's table has been written."""
    return bool(store.filesystem.exists(store.path(_place(iteration))))


def write_metrics(store: ArtifactStore, iteration: int, metrics: Mapping[str, float]) -> None:
    """Write `iteration_NNNNNN/metrics.parquet`, a row a metric; held-out figures of an earlier start stay."""
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
    known = {} if content is None else _figures(content)
    return {name: value for name, value in known.items() if name == HELDOUT or name.startswith(GUARDRAILS)}


def _figures(content: bytes) -> dict[str, float]:
    """What a table holds; nothing where it is damaged: it is gathered anew from the stages, which were verified."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.parquet"
        path.write_bytes(content)
        try:
            said = joint_digest(part_digests(path))
            columns = read_table(path.parent, METRICS).to_pydict()
            # It has no manifest: written again, its values must have the digest that it says.
            whole = write_table(path, METRICS, columns) == said
        except (pa.ArrowException, OSError, ValueError):
            return {}
    return dict(zip(columns["metric"], columns["value"], strict=True)) if whole else {}
