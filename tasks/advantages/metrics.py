"""Metrics of a stream's advantages, and the running moments of rewards, which pass on as metrics."""

from collections.abc import Sequence

import torch

from configs.scoring import RewardSection
from grpo_core.advantages import GroupAdvantages, reward_metrics
from grpo_core.rewards.mix.running import RunningMoments
from tasks.advantages.samples import Samples
from tasks.metrics.names import RUNNING
from tasks.storage.artifacts.reference import ArtifactRef


def advantage_metrics(result: GroupAdvantages, samples: Samples) -> dict[str, float]:
    """Return the metrics of one stream, without its prefix."""
    metrics = reward_metrics(result)
    metrics["reward_std_within_groups"] = float(result.stds.double().mean())
    advantages = result.advantages[result.advantages.isfinite()].double()
    if len(advantages) > 1:
        metrics |= {"advantage/mean": float(advantages.mean()), "advantage/std": float(advantages.std())}
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


def running_metrics(earlier: ArtifactRef | None, mix: Sequence[RewardSection], prefix: str = "") -> dict[str, float]:
    """Return the stored moments of the rewards that are normalised over the run; empty before the first iteration.

    They pass from iteration to iteration as metrics of the advantages.

    Args:
        mix: rewards that count for a stream.
        prefix: of the stream's metrics.
    """
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
