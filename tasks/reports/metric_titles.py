"""What each figure of an iteration is, in plain words."""

from dataclasses import dataclass


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
    "reward": ("reward", "mean of the weighted rewards over the iteration's pictures"),
    "heldout_reward": ("held-out reward", "the same over prompts that are never trained on, with fixed seeds"),
    "reward_std": (
        "spread within groups",
        "mean over groups of the reward's standard deviation; without it nothing is learnt",
    ),
    "frac_reward_zero_std": ("groups without spread", "share of groups whose pictures all have the same reward"),
    "samples_without_reward": ("pictures without a reward", "none of the rewards applies to them"),
    "rewards_imputed": ("rewards filled in", "values missing for some siblings, replaced by the group's mean"),
    "num_tokens": ("tokens trained on", "over all pictures of the iteration"),
    "completions/mean_length": ("tokens a picture", "mean number of trained tokens"),
    "loss": ("loss", "clipped surrogate with the KL term, before each optimizer step"),
    "grad_norm": ("gradient norm", "before it is clipped"),
    "learning_rate": ("learning rate", "of the last optimizer step"),
    "kl": ("KL to the reference", "k3 estimate a token, in nats, of how far the policy moved from the given model"),
    "entropy": ("entropy", "of the policy's choice a token, in nats; near zero it draws one picture only"),
    "importance_ratio/mean": ("importance ratio", "policy in training over policy that drew, mean over tokens"),
    "clip_ratio/low_mean": ("clipped below", "share of tokens whose ratio fell below the clip range"),
    "clip_ratio/low_min": ("clipped below, least", "in one optimizer step"),
    "clip_ratio/high_mean": ("clipped above", "share of tokens whose ratio rose above the clip range"),
    "clip_ratio/high_max": ("clipped above, most", "in one optimizer step"),
    "clip_ratio/region_mean": ("clipped tokens", "share of tokens whose ratio left the clip range"),
    "optimizer_steps": ("optimizer steps", "of this iteration"),
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
    "std": ("{label}: standard deviation", "over all pictures of the iteration"),
    "null": ("{label}: pictures it does not apply to", "scored null"),
}


def metric_title(name: str) -> MetricTitle:
    """Title and meaning of a figure; a name that is not known stands for itself."""
    if name in _TITLES:
        return MetricTitle(*_TITLES[name])
    if name.startswith("rewards/") and name.count("/") >= 2:
        label, kind = name.removeprefix("rewards/").rsplit("/", 1)
        if kind in _OF_REWARD:
            title, meaning = _OF_REWARD[kind]
            return MetricTitle(title.format(label=label), meaning)
    if name.startswith("seconds/"):
        return MetricTitle(f"seconds, {name.removeprefix('seconds/')}", "measured when the stage ran")
    return MetricTitle(name, "")
