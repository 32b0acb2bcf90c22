"""The analysis as rows of text: the terminal and the page show the same."""

from collections.abc import Iterator

from tasks.reports.layout import correlation, figure, percent
from tasks.reports.page import number
from tasks.reports.rewards_analysis.records import RewardAnalysis, RewardMetrics

HEADINGS = (
    "reward",
    "mean ± std",
    "least | median | most",
    "at 0 | at 1 | at highest",
    "no value | failed",
    "groups without spread",
    "spread in groups | of the whole",
    "noise, mean | most",
    "seconds, mean | p95",
)
"""Of the columns of :func:`figure_rows`."""

PAIR_HEADINGS = ("rewards", "rank correlation", "within groups", "same side of the group's mean", "samples")
"""Of the columns of :func:`agreement_rows`."""


def figure_rows(analysis: RewardAnalysis) -> Iterator[tuple[str, ...]]:
    """A row a reward, a cell a heading."""
    yield from (_row(reward) for reward in analysis.rewards)


def agreement_rows(analysis: RewardAnalysis) -> Iterator[tuple[str, ...]]:
    """A row a pair of rewards: the least unrelated within groups first, those that cannot be compared last."""
    known = [pair for pair in analysis.agreements if pair.ranks.within_groups is not None]
    unknown = [pair for pair in analysis.agreements if pair.ranks.within_groups is None]
    for pair in [*sorted(known, key=lambda pair: -abs(pair.ranks.within_groups or 0.0)), *unknown]:
        ranks = pair.ranks
        yield (
            f"{pair.first}, {pair.second}",
            correlation(ranks.overall),
            correlation(ranks.within_groups),
            percent(pair.same_sign),
            f"{ranks.pairs:,}",
        )


def _row(reward: RewardMetrics) -> tuple[str, ...]:
    spread, values, edge, noise, cost = reward.spread, reward.values, reward.saturation, reward.noise, reward.cost
    return (
        reward.label,
        f"{figure(spread.mean)} ± {figure(spread.std)}" if values else "none",
        f"{figure(values.minimum)} | {figure(values.median)} | {figure(values.maximum)}" if values else "none",
        f"{percent(edge.at_floor)} | {percent(edge.at_ceiling)} | {percent(edge.at_highest)}" if edge else "none",
        f"{percent(spread.null_share)} | {reward.failures:,}",
        percent(spread.groups_without_spread),
        f"{figure(spread.within_groups)} | {number(reward.signal_ratio, 2)}",
        f"{figure(noise.mean_difference)} | {figure(noise.max_difference)}" if noise else "unknown",
        f"{figure(cost.mean)} | {figure(cost.p95)}" if cost else "none",
    )
