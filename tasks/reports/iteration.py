"""The report and the table that each iteration leaves in Prefect's UI."""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
from PIL import Image

from tasks.reports.curve import curve_svg
from tasks.reports.images import PRUNED, data_uri, read_images, thumbnail_uri
from tasks.reports.passages import in_cell, shortened
from tasks.runs.layout import SCORES_FILE
from tasks.runs.records import SamplingRound
from tasks.runs.run_view import dataset_of
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore

SHOWN, SHOWN_GROUPS = 4, 8
THUMBNAIL = 112
PROMPT_LETTERS, TEXT_LETTERS = 160, 400

_FIGURES = (
    ("reward", "reward"),
    ("spread within groups", "reward_std_within_groups"),
    ("groups without spread", "frac_reward_zero_std"),
    ("KL to the reference", "kl"),
    ("KL inside the reward", "kl_penalty"),
    ("entropy", "entropy"),
    ("clipped tokens", "clip_ratio/region_mean"),
    ("largest stored-recomputed log-prob difference", "sampling/sampling_logp_difference/max"),
)
_TEXT_FIGURES = (
    ("tokens a completion", "completions/mean_length"),
    ("completions cut", "completions/clipped_ratio"),
)


@dataclass(frozen=True)
class IterationRecord:
    """One iteration as the reports see it.

    Attributes:
        iteration: its number.
        draws: rollouts and their rewards, a table a reward; more than one where groups without spread were replaced.
        advantages: rewards and advantages of the samples of all draws.
        metrics: of all its stages, by name.
        heldout: held-out reward of the policy that it made, where that was evaluated.
    """

    iteration: int
    rounds: tuple[SamplingRound, ...]
    advantages: ArtifactRef
    metrics: Mapping[str, float]
    heldout: float | None = None


def iteration_table(record: IterationRecord) -> list[dict[str, object]]:
    """Every metric of the iteration, a row each."""
    return [{"metric": name, "value": float(f"{value:.6g}")} for name, value in sorted(record.metrics.items())]


def iteration_markdown(store: ArtifactStore, run: str, history: Sequence[IterationRecord]) -> str:
    """Figures, curve, and the best and worst samples of the last iteration with their rewards."""
    record = history[-1]
    with tempfile.TemporaryDirectory() as fetched:
        samples = _read_samples(store, record, Path(fetched))
        figures = [*_FIGURES, *(() if samples.images else _TEXT_FIGURES)]
        lines = [f"# {run}: iteration {record.iteration}", "", "| figure | value |", "|---|---|"]
        lines += [f"| {title} | {record.metrics[name]:.4g} |" for title, name in figures if name in record.metrics]
        lines += [f"| {in_cell(dataset)}: reward | {value:.4g} |" for dataset, value in _dataset_rewards(record)]
        lines += _redrawn(record)
        lines += ["", f"![reward over iterations]({data_uri(_curve(history).encode(), 'image/svg+xml')})", ""]
        lines += _images(samples) if samples.images else _texts(samples)
    stored = [reference.uri for draw in record.rounds for reference in draw.stages] + [record.advantages.uri]
    lines += [f"Stored in {', '.join(f'`{uri}`' for uri in stored)}.", ""]
    return "\n".join(lines)


def _dataset_rewards(record: IterationRecord) -> list[tuple[str, float]]:
    named = ((dataset_of(name), value) for name, value in sorted(record.metrics.items()))
    return [(dataset, value) for dataset, value in named if dataset is not None]


def _redrawn(record: IterationRecord) -> list[str]:
    dropped = record.metrics.get("groups_dropped", 0.0)
    lines = [f"| groups left out for lack of spread | {dropped:.0f} |"] if dropped else []
    return [*lines, f"| sampling rounds | {len(record.rounds)} |"] if len(record.rounds) > 1 else lines


def _curve(history: Sequence[IterationRecord]) -> str:
    series: dict[str, list[tuple[float, float]]] = {
        "reward": [(float(past.iteration), past.metrics["reward"]) for past in history if "reward" in past.metrics],
        "held-out": [(float(past.iteration), past.heldout) for past in history if past.heldout is not None],
    }
    for past in history:
        for dataset, value in _dataset_rewards(past):
            series.setdefault(f"of {dataset}", []).append((float(past.iteration), value))
    return curve_svg(series)


@dataclass(frozen=True)
class _Samples:
    """An iteration's samples.

    Attributes:
        table: sample_id, group_id, dataset, prompt, completion where it is a text, reward and dropped; as drawn.
        scores: value by reward and sample.
        folders: where the rollouts lie on this machine.
    """

    table: pl.DataFrame
    scores: Mapping[str, Mapping[str, float | None]]
    folders: Sequence[Path]

    @property
    def images(self) -> bool:
        return "completion" not in self.table.columns


def _read_samples(store: ArtifactStore, record: IterationRecord, fetched: Path) -> _Samples:
    parts, folders = [], []
    scores: dict[str, dict[str, float | None]] = {}
    for index, draw in enumerate(record.rounds):
        folder = store.local_files(draw.rollouts, fetched / str(index) / "rollouts")
        folders.append(folder)
        rows = pl.scan_parquet(sorted(folder.glob("*.parquet")))
        wanted = ["sample_id", "group_id", "dataset", "prompt", "completion"]
        names = rows.collect_schema().names()
        parts.append(rows.select([name for name in wanted if name in names]).collect())
        for number, (label, scored) in enumerate(draw.rewards.items()):
            path = store.local_files(scored, fetched / str(index) / f"rewards-{number}") / SCORES_FILE
            table = pl.read_parquet(path, columns=["sample_id", "value"])
            scores.setdefault(label, {}).update(zip(table["sample_id"], table["value"], strict=True))
    folder = store.local_files(record.advantages, fetched / "advantages")
    rated = pl.read_parquet(sorted(folder.glob("*.parquet")), columns=["sample_id", "reward", "dropped"])
    return _Samples(pl.concat(parts).join(rated, on="sample_id", how="left", maintain_order="left"), scores, folders)


def _ranked(table: pl.DataFrame) -> pl.DataFrame:
    """What has a reward, best first; in the order drawn where rewards are equal."""
    return table.drop_nulls("reward").sort("reward", descending=True, maintain_order=True)


def _images(samples: _Samples) -> list[str]:
    ranked = _ranked(samples.table)
    best = ranked.head(SHOWN)
    worst = ranked.tail(min(SHOWN, max(0, ranked.height - SHOWN))).reverse()
    names = [*best["sample_id"], *worst["sample_id"]]
    images: dict[str, Image.Image] = {}
    for folder in samples.folders:
        images |= read_images(folder, names)
    lines = []
    for title, chosen in (("Best", best), ("Worst", worst)):
        if not chosen.is_empty():
            lines += [f"## {title}", "", *_ranking(samples, chosen, images), ""]
    return lines


def _ranking(samples: _Samples, chosen: pl.DataFrame, images: Mapping[str, Image.Image]) -> list[str]:
    """A table with a row an image: itself, its reward, each part of it, its prompt."""
    several = samples.table["dataset"].n_unique() > 1
    rows = []
    for row in chosen.iter_rows(named=True):
        sample_id = row["sample_id"]
        cells = [
            f"![{sample_id}]({thumbnail_uri(images[sample_id], THUMBNAIL)})" if sample_id in images else PRUNED,
            f"**{row['reward']:.3f}**",
            *(_number(values.get(sample_id)) for values in samples.scores.values()),
            in_cell(shortened(row["prompt"], PROMPT_LETTERS)),
            *((in_cell(row["dataset"]),) if several else ()),
            f"`{sample_id}`",
        ]
        rows.append(cells)
    dataset = ["dataset"] if several else []
    return _table(["image", "reward", *samples.scores, "prompt", *dataset, "sample"], rows)


def _texts(samples: _Samples) -> list[str]:
    """A table with a row a group: its prompt, its best and its worst completion."""
    groups = samples.table.partition_by("group_id", maintain_order=True)
    several = samples.table["dataset"].n_unique() > 1
    rows = []
    for group in groups[:SHOWN_GROUPS]:
        ranked, first = _ranked(group), group.row(0, named=True)
        ends = [ranked.row(0, named=True)] if ranked.height else []
        ends += [ranked.row(-1, named=True)] if ranked.height > 1 else []
        cells = [
            in_cell(shortened(first["prompt"], PROMPT_LETTERS)),
            *((in_cell(first["dataset"]),) if several else ()),
            *(_completion(samples, end) for end in ends),
            *[""] * (2 - len(ends)),
            "left out" if first["dropped"] else "",
        ]
        rows.append(cells)
    header = ["prompt", *(["dataset"] if several else []), "best", "worst", ""]
    shown = f"The first {SHOWN_GROUPS} of {len(groups)} prompts." if len(groups) > SHOWN_GROUPS else ""
    return [
        "## Best and worst completion of each prompt",
        "",
        *_table(header, rows),
        "",
        *([shown, ""] if shown else []),
    ]


def _completion(samples: _Samples, row: Mapping[str, Any]) -> str:
    parts = [f"{label} {_number(values.get(row['sample_id']))}" for label, values in samples.scores.items()]
    text = in_cell(shortened(row["completion"], TEXT_LETTERS)) or "*empty*"
    return f"**{row['reward']:.3f}** ({', '.join(parts)}): {text}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(header)} |", "|" + "---|" * len(header), *(f"| {' | '.join(row)} |" for row in rows)]


def _number(value: float | None) -> str:
    return "null" if value is None else f"{value:.3f}"
