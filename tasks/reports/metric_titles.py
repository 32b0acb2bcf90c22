"""What each figure of an iteration is, in plain words."""

from dataclasses import dataclass

from tasks.metrics.names import GUARDRAILS
from tasks.runs.run_view import Noun, dataset_of


@dataclass(frozen=True)
class MetricTitle:
    """A figure's name for people.

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
        "mean over groups of the reward's standard deviation; without it nothing is learnt",
    ),
    "frac_reward_zero_std": ("groups without spread", "share of groups whose {noun}s all have the same reward"),
    "groups_dropped": ("groups left out", "for lack of spread, over all draws; none of their tokens is trained on"),
    "groups_kept": ("groups kept", "over all draws; what the update learns from"),
    "frac_groups_dropped": ("share of groups left out", "for lack of spread, over all draws"),
    "rounds": ("sampling rounds", "collections of rollouts; more than one where groups without spread were replaced"),
    "advantage/mean": ("advantage, mean", "over the {noun}s that have one; near 0, for siblings are compared"),
    "advantage/std": ("advantage, standard deviation", "over the {noun}s that have one"),
    "kl_penalty": ("KL inside the reward", "mean a {noun} of the KL to the reference while sampling, in nats"),
    "samples_without_reward": ("{noun}s without a reward", "none of the rewards applies to them"),
    "rewards_imputed": ("rewards filled in", "values missing for some siblings, replaced by the group's mean"),
    "num_tokens": ("tokens sampled", "over all {noun}s of the iteration, those left out of the update included"),
    "completions/mean_length": ("tokens a {noun}", "mean number of sampled tokens"),
    "completions/min_length": ("tokens, shortest {noun}", "sampled tokens"),
    "completions/max_length": ("tokens, longest {noun}", "sampled tokens"),
    "completions/clipped_ratio": ("{noun}s cut", "share that reached the greatest length before they ended"),
    "loss": ("loss", "the whole objective, before each optimizer step"),
    "policy_loss": ("policy loss", "the surrogate alone, without the KL term and the entropy bonus"),
    "grad_norm": ("gradient norm", "before it is clipped"),
    "learning_rate": ("learning rate", "of the last optimizer step"),
    "kl": ("KL to the reference", "estimate a token, in nats, of how far the policy moved from the given model"),
    "entropy": (
        "entropy",
        "of the policy's choice a trained token, in nats; near zero it has one {noun} a prompt only",
    ),
    "importance_ratio/mean": ("importance ratio", "policy in training over policy before the update, mean over tokens"),
    "log_ratio_clamped": ("clamped log-ratios", "tokens whose policy moved by more than 20 nats; above 0 is a warning"),
    "clip_ratio/low_mean": ("clipped below", "share of tokens whose ratio fell below the clip range"),
    "clip_ratio/low_min": ("clipped below, least", "share of one {noun}"),
    "clip_ratio/high_mean": ("clipped above", "share of tokens whose ratio rose above the clip range"),
    "clip_ratio/high_max": ("clipped above, most", "share of one {noun}"),
    "clip_ratio/region_mean": ("clipped tokens", "share of tokens whose ratio left the clip range"),
    "optimizer_steps": ("optimizer steps", "of this iteration"),
    "rows_off_policy": ("rows of other weights", "sampled by other weights than those that were trained"),
    "rows_left_out": ("{noun}s left out", "of the update: drawn by policies further back than it allows"),
    "mismatch/mean_weight": (
        "mismatch weight",
        "mean over tokens of the correction for a sampler that is not the policy; 1 where both agree",
    ),
    "mismatch/masked_fraction": ("masked for mismatch", "share of tokens whose sampler differed too much to be used"),
    "staleness/mean": ("staleness, mean", "policy versions between the one that drew a {noun} and the one in training"),
    "staleness/max": ("staleness, most", "the same, of the oldest {noun}"),
    "sampling/sampling_logp_difference/max": (
        "parity difference, largest",
        "stored less recomputed log-prob of a token on unchanged weights, in nats; the gate's first measure",
    ),
    "sampling/sampling_logp_difference/mean": (
        "parity difference, mean",
        "the same over all tokens; the gate's second measure",
    ),
    "sampling/importance_sampling_ratio/min": ("parity ratio, least", "recomputed over stored probability of a token"),
    "sampling/importance_sampling_ratio/mean": ("parity ratio, mean", "1 where both sides agree"),
    "sampling/importance_sampling_ratio/max": (
        "parity ratio, largest",
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
        "through no fault of the {noun}: a service without an answer, a value that is no number; scored null",
    ),
}


def metric_title(name: str, noun: Noun = "image") -> MetricTitle:
    """Title and meaning of a figure; a name that is not known stands for itself.

    Args:
        name: of the figure.
        noun: what people call a sample of the run.
    """
    if name in _TITLES:
        title, meaning = _TITLES[name]
        return MetricTitle(title.format(noun=noun), meaning.format(noun=noun))
    if (dataset := dataset_of(name)) is not None:
        return MetricTitle(f"{dataset}: reward", f"mean of the weighted rewards over this dataset's {noun}s")
    if name.startswith(GUARDRAILS):
        label = name.removeprefix(GUARDRAILS)
        return MetricTitle(f"{label}, a guardrail", f"mean over the held-out {noun}s; nothing is trained on it")
    if name.startswith("rewards/") and name.count("/") >= 2:
        label, kind = name.removeprefix("rewards/").rsplit("/", 1)
        if kind in _OF_REWARD:
            title, meaning = _OF_REWARD[kind]
            return MetricTitle(title.format(label=label, noun=noun), meaning.format(noun=noun))
    if name.startswith("seconds/"):
        return MetricTitle(f"seconds, {name.removeprefix('seconds/')}", "measured when the stage ran")
    return MetricTitle(name, "")
