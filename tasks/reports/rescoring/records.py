"""What changed when rollouts were scored again: frozen records."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from tasks.reports.group_ranks import RankAgreement
from tasks.reports.group_spread import Spread
from tasks.reports.rescoring.joint import JointCounts


@dataclass(frozen=True)
class RewardChange:
    """One reward, or the combined one, on both sides.

    Attributes:
        label: its name.
        before: None where it was not part of the previous scoring.
        after: None where it is not part of the later one.
        own: ranks by its previous values against its later ones; None where a side is missing.
        with_former: ranks by it (later values, or previous ones where there are no later) against the previous combined
            reward.
    """

    label: str
    before: Spread | None
    after: Spread | None
    own: RankAgreement | None
    with_previous: RankAgreement


@dataclass(frozen=True)
class AdvantageChange:
    """What the samples push towards, before and after.

    Attributes:
        compared: samples with an advantage on both sides.
        gained: samples with an advantage on the later side only.
        lost: samples with one on the previous side only.
        non_zero_before: share of the compared that had one other than zero; None without any.
        non_zero_after: likewise.
        both_non_zero: compared samples with neither side zero.
        turned: share of these whose sign is the opposite; None without any.
        zero_before: compared samples whose advantage was zero.
        from_zero: share of these whose advantage is no longer zero; None without any.
        to_zero: share of those that were not zero whose advantage became zero; None without any.
    """

    compared: int
    gained: int
    lost: int
    non_zero_before: float | None
    non_zero_after: float | None
    both_non_zero: int
    turned: float | None
    zero_before: int
    from_zero: float | None
    to_zero: float | None


@dataclass(frozen=True)
class RescoringComparison:
    """Two scorings of the same samples.

    Attributes:
        runs: that the samples come from, sorted.
        samples: all of them, with and without rewards.
        groups: of the samples.
        combined: the combined reward.
        rewards: each by itself: those of both sides first, then the added, then the removed.
        advantages: of the samples.
        joint: how often which previous and later reward met.
    """

    runs: tuple[str, ...]
    samples: int
    groups: int
    combined: RewardChange
    rewards: tuple[RewardChange, ...]
    advantages: AdvantageChange
    joint: JointCounts

    def summary(self) -> dict[str, Any]:
        """Every figure as JSON holds it; what only charts need is left out."""
        figures = dataclasses.asdict(self)
        del figures["joint"]
        return {**figures, "runs": list(self.runs), "rewards": list(figures["rewards"])}
