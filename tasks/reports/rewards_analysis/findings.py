"""What a person should look at before they train on these rewards, in words."""

from collections.abc import Iterator
from dataclasses import dataclass

from tasks.reports.layout import counted, figure, percent
from tasks.reports.rewards_analysis.records import RewardAnalysis, RewardMetrics

MANY_FLAT_GROUPS = 0.5
"""Share of groups without spread: half of the rollouts are drawn for nothing."""

SATURATED = 0.5
"""Share of values at the floor or the ceiling."""

MANY_FAILURES = 0.01
"""Share of samples."""

NOISY = 0.2
"""Mean difference between two scorings over the spread within groups: a fifth of what siblings differ by."""

WEAK_SIGNAL = 0.1
"""Spread within groups over the spread of all values: the prompt decides the reward, not what was made of it."""

NEARLY_THE_SAME, AGAINST = 0.95, -0.3
"""Rank correlation within groups: two rewards that count the same twice, or that pull against each other."""


@dataclass(frozen=True)
class Finding:
    """Something to look at.

    Attributes:
        subject: the reward, or both of them.
        said: what it is, with the figure.
    """

    subject: str
    said: str


def findings(analysis: RewardAnalysis) -> tuple[Finding, ...]:
    """What stands out, reward by reward in their order, then pairs of them."""
    alone = [Finding(reward.label, said) for reward in analysis.rewards for said in _alone(reward)]
    return (*alone, *_pairs(analysis))


def _alone(reward: RewardMetrics) -> Iterator[str]:
    spread = reward.spread
    if reward.failures > MANY_FAILURES * spread.samples:
        reasons = "; ".join(f"{reason} ({count:,})" for reason, count in reward.failure_reasons.items())
        share = percent(reward.failures / spread.samples)
        yield f"failed for {counted(reward.failures, 'sample')} ({share}): {reasons}"
    if not spread.values:
        yield "has no value for any sample: it teaches nothing"
        return
    if spread.groups_without_spread is not None and spread.groups_without_spread >= MANY_FLAT_GROUPS:
        share = percent(spread.groups_without_spread)
        yield f"is the same for all siblings in {share} of the groups: these teach nothing"
    yield from _saturated(reward)
    if reward.signal_ratio is not None and 0 < reward.signal_ratio < WEAK_SIGNAL:
        yield f"tells prompts apart, not their samples: spread within groups is {reward.signal_ratio:.3f} of the whole"
    yield from _noisy(reward)


def _noisy(reward: RewardMetrics) -> Iterator[str]:
    noise, share = reward.noise, reward.noise_to_spread
    if noise is not None and noise.one_sided:
        yield f"gave a value only one of two times for {counted(noise.one_sided, 'sample')}"
    if noise is not None and share is not None and share >= NOISY:
        mean = figure(noise.mean_difference)
        yield f"is noisy: two scorings differ by {mean} on average, {percent(share)} of the spread within groups"


def _saturated(reward: RewardMetrics) -> Iterator[str]:
    assert reward.saturation is not None, "a reward with values has a saturation"
    for bound, share in (("floor, 0", reward.saturation.at_floor), ("ceiling, 1", reward.saturation.at_ceiling)):
        if share >= SATURATED:
            yield f"is at the {bound}, for {percent(share)} of the samples"


def _pairs(analysis: RewardAnalysis) -> Iterator[Finding]:
    for pair in analysis.agreements:
        rho, subject = pair.ranks.within_groups, f"{pair.first} and {pair.second}"
        if rho is not None and rho >= NEARLY_THE_SAME:
            yield Finding(subject, f"order siblings nearly alike (rank correlation {rho:.2f}): one counts twice")
        if rho is not None and rho <= AGAINST:
            yield Finding(subject, f"pull against each other within groups (rank correlation {rho:.2f})")
