"""Names and prefixes of metrics, and how those of an iteration's stages are pooled over its sampling rounds."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import zip_longest
from statistics import fmean
from types import MappingProxyType
from typing import TYPE_CHECKING

from grpo_core.rollouts.streams import STREAMS, Stream
from tasks.storage.artifacts.reference import ArtifactRef

if TYPE_CHECKING:
    # It imports torch, which those that only read metrics do not need.
    from grpo_core.policies.trained.offload import Moved

HELDOUT, STEP_TIME, WALL_TIME = "heldout_reward", "step_time", "wall_time"
"""Mean held-out reward of the policy that an iteration made; seconds of all its stages; seconds between its report and
the one before, in the start that finished it first."""

SAMPLES_PER_SECOND, TOKENS_PER_SECOND, GPU_MEMORY = "samples_per_second", "tokens_per_second", "gpu_memory/"
"""Samples and sampled tokens per second of collecting rollouts; prefix of a stage's peak of GPU memory, in GiB."""

OFFLOAD = "offload/"  # prefix of the GiB of frozen weights that a stage moved to the device, and of the seconds for it

SECONDS, GUARDRAIL_PREFIX = "seconds/", "guardrails/"
"""Prefixes: seconds by stage; mean of a guardrail over the held-out samples, by label."""

TOKENS, ALL_TOKENS = "tokens", "num_tokens"
"""Tokens of an iteration's rollouts, prompts included, and of all iterations so far."""

COMPLETION_LENGTH, DRAFTS = "completions/mean_length", "completions/token_samples"
"""Mean number of tokens of a token sample; number of token samples, where some have several images."""

RANK_CORRELATION, RANK_CORRELATION_MIN = "previews/rank_correlation", "previews/rank_correlation_min"
"""Spearman's correlation of previews with the full images, over the previews: mean, and of the lowest prompt."""

RUNNING = "running/"  # prefix of a reward's moments over all iterations so far, which people are not shown


LOGGED = "logged/"
"""Prefix of the metrics that reward functions report (TRL's `log_metric`) in a table's manifest; people see their names
without it, unless the run has a metric of the same name."""


def is_measured(name: str) -> bool:
    """Whether a metric is a time, a speed or an amount of memory, which differs from one start to the next."""
    exact = (STEP_TIME, WALL_TIME, SAMPLES_PER_SECOND, TOKENS_PER_SECOND)
    return name in exact or name.startswith((SECONDS, GPU_MEMORY, OFFLOAD))


def stream_prefix(stream: Stream, trained: Sequence[Stream]) -> str:
    """Return the prefix of a stream's metrics: none for the first of the `trained` ones, else `denoising/`."""
    return "" if stream == trained[0] else f"{stream}/"


def split_stream(name: str) -> tuple[Stream | None, str]:
    """Return the stream of a metric with a stream's prefix and its name without it; None without a prefix."""
    for stream in STREAMS:
        if name.startswith(f"{stream}/") and name != f"{stream}/":
            return stream, name.removeprefix(f"{stream}/")
    return None, name


def offload_metrics(stage: str, moved: "Moved") -> dict[str, float]:
    """Return what a stage moved to the device as its metrics; empty if it moved nothing."""
    if not moved.bytes:
        return {}
    return {f"{OFFLOAD}{stage}/moved_gib": moved.bytes / 2**30, f"{OFFLOAD}{stage}/moved_seconds": moved.seconds}


ByLabel = Mapping[tuple[str, str], Sequence[ArtifactRef]]
"""An artifact per sampling round, by stage and reward label (empty for other stages), in the order of the stages."""

_POOLED: Mapping[str, Callable[[list[float]], float]] = MappingProxyType(
    {
        TOKENS: sum,
        "token_samples": sum,
        "null": sum,
        "failed": sum,
        "min_length": min,
        "max_length": max,
        "moved_gib": sum,
        "moved_seconds": sum,
    }
)


def stage_metrics(
    stages: ByLabel, previous: Mapping[str, float] | None, *, sampling: str, unshown: Collection[str] = ()
) -> dict[str, float]:
    """Pool the metrics of each stage over the sampling rounds; add num_tokens, times, speeds and memory.

    As in TRL, num_tokens counts tokens of prompts and completions since the start of the run, a prompt once for each of
    its completions; it is left out after an iteration without it. The speed is that of the stage `sampling` and of
    those `unshown`, of which only time and memory count.
    """
    metrics: dict[str, float] = {}
    logged: dict[str, list[float]] = {}
    for rounds in (rounds for (stage, _), rounds in stages.items() if stage not in unshown):
        for name, value in pool_rounds(rounds).items():
            if name.startswith(LOGGED):
                logged.setdefault(name.removeprefix(LOGGED), []).append(value)
            elif not name.startswith(RUNNING):
                metrics[name] = value
    tokens, before = metrics.pop(TOKENS, None), 0.0 if previous is None else previous.get(ALL_TOKENS)
    if tokens is not None and before is not None:
        metrics[ALL_TOKENS] = before + tokens
    seconds: dict[str, float] = {}
    for stage in dict.fromkeys(stage for stage, _ in stages):
        parts = [rounds for (name, _), rounds in stages.items() if name == stage]
        # The rewards of a round are computed concurrently, so the slowest counts.
        seconds[stage] = sum(max(part.seconds for part in each if part) for each in zip_longest(*parts))
    metrics |= {f"{SECONDS}{stage}": spent for stage, spent in seconds.items()}
    earlier = sum(spent for stage, spent in seconds.items() if stage in unshown)
    metrics |= {STEP_TIME: sum(seconds.values())} | _speeds(stages, sampling, earlier) | _memory(stages)
    of_functions = {f"{LOGGED}{name}" if name in metrics else name: fmean(each) for name, each in logged.items()}
    return metrics | of_functions


def _speeds(stages: ByLabel, sampling: str, earlier: float) -> dict[str, float]:
    """Return samples and tokens per second of sampling and of the `earlier` stages; empty if nothing was sampled."""
    sampled = [part for (stage, _), rounds in stages.items() if stage == sampling for part in rounds]
    seconds = sum(part.seconds for part in sampled)
    if not seconds:
        return {}
    seconds += earlier
    speeds = {SAMPLES_PER_SECOND: sum(part.rows for part in sampled) / seconds}
    drafts = [part for part in sampled if COMPLETION_LENGTH in part.metrics]
    if drafts:
        tokens = sum(part.metrics[COMPLETION_LENGTH] * part.metrics.get(DRAFTS, part.rows) for part in drafts)
        speeds[TOKENS_PER_SECOND] = tokens / seconds
    return speeds


def _memory(stages: ByLabel) -> dict[str, float]:
    """Return the peak of each stage that ran on a GPU, in GiB."""
    peaks: dict[str, float] = {}
    for (stage, _), rounds in stages.items():
        for peak in (part.peak_memory for part in rounds):
            if peak is not None:
                name = f"{GPU_MEMORY}{stage}"
                peaks[name] = max(peaks.get(name, 0.0), peak / 2**30)
    return peaks


def pool_rounds(rounds: Sequence[ArtifactRef]) -> dict[str, float]:
    """Return the metrics of all samples of one stage's sampling rounds together.

    Counts are summed, and extremes are those of all rounds; means are weighted by their number of samples, and standard
    deviations (Bessel-corrected) are pooled with their means.
    """
    if len(rounds) == 1:
        return dict(rounds[0].metrics)
    metrics = {}
    for name in dict.fromkeys(name for each in rounds for name in each.metrics):
        known = [each for each in rounds if name in each.metrics]
        group, _, kind = name.rpartition("/")
        if name.startswith(LOGGED):
            continue
        if kind in _POOLED:
            metrics[name] = _POOLED[kind]([each.metrics[name] for each in known])
        elif kind == "std":
            metrics[name] = _pooled_std(rounds, group)
        else:
            metrics[name] = _mean(known, group, name)
    return metrics | pool_logged(rounds)


def pool_logged(parts: Sequence[ArtifactRef]) -> dict[str, float]:
    """Return what reward functions reported in any of these tables of scores, as means weighted by their rows."""
    names = dict.fromkeys(name for each in parts for name in each.metrics if name.startswith(LOGGED))
    return {name: _mean([each for each in parts if name in each.metrics], "", name) for name in names}


def _counted(artifact: ArtifactRef, group: str) -> float:
    """Return the number of samples of a group's metrics: those that the reward scored."""
    return artifact.rows - artifact.metrics.get(f"{group}/null", 0.0)


def _mean(rounds: Sequence[ArtifactRef], group: str, name: str) -> float:
    counts = [_counted(each, group) for each in rounds]
    return sum(each.metrics[name] * count for each, count in zip(rounds, counts, strict=True)) / sum(counts)


def _pooled_std(rounds: Sequence[ArtifactRef], group: str) -> float:
    """Pool deviations; a round of one sample has a mean and no deviation."""
    known = [each for each in rounds if f"{group}/mean" in each.metrics]
    mean = _mean(known, group, f"{group}/mean")
    squares = sum(
        (_counted(each, group) - 1) * each.metrics.get(f"{group}/std", 0.0) ** 2
        + _counted(each, group) * (each.metrics[f"{group}/mean"] - mean) ** 2
        for each in known
    )
    return math.sqrt(squares / (sum(_counted(each, group) for each in known) - 1))
