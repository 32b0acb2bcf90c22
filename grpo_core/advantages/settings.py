"""Every option of the advantages, and the combinations that are refused."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import NonNegativeFloat, PositiveFloat

from grpo_core.errors import InputError
from grpo_core.losses.settings import KlEstimator
from grpo_core.rewards.registry import MissingRewards, RewardTerm
from grpo_core.settings import check_fields

Baseline = Literal["mean", "leave_one_out"]
Scale = Literal["group", "batch", "none"]
Aggregation = Literal["sum_then_normalize", "normalize_then_sum"]
ConstantGroups = Literal["keep", "drop", "redraw"]


@dataclass(frozen=True)
class AdvantageSettings:
    """How rewards become advantages.

    Attributes:
        baseline: what is subtracted: the mean of the group, or that of the other siblings (RLOO; Ahmadian et al.,
            2024, arXiv:2402.14740).
        scale: whose standard deviation divides: the group's, that of all rewards of the call, or none (Dr. GRPO; Liu
            et al., 2025, arXiv:2503.20783).
        aggregation: combine the rewards of a sample and normalise, or normalise each reward within its group, combine
            and normalise over all samples of the call (GDPO; Liu et al., 2026, arXiv:2601.05242).
        eps: added to each standard deviation that divides.
        clip: bound of |advantage|, applied last; None: no bound.
        missing: what stands in for a reward that is null for some siblings: their mean, the other weights scaled up to
            the same sum, nothing (drop: the sample is not trained), or zero, as in TRL. Null for all of a group: the
            other weights are scaled up, except with zero.
        constant_groups: how groups without spread are treated. keep: their advantages are 0. drop: they have none and
            are in no statistic of the batch (DAPO; Yu et al., 2025, arXiv:2503.14476). redraw: the same, and the
            training loop samples other prompts in their place, until every trained stream has its groups.
        kl_coef: weight of the KL to the reference that is subtracted from the combined reward.
        kl_estimator: k1, k2 or k3, summed over the trained tokens of a row.
    """

    baseline: Baseline = "mean"
    scale: Scale = "group"
    aggregation: Aggregation = "sum_then_normalize"
    eps: NonNegativeFloat = 1e-4
    clip: PositiveFloat | None = None
    missing: MissingRewards = "group_mean"
    constant_groups: ConstantGroups = "keep"
    kl_coef: NonNegativeFloat = 0.0
    kl_estimator: KlEstimator = "k1"

    def __post_init__(self) -> None:
        check_fields(self, "advantages")
        if self.aggregation == "normalize_then_sum":
            self._check_normalize_then_sum()

    def _check_normalize_then_sum(self) -> None:
        other = "or set advantages.aggregation to sum_then_normalize."
        if self.baseline == "leave_one_out":
            hint = f"normalize_then_sum subtracts the mean of the whole batch last; set it to mean, {other}"
            raise InputError("advantages.baseline", self.baseline, hint)
        if self.scale != "group":
            hint = f"normalize_then_sum divides each reward by its std within the group; set it to group, {other}"
            raise InputError("advantages.scale", self.scale, hint)
        if self.kl_coef > 0:
            hint = f"With normalize_then_sum there is no common scale to subtract it on; use update.kl_coef, {other}"
            raise InputError("advantages.kl_coef", self.kl_coef, hint)


def refuse_terms(terms: Sequence[RewardTerm], settings: AdvantageSettings) -> None:
    """Raise InputError for a mix from which nothing can be learned, or that these settings would normalise twice."""
    if not any(term.role == "sum" and term.weight for term in terms):
        found = [term.role if term.role == "gate" else term.weight for term in terms]
        hint = "No reward is added with a weight other than 0, so nothing would be learned; give one a weight."
        raise InputError("rewards", found, hint)
    if settings.aggregation != "normalize_then_sum":
        return
    for index, term in enumerate(terms):
        if term.normalize in ("group", "running"):
            hint = "normalize_then_sum normalises every reward; set it to none or range, or set advantages.aggregation "
            raise InputError(f"rewards.{index}.normalize", term.normalize, hint + "to sum_then_normalize.")
