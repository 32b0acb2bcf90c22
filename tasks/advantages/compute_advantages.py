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
import pyarrow as pa
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
from tasks.runs import layout
from tasks.runs.records import SamplingRound
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore, current_store
from tasks.storage.tables.lists import padded
from tasks.storage.tables.parquet import write_table
from tasks.storage.tables.schemas import ADVANTAGES, BREAKDOWN, SCHEMA_VERSION

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
        table: one row per sample, groups in the order of the rollouts.
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
    samples = pl.concat(parts)
    # Siblings one after another, as their groups were drawn.
    samples = samples.sort(pl.int_range(pl.len()).min().over("group_id"), maintain_order=True)
    sizes = samples.group_by("group_id").len()["len"].unique().to_list()
    assert len(sizes) == 1, f"groups of one size, got {sizes}"
    prompts = samples.select("dataset", "columns").gather_every(sizes[0]).rows()
    others = [(name, json.loads(columns)) for name, columns in prompts]
    routed = [[section.scores_prompt(name, columns) for section in mix] for name, columns in others]
    values = [_by_group(samples[_column(section)], sizes[0]) for section in mix]
    return _Samples(
        table=samples,
        values=torch.stack(values, -1),
        applies=torch.tensor(routed),
        penalties=_by_group(samples["kl_penalty"], sizes[0]) if settings.kl_coef > 0 else None,
    )


def _by_group(values: pl.Series, siblings: int) -> Float[Tensor, "groups siblings"]:
    """Return one row a group, in fp64, NaN where a value is null."""
    return values.cast(pl.Float64).fill_null(math.nan).to_torch().view(-1, siblings)


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


def _columns(samples: _Samples, result: GroupAdvantages, mix: Sequence[RewardSection]) -> dict[str, Any]:
    siblings = samples.values.shape[1]

    def each(values: Tensor) -> Tensor:
        return values.repeat_interleave(siblings)

    none = pa.nulls(samples.table.height, pa.float64())
    names = ("sample_id", "iteration", "group_id", "prompt_id", "dataset")
    return {
        **{name: samples.table[name].to_list() for name in names},
        "reward": _with_null(result.rewards),
        "kl_penalty": none if samples.penalties is None else _with_null(samples.penalties),
        "advantage": _with_null(result.advantages),
        "group_mean": _with_null(each(result.means)),
        "group_std": _with_null(each(result.stds)),
        "dropped": each(result.dropped).tolist(),
        "imputed": result.imputed.sum(-1).flatten().tolist(),
        "reward_breakdown": _breakdown(samples, result, mix),
    }


def _breakdown(samples: _Samples, result: GroupAdvantages, mix: Sequence[RewardSection]) -> pa.ListArray:
    """Return each reward's value and what was counted, for each sample."""
    rows, labels = samples.table.height, [section.label for section in mix]
    columns = [pa.array(labels * rows), _with_null(samples.values), _with_null(result.scaled)]
    entries = pa.StructArray.from_arrays(columns, fields=list(BREAKDOWN.value_type))
    return pa.ListArray.from_arrays(pa.array(range(0, len(mix) * rows + 1, len(mix)), pa.int32()), entries, BREAKDOWN)


def _with_null(values: Tensor) -> pa.Array:
    """Return all values in fp64, null where they are NaN."""
    numbers = values.flatten().double()
    missing = numbers.isnan()
    # Zeros, since the digest covers what is stored under a null.
    return pa.array(numbers.masked_fill(missing, 0.0).numpy(), mask=missing.numpy())


def _metrics(result: GroupAdvantages, samples: _Samples) -> dict[str, float]:
    metrics = reward_metrics(result)
    metrics["reward_std_within_groups"] = float(result.stds.double().mean())
    advantages = result.advantages[result.advantages.isfinite()].double()
    if len(advantages) > 1:
        metrics |= {"advantage/mean": float(advantages.mean()), "advantage/std": float(advantages.std())}
    if samples.penalties is not None:
        metrics["kl_penalty"] = float(samples.penalties.mean())
    datasets = samples.table["dataset"].gather_every(samples.values.shape[1]).to_list()
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
