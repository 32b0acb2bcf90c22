"""Stage 3: scores of siblings -> a reward and an advantage per sample and trained stream, or a copy of stored ones."""

import shutil
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from configs.placement import PlacementSection
from configs.scoring import AdvantagesSection, RewardSection
from grpo_core.advantages.compute import GroupAdvantages, compute_advantages, reward_metrics
from grpo_core.advantages.previews import rank_correlation
from grpo_core.rewards.mix import RunningMoments
from grpo_core.rollouts.streams import Stream
from tasks.advantages.compared_samples import Samples, read_compared_samples, samples_of
from tasks.execution.caching import stage_task
from tasks.metrics import RANK_CORRELATION, RANK_CORRELATION_MIN, RUNNING, stream_prefix
from tasks.progress import progress_of
from tasks.runs import layout
from tasks.runs.layout import SamplingRound
from tasks.storage.artifacts.commit import commit_artifact
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import current_store
from tasks.storage.parquet import write_table
from tasks.storage.schemas import ADVANTAGES, BREAKDOWN


def advantage_metrics(result: GroupAdvantages, samples: Samples) -> dict[str, float]:
    """Return the metrics of one stream, without its prefix."""
    metrics = reward_metrics(result)
    metrics["reward_std_within_groups"] = float(result.stds.double().mean())
    advantages = result.advantages[result.advantages.isfinite()].double()
    if len(advantages) > 1:
        metrics |= {"advantage/mean": float(advantages.mean()), "advantage/std": float(advantages.std())}
    if samples.preview_ranks is not None:
        agreed = rank_correlation(samples.preview_ranks, result.advantages, samples.preview_count)
        if len(agreed := agreed[agreed.isfinite()]):
            metrics |= {RANK_CORRELATION: float(agreed.mean()), RANK_CORRELATION_MIN: float(agreed.min())}
    if samples.penalties is not None:
        metrics["kl_penalty"] = float(samples.penalties.mean())
    datasets = samples.datasets
    if len(set(datasets)) < 2:
        return metrics
    for name in sorted(set(datasets)):
        chosen = torch.tensor([dataset == name for dataset in datasets])
        rewards = result.rewards[chosen][result.present[chosen]]
        if len(rewards):
            metrics[f"datasets/{name}/reward"] = float(rewards.double().mean())
    return metrics


def zero_metrics(result: GroupAdvantages, mix: Sequence[RewardSection]) -> dict[str, float]:
    """Return the share of scored groups in which a reward is 0 for all samples, for each that adds to a mix."""
    added = [index for index, section in enumerate(mix) if section.role == "sum" and section.weight != 0]
    if len(added) < 2:
        return {}
    known = ~result.scaled.isnan() & ~result.imputed
    scored, zero = known.any(1), ((result.scaled == 0) | ~known).all(1)
    return {
        f"rewards/{mix[index].label}/frac_all_zero": float(zero[scored[:, index], index].double().mean())
        for index in added
        if scored[:, index].any()
    }


def running_metrics(earlier: ArtifactRef | None, mix: Sequence[RewardSection], prefix: str = "") -> dict[str, float]:
    """Return the stored moments of rewards that are normalised over the run, which pass on as metrics."""
    if earlier is None:
        return {}
    names = [name for section in mix if section.normalize == "running" for name in _names(section, prefix)]
    return {name: earlier.metrics[name] for name in names if name in earlier.metrics}


def running_moments(
    earlier: ArtifactRef | None, mix: Sequence[RewardSection], prefix: str = ""
) -> RunningMoments | None:
    """Return the moments so far, one entry per reward; None before the first iteration or if no reward uses them."""
    metrics = running_metrics(earlier, mix, prefix)
    if not metrics:
        return None
    entries = [[metrics.get(name, 0.0) for name in _names(section, prefix)] for section in mix]
    counts, means, squares = zip(*entries, strict=True)
    return RunningMoments(tuple(int(count) for count in counts), means, squares)


def moments_as_metrics(moments: RunningMoments, mix: Sequence[RewardSection], prefix: str = "") -> dict[str, float]:
    """Convert moments to metrics for a table's manifest."""
    metrics: dict[str, float] = {}
    for section, *entry in zip(mix, moments.counts, moments.means, moments.squares, strict=True):
        if section.normalize == "running":
            metrics |= {name: float(value) for name, value in zip(_names(section, prefix), entry, strict=True)}
    return metrics


def _names(section: RewardSection, prefix: str) -> tuple[str, str, str]:
    # The prefix of the moments first: by it they are told from what people are shown.
    start = f"{RUNNING}{prefix}{section.label}"
    return f"{start}/count", f"{start}/mean", f"{start}/squares"


STAGE = "compute advantages"
LOCAL_PLACEMENT = PlacementSection()
# These fields determine the scores, which are inputs here.
_OF_SCORING = ("reward", "settings")
_COPIED = ("sample_id", "iteration", "group_id", "prompt_id", "dataset")


def _describe(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    mix: Sequence[RewardSection] = inputs["mix"]
    streams: tuple[Stream, ...] = inputs["streams"]
    earlier: ArtifactRef | None = inputs["earlier"]
    running: dict[str, float] = {}
    for stream in streams:
        own = [section for section in mix if section.counts_for(stream)]
        running |= running_metrics(earlier, own, stream_prefix(stream, streams))
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
        "running": running,
        # A rescoring keeps separate tables, even with equal advantages.
        "place": inputs["folder"],
        "streams": streams,
    }


@stage_task(STAGE, _describe, kind="advantages")
def compute_advantages_task(
    rounds: tuple[SamplingRound, ...],
    streams: tuple[Stream, ...],
    mix: tuple[RewardSection, ...],
    advantages: AdvantagesSection,
    folder: str,
    title: str,
    earlier: ArtifactRef | None = None,
    placement: PlacementSection = LOCAL_PLACEMENT,
) -> ArtifactRef:
    """Combine the rewards of each sample of all sampling rounds, and compare it with others, for each stream.

    Metrics of the first stream have their plain names, those of another one its prefix. `earlier` are the advantages of
    the previous iteration, with the running moments.
    """
    started = time.perf_counter()
    store = current_store()
    rows = sum(each.rollouts.rows for each in rounds)
    report_progress = progress_of(f"{title}: {STAGE}", rows)
    with store.staging() as staged:
        samples = read_compared_samples(store, rounds, mix, advantages)
        tables: list[pa.Table] = []
        metrics: dict[str, float] = {}
        for stream in streams:
            prefix = stream_prefix(stream, streams)
            counting = [index for index, section in enumerate(mix) if section.counts_for(stream)]
            own_mix, own = [mix[index] for index in counting], samples_of(stream, samples, counting)
            result = compute_advantages(
                own.values,
                own_mix,
                advantages,
                penalties=own.penalties,
                applies=own.applies,
                running=running_moments(earlier, own_mix, prefix),
            )
            tables.append(_table(stream, own, own_mix, result))
            metrics |= {f"{prefix}{name}": value for name, value in advantage_metrics(result, own).items()}
            metrics |= {f"{prefix}{name}": value for name, value in zero_metrics(result, own_mix).items()}
            metrics |= moments_as_metrics(result.running, own_mix, prefix)
        table = pa.concat_tables(tables)
        columns = {name: table[name].combine_chunks() for name in table.column_names}
        digest = write_table(staged / layout.ADVANTAGES_FILE, ADVANTAGES, columns)
        report_progress(rows)
        return commit_artifact(
            store,
            staged,
            f"{folder}/{layout.ADVANTAGES}",
            digest=digest,
            rows=table.num_rows,
            seconds=time.perf_counter() - started,
            metrics={**metrics, "rounds": float(len(rounds))},
        )


def _describe_copy(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    # The folder is in the key: another replay may keep the same table for another iteration.
    return {"advantages": inputs["advantages"].digest, "folder": inputs["folder"]}


@stage_task("copy advantages", _describe_copy)
def copy_advantages_task(advantages: ArtifactRef, folder: str) -> ArtifactRef:
    """Copy the verified advantages of another run's samples with their metrics; the copy counts as taking no time."""
    store = current_store()
    with store.reading() as read, store.staging() as staged:
        source = read(advantages)
        for path in sorted(source.glob("*.parquet")):
            shutil.copyfile(path, staged / path.name)
        return commit_artifact(
            store,
            staged,
            f"{folder}/{layout.ADVANTAGES}",
            digest=advantages.digest,
            rows=advantages.rows,
            seconds=0.0,
            metrics=advantages.metrics,
        )


def _table(stream: Stream, samples: Samples, mix: Sequence[RewardSection], result: GroupAdvantages) -> pa.Table:
    rows, compared = samples.table.height, samples.values.shape[1]

    def each(values: Tensor) -> Tensor:
        return values.repeat_interleave(compared)

    columns = {
        **{name: samples.table[name].to_list() for name in _COPIED},
        "stream": [stream] * rows,
        "reward": _with_null(result.rewards),
        "kl_penalty": pa.nulls(rows, pa.float64()) if samples.penalties is None else _with_null(samples.penalties),
        "advantage": _with_null(result.advantages),
        "group_mean": _with_null(each(result.means)),
        "group_std": _with_null(each(result.stds)),
        "dropped": each(result.dropped).tolist(),
        "imputed": result.imputed.sum(-1).flatten().tolist(),
        "reward_breakdown": _breakdown(samples, mix, result),
    }
    return pa.table(columns, schema=ADVANTAGES)


def _breakdown(samples: Samples, mix: Sequence[RewardSection], result: GroupAdvantages) -> pa.ListArray:
    """Return each reward's value and what was counted, for each sample."""
    rows, labels = samples.table.height, [section.label for section in mix]
    columns = [pa.array(labels * rows), _with_null(samples.values), _with_null(result.scaled)]
    entries = pa.StructArray.from_arrays(columns, fields=list(BREAKDOWN.value_type))
    offsets = pa.array(range(0, len(labels) * rows + 1, len(labels)), pa.int32())
    return pa.ListArray.from_arrays(offsets, entries, BREAKDOWN)


def _with_null(values: Tensor) -> pa.Array:
    """Return all values in fp64, null where they are NaN."""
    numbers = values.flatten().double()
    missing = numbers.isnan()
    # Zeros, since the digest covers what is stored under a null.
    return pa.array(numbers.masked_fill(missing, 0.0).numpy(), mask=missing.numpy())
