"""Stage 3: scores of siblings -> one reward and one advantage per sample."""

import json
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from configs.scoring import RewardSection
from configs.sections import PlacementSection
from configs.training import AdvantagesSection
from grpo_core.advantages import AdvantageSettings, GroupAdvantages, compute_advantages, kl_penalty, reward_metrics
from grpo_core.rewards.mix.running import RunningMoments
from tasks.execution.caching import stage_task
from tasks.metrics.names import RUNNING
from tasks.progress import progress_of
from tasks.rollouts.rows import padded
from tasks.runs import layout
from tasks.runs.records import SamplingRound
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore, current_store
from tasks.storage.tables.parquet import write_table
from tasks.storage.tables.schemas import ADVANTAGES, SCHEMA_VERSION

STAGE = "compute advantages"
HERE = PlacementSection()
# These fields determine the scores, which are inputs here.
_OF_SCORING = ("reward", "settings")


def _describe(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    mix: Sequence[RewardSection] = inputs["mix"]
    earlier: ArtifactRef | None = inputs["earlier"]
    return {
        "rounds": [
            [each.rollouts.digest, *(each.rewards[section.label].digest for section in mix)]
            for each in inputs["rounds"]
        ],
        "mix": [
            [section.label, {key: value for key, value in section.result_settings().items() if key not in _OF_SCORING}]
            for section in mix
        ],
        "advantages": inputs["advantages"].result_settings(),
        "running": running_metrics(earlier, mix),
        # A rescoring keeps separate tables, even with equal advantages.
        "place": inputs["folder"],
    }


@stage_task(STAGE, _describe, kind="advantages")
def compute_advantages_task(
    rounds: tuple[SamplingRound, ...],
    mix: tuple[RewardSection, ...],
    advantages: AdvantagesSection,
    folder: str,
    title: str,
    earlier: ArtifactRef | None = None,
    placement: PlacementSection = HERE,
) -> ArtifactRef:
    """Combine the rewards of each sample of all sampling rounds and compare it with its siblings.

    Args:
        earlier: advantages of the previous iteration, with the running moments; None in the first.
    """
    started = time.perf_counter()
    store = current_store()
    rows = sum(each.rollouts.rows for each in rounds)
    report_progress = progress_of(f"{title}: {STAGE}", rows)
    with store.staging() as staged:
        samples = _read_samples(store, rounds, mix, advantages)
        result = compute_advantages(
            samples.values,
            mix,
            advantages,
            penalties=samples.penalties,
            applies=samples.applies,
            running=running_moments(earlier, mix),
        )
        digest = write_table(staged / layout.ADVANTAGES_FILE, ADVANTAGES, _columns(samples, result, mix))
        report_progress(rows)
        return store.commit(
            staged,
            f"{folder}/{layout.ADVANTAGES}",
            digest=digest,
            schema_version=SCHEMA_VERSION,
            rows=rows,
            seconds=time.perf_counter() - started,
            metrics={
                **_metrics(result, samples),
                **moments_as_metrics(result.running, mix),
                "rounds": float(len(rounds)),
            },
        )


@dataclass(frozen=True)
class _Samples:
    """Scores laid out by group and sibling.

    Attributes:
        table: one row per group, in the order of the rollouts; lists over siblings.
        values: NaN where a reward is null.
        applies: whether a reward scores the group's dataset.
        penalties: KL to the reference in nats, one per sample; None without a KL in the reward.
    """

    table: pl.DataFrame
    values: Float[Tensor, "groups siblings rewards"]
    applies: Bool[Tensor, "groups rewards"]
    penalties: Float[Tensor, "groups siblings"] | None


def _read_samples(
    store: ArtifactStore, rounds: Sequence[SamplingRound], mix: Sequence[RewardSection], settings: AdvantageSettings
) -> _Samples:
    with tempfile.TemporaryDirectory() as fetched:
        parts = []
        for number, each in enumerate(rounds):
            place = Path(fetched) / str(number)
            rollouts = store.local_files(each.rollouts, place / "rollouts")
            scored = {
                label: store.local_files(reference, place / f"rewards-{index}")
                for index, (label, reference) in enumerate(each.rewards.items())
            }
            parts.append(_read_round(rollouts, scored, mix, settings))
    groups = pl.concat(parts).group_by("group_id", maintain_order=True).agg(pl.all())
    sizes = {len(ids) for ids in groups["sample_id"]}
    assert len(sizes) == 1, f"groups of one size, got {sizes}"
    prompts = zip(groups["dataset"].list.first(), groups["columns"].list.first(), strict=True)
    routed = [[section.scores_prompt(name, json.loads(columns)) for section in mix] for name, columns in prompts]
    values = [torch.tensor(_with_nan(groups[_column(section)].to_list()), dtype=torch.float64) for section in mix]
    return _Samples(
        table=groups,
        values=torch.stack(values, -1),
        applies=torch.tensor(routed),
        penalties=torch.tensor(groups["kl_penalty"].to_list(), dtype=torch.float64) if settings.kl_coef > 0 else None,
    )


def _column(section: RewardSection) -> str:
    return f"reward:{section.label}"


def _read_round(
    rollouts: Path, rewards: Mapping[str, Path], mix: Sequence[RewardSection], settings: AdvantageSettings
) -> pl.DataFrame:
    files = sorted(rollouts.glob("*.parquet"))
    table = pl.read_parquet(files, columns=["sample_id", "iteration", "group_id", "prompt_id", "dataset", "columns"])
    for section in mix:
        scores = pl.read_parquet(rewards[section.label] / layout.SCORES_FILE, columns=["sample_id", "value"])
        table = table.join(
            scores.rename({"value": _column(section)}),
            on="sample_id",
            how="left",
            validate="1:1",
            maintain_order="left",
        )
    if settings.kl_coef > 0:
        table = table.with_columns(pl.Series("kl_penalty", _penalties(files, settings)))
    return table


def _penalties(files: Sequence[Path], settings: AdvantageSettings) -> list[float]:
    stored = pl.read_parquet(list(files), columns=["scored_logprobs", "ref_logprobs", "loss_mask"])
    if stored["ref_logprobs"].null_count():
        raise ValueError(
            "advantages.kl_coef needs the reference's log-probs, and these rollouts have none; collect "
            "them with this configuration, or set advantages.kl_coef to 0"
        )
    penalties = kl_penalty(
        padded(stored["scored_logprobs"]),
        padded(stored["ref_logprobs"]),
        padded(stored["loss_mask"]),
        estimator=settings.kl_estimator,
    )
    return [float(value) for value in penalties]


def _with_nan(values: list[list[float | None]]) -> list[list[float]]:
    return [[math.nan if value is None else value for value in row] for row in values]


def _columns(samples: _Samples, result: GroupAdvantages, mix: Sequence[RewardSection]) -> dict[str, Any]:
    names = ("sample_id", "iteration", "group_id", "prompt_id", "dataset")
    flat = samples.table.select(names)
    siblings = samples.values.shape[1]

    def each(values: Tensor) -> Tensor:
        return values.repeat_interleave(siblings)

    one_each = flat.explode([name for name in names if name != "group_id"])
    return {
        **{name: one_each[name].to_list() for name in names},
        "reward": _with_null(result.rewards.flatten()),
        "kl_penalty": [None] * one_each.height
        if samples.penalties is None
        else _with_null(samples.penalties.flatten()),
        "advantage": _with_null(result.advantages.flatten()),
        "group_mean": _with_null(each(result.means)),
        "group_std": _with_null(each(result.stds)),
        "dropped": each(result.dropped).tolist(),
        "imputed": result.imputed.sum(-1).flatten().tolist(),
        "reward_breakdown": _breakdown(samples, result, mix),
    }


def _breakdown(
    samples: _Samples, result: GroupAdvantages, mix: Sequence[RewardSection]
) -> list[list[dict[str, object]]]:
    """Return each reward's value and what was counted, for each sample."""
    values = [_with_null(column) for column in samples.values.flatten(0, 1).unbind(-1)]
    scaled = [_with_null(column) for column in result.scaled.flatten(0, 1).unbind(-1)]
    labels = [section.label for section in mix]
    return [
        [
            {"reward": label, "value": value, "scaled": counted}
            for label, value, counted in zip(labels, row, counted_row, strict=True)
        ]
        for row, counted_row in zip(zip(*values, strict=True), zip(*scaled, strict=True), strict=True)
    ]


def _with_null(values: Float[Tensor, " samples"]) -> list[float | None]:
    return [None if math.isnan(value) else value for value in values.tolist()]


def _metrics(result: GroupAdvantages, samples: _Samples) -> dict[str, float]:
    metrics = reward_metrics(result)
    metrics["reward_std_within_groups"] = float(result.stds.double().mean())
    advantages = result.advantages[result.advantages.isfinite()].double()
    if len(advantages) > 1:
        metrics |= {"advantage/mean": float(advantages.mean()), "advantage/std": float(advantages.std())}
    if samples.penalties is not None:
        metrics["kl_penalty"] = float(samples.penalties.mean())
    datasets = [names[0] for names in samples.table["dataset"].to_list()]
    if len(set(datasets)) < 2:
        return metrics
    for name in sorted(set(datasets)):
        chosen = torch.tensor([dataset == name for dataset in datasets])
        rewards = result.rewards[chosen][result.present[chosen]]
        if len(rewards):
            metrics[f"datasets/{name}/reward"] = float(rewards.double().mean())
    return metrics


def running_metrics(earlier: ArtifactRef | None, mix: Sequence[RewardSection]) -> dict[str, float]:
    """Return the stored moments of the rewards that are normalised over the run; empty before the first iteration.

    They pass from iteration to iteration as metrics of the advantages.
    """
    if earlier is None:
        return {}
    names = [name for section in mix if section.normalize == "running" for name in _names(section)]
    return {name: earlier.metrics[name] for name in names if name in earlier.metrics}


def running_moments(earlier: ArtifactRef | None, mix: Sequence[RewardSection]) -> RunningMoments | None:
    """Return the moments so far, one entry per reward; None before the first iteration or if no reward uses them."""
    metrics = running_metrics(earlier, mix)
    if not metrics:
        return None
    entries = [[metrics.get(name, 0.0) for name in _names(section)] for section in mix]
    counts, means, squares = zip(*entries, strict=True)
    return RunningMoments(tuple(int(count) for count in counts), means, squares)


def moments_as_metrics(moments: RunningMoments, mix: Sequence[RewardSection]) -> dict[str, float]:
    """Convert moments to metrics for a table's manifest."""
    metrics: dict[str, float] = {}
    for section, *entry in zip(mix, moments.counts, moments.means, moments.squares, strict=True):
        if section.normalize == "running":
            metrics |= {name: float(value) for name, value in zip(_names(section), entry, strict=True)}
    return metrics


def _names(section: RewardSection) -> tuple[str, str, str]:
    start = f"{RUNNING}{section.label}"
    return f"{start}/count", f"{start}/mean", f"{start}/squares"
