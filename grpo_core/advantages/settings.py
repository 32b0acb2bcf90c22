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
        baseline: what is subtracted: the mean of the group, or of the other siblings (RLOO; Ahmadian et al.,
            2024, arXiv:2402.14740).
        scale: whose standard deviation divides: the group's, that of all rewards of the iteration, or none (Dr. GRPO;
            Liu et al., 2025, arXiv:2503.20783).
        aggregation: normalize_then_sum normalises each reward within its group, sums with the weights, and normalises
            over the iteration (GDPO; Liu et al., 2026, arXiv:2601.05242).
        eps: added to each standard deviation that divides.
        clip: bound of |advantage|, applied last.
        missing: of a reward that is null for some siblings: the mean of the others stands in, the other weights are
            scaled up to the same sum, the sample is not trained (drop), or it adds nothing (zero, as in TRL). Null for
            a whole group: the other weights are scaled up, except with zero.
        constant_groups: of groups without spread. keep: their advantages are 0. drop: they are left out. redraw: other
            prompts are sampled in their place until each stream has its groups (DAPO; Yu et al., 2025,
            arXiv:2503.14476).
        kl_coef: weight of the KL to the reference in the reward, from log-probs recorded while sampling.
        kl_estimator: its estimator, summed over a row's tokens.
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
