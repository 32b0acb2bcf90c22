"""The comparison as rows of text: the terminal and the page show the same."""

from collections.abc import Iterator

from tasks.reports.group_spread import Spread
from tasks.reports.layout import correlation, percent
from tasks.reports.page import number
from tasks.reports.rescoring.records import AdvantageChange, RescoringComparison, RewardChange

HEADINGS = (
    "reward",
    "mean",
    "spread in groups",
    "groups without spread",
    "without a value",
    "order kept, all / in groups",
    "order by the previous reward, all / in groups",
)
"""Of the columns of :func:`reward_rows`."""

COMBINED = "combined"


def reward_rows(comparison: RescoringComparison) -> Iterator[tuple[str, ...]]:
    """The combined reward, then each by itself: a cell a heading, both sides with an arrow between them."""
    yield _row(comparison.combined, COMBINED)
    for change in comparison.rewards:
        note = "" if change.before and change.after else " (added)" if change.after else " (removed)"
        yield _row(change, change.label + note)


def advantage_rows(advantages: AdvantageChange) -> Iterator[tuple[str, str]]:
    """What changed in advantages: what is counted, and how much of it there is."""
    both, zero = advantages.both_non_zero, advantages.zero_before
    yield "advantages on both sides", f"{advantages.compared:,}"
    yield "sign turned", f"{percent(advantages.turned)} of {both:,} that are not zero on either side"
    yield "not zero", f"{percent(advantages.non_zero_before)} → {percent(advantages.non_zero_after)}"
    yield "zero, no longer so", f"{percent(advantages.from_zero)} of {zero:,} that were zero"
    yield "became zero", f"{percent(advantages.to_zero)} of {advantages.compared - zero:,} that were not"
    yield "on one side only", f"{advantages.lost:,} before, {advantages.gained:,} after"


def _row(change: RewardChange, name: str) -> tuple[str, ...]:
    before, after, own, previous = change.before, change.after, change.own, change.with_previous
    return (
        name,
        _both(_number(before, "mean"), _number(after, "mean")),
        _both(_number(before, "within_groups"), _number(after, "within_groups")),
        _both(_percent(before, "groups_without_spread"), _percent(after, "groups_without_spread")),
        _both(_percent(before, "null_share"), _percent(after, "null_share")),
        "" if own is None else f"{correlation(own.overall, 3)} / {correlation(own.within_groups, 3)}",
        f"{correlation(previous.overall, 3)} / {correlation(previous.within_groups, 3)}",
    )


def _both(before: str, after: str) -> str:
    return " → ".join(filter(None, (before, after)))


def _number(spread: Spread | None, name: str) -> str:
    return "" if spread is None else number(getattr(spread, name))


def _percent(spread: Spread | None, name: str) -> str:
    return "" if spread is None else percent(getattr(spread, name))
