"""Titles and meanings of metrics, in plain words, for the page, the terminal and Prefect's UI."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from tasks.metrics.names import GUARDRAILS
from tasks.runs.run_view import Noun, dataset_of

PLOTTED = (
    "reward_std_within_groups",
    "kl",
    "entropy",
    "grad_norm",
    "clip_ratio/region_mean",
    "sampling/sampling_logp_difference/max",
)
"""Metrics with a plot of their own, after the reward and the mean of each reward."""


class MetricTitle(NamedTuple):
    """A metric's name for people.

    Attributes:
        title: a few words.
        meaning: a sentence, with the unit where there is one.
    """

    title: str
    meaning: str


_TITLES = {
    "reward": ("reward", "mean of the weighted rewards over the iteration's {noun}s"),
    "heldout_reward": ("held-out reward", "the same over prompts that are never trained on, with fixed seeds"),
    "reward_std": ("reward: standard deviation", "over all {noun}s of the iteration, groups without spread included"),
    "reward_std_within_groups": (
        "spread within groups",
        "mean over groups of the reward's standard deviation; without it nothing is learned",
    ),
    "frac_reward_zero_std": ("groups without spread", "share of groups whose {noun}s all have the same reward"),
    "groups_dropped": ("groups dropped", "groups without spread in all rounds; none of their tokens is trained on"),
    "groups_kept": ("groups kept", "groups in all rounds that the update learns from"),
    "frac_groups_dropped": ("share of groups dropped", "share of groups without spread in all rounds"),
    "rounds": ("sampling rounds", "more than one where groups without spread were replaced"),
    "advantage/mean": ("advantage, mean", "over the {noun}s that have one; near 0, for siblings are compared"),
    "advantage/std": ("advantage, standard deviation", "over the {noun}s that have one"),
    "kl_penalty": ("KL inside the reward", "mean per {noun} of the KL to the reference while sampling, in nats"),
    "samples_without_reward": ("{noun}s without a reward", "none of the rewards applies to them"),
    "rewards_imputed": ("rewards imputed", "values missing for some siblings, replaced by the group's mean"),
    "num_tokens": ("tokens sampled", "over all {noun}s of the iteration, those left out of the update included"),
    "completions/mean_length": ("tokens per {noun}, mean", "sampled tokens"),
    "completions/min_length": ("tokens per {noun}, minimum", "sampled tokens"),
    "completions/max_length": ("tokens per {noun}, maximum", "sampled tokens"),
    "completions/clipped_ratio": ("{noun}s truncated", "share that reached the maximum length before they ended"),
    "loss": ("loss", "the complete objective, before each optimizer step"),
    "policy_loss": ("policy loss", "the surrogate alone, without the KL term and the entropy bonus"),
    "grad_norm": ("gradient norm", "before it is clipped"),
    "learning_rate": ("learning rate", "at the last optimizer step"),
    "kl": ("KL to the reference", "estimate per token, in nats, of how far the policy moved from the given model"),
    "entropy": (
        "entropy",
        "of the policy's choice per trained token, in nats; near zero it has one {noun} per prompt only",
    ),
    "importance_ratio/mean": ("importance ratio", "policy in training over policy before the update, mean over tokens"),
    "clip_ratio/low_mean": ("clipped below", "share of tokens whose ratio fell below the clip range"),
    "clip_ratio/low_min": ("clipped below, minimum", "share of the tokens of one {noun}"),
    "clip_ratio/high_mean": ("clipped above", "share of tokens whose ratio rose above the clip range"),
    "clip_ratio/high_max": ("clipped above, maximum", "share of the tokens of one {noun}"),
    "clip_ratio/region_mean": ("clipped tokens", "share of tokens whose ratio left the clip range"),
    "optimizer_steps": ("optimizer steps", "in this iteration"),
    "rows_off_policy": ("off-policy rows", "sampled with other weights than those that were trained"),
    "rows_left_out": ("stale {noun}s", "left out of the update: sampled by policies older than it allows"),
    "mismatch/mean_weight": (
        "mismatch weight",
        "mean over tokens of the correction for a sampler that is not the policy; 1 where both agree",
    ),
    "mismatch/masked_fraction": ("masked for mismatch", "share of tokens whose sampler differed too much to be used"),
    "staleness/mean": (
        "staleness, mean",
        "policy versions between the one that sampled a {noun} and the one in training",
    ),
    "staleness/max": ("staleness, maximum", "the same, of the oldest {noun}"),
    "sampling/sampling_logp_difference/max": (
        "parity difference, maximum",
        "stored minus recomputed log-prob of a token on unchanged weights, in nats; the gate's first measure",
    ),
    "sampling/sampling_logp_difference/mean": (
        "parity difference, mean",
        "the same over all tokens; the gate's second measure",
    ),
    "sampling/importance_sampling_ratio/min": (
        "parity ratio, minimum",
        "recomputed over stored probability of a token",
    ),
    "sampling/importance_sampling_ratio/mean": ("parity ratio, mean", "1 where both sides agree"),
    "sampling/importance_sampling_ratio/max": (
        "parity ratio, maximum",
        "recomputed over stored probability of a token",
    ),
    "step_time": ("seconds, all stages", "of the iteration, without orchestration"),
}
_OF_REWARD = {
    "mean": ("{label}: mean", "of this reward alone, before its weight"),
    "std": ("{label}: standard deviation", "over all {noun}s of the iteration"),
    "null": ("{label}: {noun}s without a score", "those that it does not apply to, and those that it could not score"),
    "failed": (
        "{label}: {noun}s it could not score",
        "independent of the {noun}: a service did not answer, or a value is no number; scored null",
    ),
}


def metric_title(name: str, noun: Noun = "image") -> MetricTitle:
    """Look up a metric's title and meaning; an unknown name is its own title, without a meaning.

    Args:
        name: name of the metric.
        noun: what people call a sample of the run.
    """
    title, meaning, label = name, "", ""
    if name in _TITLES:
        title, meaning = _TITLES[name]
    elif (dataset := dataset_of(name)) is not None:
        title, meaning, label = "{label}: reward", "mean of the weighted rewards over this dataset's {noun}s", dataset
    elif name.startswith(GUARDRAILS):
        label = name.removeprefix(GUARDRAILS)
        title, meaning = "{label} (guardrail)", "mean over the held-out {noun}s; nothing is trained on it"
    elif name.startswith("rewards/") and name.count("/") >= 2 and name.rsplit("/", 1)[1] in _OF_REWARD:
        label, kind = name.removeprefix("rewards/").rsplit("/", 1)
        title, meaning = _OF_REWARD[kind]
    elif name.startswith("seconds/"):
        title, meaning, label = "seconds, {label}", "measured when the stage ran", name.removeprefix("seconds/")
    else:
        return MetricTitle(name, "")
    return MetricTitle(title.format(noun=noun, label=label), meaning.format(noun=noun))


def metric_rows(metrics: Mapping[str, float], noun: Noun) -> list[tuple[str, str, str, float]]:
    """List title, meaning, name and value of each metric: the reward and the plotted ones first, then by name."""
    first = [name for name in ("reward", "heldout_reward", *PLOTTED) if name in metrics]
    names = [*first, *sorted(set(metrics) - set(first))]
    return [(*metric_title(name, noun), name, metrics[name]) for name in names]


def reward_means(metrics: Iterable[Mapping[str, float]]) -> list[str]:
    """List the names of the metrics that are the mean of one reward, sorted."""
    names = {name for each in metrics for name in each}
    return sorted(name for name in names if name.startswith("rewards/") and name.endswith("/mean"))
