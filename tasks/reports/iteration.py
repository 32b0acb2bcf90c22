"""The report and the table that each iteration leaves in Prefect's UI."""

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from tasks.reports.curve import curve_svg
from tasks.reports.pictures import data_uri, read_pictures, thumbnail_uri
from tasks.storage.reference import ArtifactRef
from tasks.storage.store import ArtifactStore

SHOWN = 4
THUMBNAIL = 112


@dataclass(frozen=True)
class IterationRecord:
    """One iteration as the reports see it.

    Attributes:
        iteration: its number.
        rollouts: the pictures drawn.
        rewards: their scores, a table a reward.
        advantages: their rewards and advantages.
        metrics: of all its stages, by name.
        heldout: held-out reward of the policy that it made, where that was evaluated.
    """

    iteration: int
    rollouts: ArtifactRef
    rewards: ArtifactRef
    advantages: ArtifactRef
    metrics: Mapping[str, float]
    heldout: float | None = None


def iteration_table(record: IterationRecord) -> list[dict[str, object]]:
    """Every metric of the iteration, a row each."""
    return [{"metric": name, "value": round(value, 6)} for name, value in sorted(record.metrics.items())]


def iteration_markdown(store: ArtifactStore, run: str, history: Sequence[IterationRecord]) -> str:
    """Figures, curve, and the best and worst pictures of the last iteration with their rewards."""
    record = history[-1]
    metrics = record.metrics
    series = {
        "reward": [(float(past.iteration), past.metrics["reward"]) for past in history if "reward" in past.metrics],
        "held-out": [(float(past.iteration), past.heldout) for past in history if past.heldout is not None],
    }
    figures = [
        ("reward", "reward"),
        ("spread within groups", "reward_std"),
        ("groups without spread", "frac_reward_zero_std"),
        ("KL to the reference", "kl"),
        ("entropy", "entropy"),
        ("clipped tokens", "clip_ratio/region_mean"),
        ("largest stored-recomputed log-prob difference", "sampling/sampling_logp_difference/max"),
    ]
    lines = [f"# {run}: iteration {record.iteration}", "", "| | |", "|---|---|"]
    lines += [f"| {title} | {metrics[name]:.4g} |" for title, name in figures if name in metrics]
    lines += ["", f"![reward over iterations]({data_uri(curve_svg(series).encode(), 'image/svg+xml')})", ""]
    lines += _pictures(store, record)
    lines += [f"Stored in `{record.rollouts.uri}`, `{record.rewards.uri}`, `{record.advantages.uri}`.", ""]
    return "\n".join(lines)


def _pictures(store: ArtifactStore, record: IterationRecord) -> list[str]:
    with tempfile.TemporaryDirectory() as fetched:
        rollouts = store.local_files(record.rollouts, Path(fetched) / "rollouts")
        rewards = store.local_files(record.rewards, Path(fetched) / "rewards")
        advantages = store.local_files(record.advantages, Path(fetched) / "advantages")
        prompts = pl.read_parquet(sorted(rollouts.glob("*.parquet")), columns=["sample_id", "prompt"])
        ranked = (
            pl.read_parquet(sorted(advantages.glob("*.parquet")), columns=["sample_id", "reward"])
            .drop_nulls()
            .sort("reward", descending=True, maintain_order=True)
            .join(prompts, on="sample_id", maintain_order="left")
        )
        parts = {path.stem: pl.read_parquet(path) for path in sorted(rewards.glob("*.parquet"))}
        best = ranked.head(SHOWN)
        worst = ranked.tail(min(SHOWN, max(0, ranked.height - SHOWN))).reverse()
        images = read_pictures(rollouts, [*best["sample_id"], *worst["sample_id"]])
    breakdown = {label: dict(zip(table["sample_id"], table["value"], strict=True)) for label, table in parts.items()}
    lines = []
    for title, chosen in (("Best", best), ("Worst", worst)):
        if chosen.is_empty():
            continue
        rows = list(chosen.iter_rows(named=True))
        lines += [f"## {title}", "", "|" + " |" * len(rows), "|" + "---|" * len(rows)]
        shown = [f"![{row['sample_id']}]({thumbnail_uri(images[row['sample_id']], THUMBNAIL)})" for row in rows]
        lines += ["| " + " | ".join(shown) + " |"]
        lines += ["| " + " | ".join(_caption(row, breakdown) for row in rows) + " |", ""]
    return lines


def _caption(row: Mapping[str, object], breakdown: Mapping[str, Mapping[str, float | None]]) -> str:
    sample_id = str(row["sample_id"])
    parts = [
        f"{label} {'null' if (value := scores.get(sample_id)) is None else format(value, '.3f')}"
        for label, scores in breakdown.items()
    ]
    prompt = json.dumps(str(row["prompt"])[:90], ensure_ascii=False)[1:-1].replace("|", "/").replace("<", "&lt;")
    return f"**{row['reward']:.3f}** ({', '.join(parts)})<br>{prompt}"
