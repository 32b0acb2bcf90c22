"""The report and the table that each iteration leaves in Prefect's UI."""

import tempfile
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl
from PIL import Image

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
    return [{"metric": name, "value": float(f"{value:.6g}")} for name, value in sorted(record.metrics.items())]


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
    lines = [f"# {run}: iteration {record.iteration}", "", "| figure | value |", "|---|---|"]
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
    lines = []
    for title, chosen in (("Best", best), ("Worst", worst)):
        if not chosen.is_empty():
            lines += _ranking(title, chosen, parts, images)
    return lines


def _ranking(
    title: str, chosen: pl.DataFrame, parts: Mapping[str, pl.DataFrame], images: Mapping[str, Image.Image]
) -> list[str]:
    """A table with a row a picture: itself, its reward, each part of it, its prompt."""
    scores = {label: dict(zip(table["sample_id"], table["value"], strict=True)) for label, table in parts.items()}
    header = ["picture", "reward", *scores, "prompt", "sample"]
    lines = [f"## {title}", "", f"| {' | '.join(header)} |", "|" + "---|" * len(header)]
    for row in chosen.iter_rows(named=True):
        sample_id = row["sample_id"]
        cells = [
            f"![{sample_id}]({thumbnail_uri(images[sample_id], THUMBNAIL)})",
            f"**{row['reward']:.3f}**",
            *(_number(values.get(sample_id)) for values in scores.values()),
            _as_text(row["prompt"]),
            f"`{sample_id}`",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _number(value: float | None) -> str:
    return "null" if value is None else f"{value:.3f}"


def _as_text(prompt: str) -> str:
    """A prompt that cannot break out of its cell: no markup, no column, no line end."""
    shortened = textwrap.shorten(prompt, 160, placeholder=" ...")
    return "".join(f"&#{ord(letter)};" if letter in "|<>&*_`[]()!#\\" else letter for letter in shortened)
