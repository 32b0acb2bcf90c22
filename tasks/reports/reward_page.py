"""The analysis of rewards for people: what stands out, the rows of its tables, and its page."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tasks.reports.images import data_uri
from tasks.reports.pages import render
from tasks.reports.reward_analysis import RewardAnalysis, RewardMetrics
from tasks.reports.text import correlation, counted, number, percent, significant

HEADINGS = (
    "reward",
    "mean ± std",
    "minimum | median | maximum",
    "at 0 | at 1 | at highest",
    "no value | failed",
    "groups without spread",
    "spread in groups | of total",
    "noise, mean | maximum",
    "seconds, mean | p95",
)
"""Headings of the columns of :func:`reward_rows`."""

PAIR_HEADINGS = ("rewards", "rank correlation", "within groups", "same side of the group's mean", "samples")
"""Headings of the columns of :func:`agreement_rows`."""

MANY_FLAT_GROUPS = 0.5
"""Share of groups without spread, from which nothing is learned."""

SATURATED = 0.5
"""Share of values at the floor or the ceiling."""

MANY_FAILURES = 0.01
"""Share of samples."""

NOISY = 0.2
"""Mean difference between two scorings over the spread within groups: a fifth of what siblings differ by."""

WEAK_SIGNAL = 0.1
"""Spread within groups over the spread of all values; below it the prompt decides the reward, not the sample."""

NEARLY_THE_SAME, AGAINST = 0.95, -0.3
"""Rank correlation within groups, beyond which two rewards measure the same, or oppose each other."""


@dataclass(frozen=True)
class Finding:
    """A property of rewards to check before training on them.

    Attributes:
        subject: the reward, or both of them.
        text: what was found, with the number.
    """

    subject: str
    text: str


def findings(analysis: RewardAnalysis) -> tuple[Finding, ...]:
    """List what stands out, reward by reward in their order, then pairs of them."""
    alone = [Finding(reward.label, text) for reward in analysis.rewards for text in _alone(reward)]
    return (*alone, *_pairs(analysis))


def _alone(reward: RewardMetrics) -> Iterator[str]:
    spread = reward.spread
    if reward.failures > MANY_FAILURES * spread.samples:
        reasons = "; ".join(f"{reason} ({count:,})" for reason, count in reward.failure_reasons.items())
        share = percent(reward.failures / spread.samples)
        yield f"failed for {counted(reward.failures, 'sample')} ({share}): {reasons}"
    if reward.saturation is None:
        yield "has no value for any sample: nothing is learned from it"
        return
    if spread.groups_without_spread is not None and spread.groups_without_spread >= MANY_FLAT_GROUPS:
        share = percent(spread.groups_without_spread)
        yield f"is the same for all siblings in {share} of the groups: nothing is learned from these"
    edges = (("floor, 0", reward.saturation.at_floor), ("ceiling, 1", reward.saturation.at_ceiling))
    for bound, at_bound in edges:
        if at_bound >= SATURATED:
            yield f"is at the {bound}, for {percent(at_bound)} of the samples"
    if reward.signal_ratio is not None and 0 < reward.signal_ratio < WEAK_SIGNAL:
        yield f"distinguishes prompts, not samples: spread within groups is {reward.signal_ratio:.3f} of the total"
    noise = reward.noise
    if noise is not None and noise.one_sided:
        yield f"gave a value in only one of two scorings for {counted(noise.one_sided, 'sample')}"
    if noise is not None and reward.noise_to_spread is not None and reward.noise_to_spread >= NOISY:
        mean, share = significant(noise.mean_difference), percent(reward.noise_to_spread)
        yield f"is noisy: two scorings differ by {mean} on average, {share} of the spread within groups"


def _pairs(analysis: RewardAnalysis) -> Iterator[Finding]:
    for pair in analysis.agreements:
        rho, subject = pair.ranks.within_groups, f"{pair.first} and {pair.second}"
        if rho is not None and rho >= NEARLY_THE_SAME:
            yield Finding(subject, f"order siblings nearly alike (rank correlation {rho:.2f}): one counts twice")
        if rho is not None and rho <= AGAINST:
            yield Finding(subject, f"oppose each other within groups (rank correlation {rho:.2f})")


def reward_rows(analysis: RewardAnalysis) -> Iterator[tuple[str, ...]]:
    """List the rewards, one cell per heading."""
    for reward in analysis.rewards:
        spread, values, edge, noise, cost = reward.spread, reward.values, reward.saturation, reward.noise, reward.cost
        yield (
            reward.label,
            _cell(" ± ", spread.mean, spread.std) if values else "none",
            _cell(" | ", values.minimum, values.median, values.maximum) if values else "none",
            " | ".join(map(percent, (edge.at_floor, edge.at_ceiling, edge.at_highest))) if edge else "none",
            f"{percent(spread.null_share)} | {reward.failures:,}",
            percent(spread.groups_without_spread),
            f"{significant(spread.within_groups)} | {number(reward.signal_ratio, 2)}",
            _cell(" | ", noise.mean_difference, noise.max_difference) if noise else "unknown",
            _cell(" | ", cost.mean, cost.p95) if cost else "none",
        )


def _cell(separator: str, *values: float | None) -> str:
    return separator.join(map(significant, values))


def agreement_rows(analysis: RewardAnalysis) -> Iterator[tuple[str, ...]]:
    """List pairs of rewards: the most related within groups first, those that are not comparable last."""

    def strength(within: float | None) -> float:
        return 1.0 if within is None else -abs(within)

    for pair in sorted(analysis.agreements, key=lambda pair: strength(pair.ranks.within_groups)):
        yield (
            f"{pair.first}, {pair.second}",
            correlation(pair.ranks.overall),
            correlation(pair.ranks.within_groups),
            percent(pair.same_sign),
            f"{pair.ranks.pairs:,}",
        )


def render_reward_page(analysis: RewardAnalysis, plots: Mapping[str, bytes], title: str) -> str:
    """Write the page of an analysis.

    Args:
        analysis: analysis of the rewards.
        plots: PNG files by name, shown in this order.
        title: title of the page.
    """
    return render(
        "rewards.html.jinja",
        title=title,
        subtitle=f"{counted(len(analysis.rewards), 'reward')} over {counted(analysis.samples, 'sample')} in "
        f"{counted(analysis.groups, 'group')} of {', '.join(analysis.runs)}",
        findings=findings(analysis),
        headings=HEADINGS,
        rows=list(reward_rows(analysis)),
        pair_headings=PAIR_HEADINGS,
        pairs=list(agreement_rows(analysis)),
        plots={name.rsplit(".", 1)[0]: data_uri(content, "image/png") for name, content in plots.items()},
        repeated=any(reward.noise for reward in analysis.rewards),
    )
