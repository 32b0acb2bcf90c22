"""What one reward does in the mix, and what stands in for one that is missing."""

from dataclasses import dataclass
from typing import Literal

from grpo_core.errors import InputError
from grpo_core.settings import check_fields

Role = Literal["sum", "gate"]
Normalization = Literal["none", "group", "running", "range"]
MissingRewards = Literal["group_mean", "renormalize", "drop"]


@dataclass(frozen=True)
class RewardTerm:
    """A reward that adds to the others, or a gate that multiplies what they add up to.

    A gate is for a condition without which nothing else counts: the format of an answer, an image that shows something.
    It makes 0 of the other rewards, so these should be 0 at worst, with weights above 0: a reward or a weight below 0
    is a penalty, and a gate of 0 lifts it.

    Attributes:
        weight: w_k; 0: the reward is measured and does not count. A gate has none and keeps 1.
        role: sum: w_k times the value is added; gate: the value multiplies, one below 0 as 0, since it would turn the
            order of the samples round.
        threshold: of a gate: 1 from this value on, 0 below it; None: the value itself multiplies.
        clamp: lowest and highest value; values beyond take the nearer one, before all other steps.
        normalize: how the advantages see a reward that adds. none: unchanged. range: by `range`. group: less the mean
            of the group, over its standard deviation. running: the same by the values of every call so far.
        range: of normalize: range: the values that become 0 and 1; others follow the line, beyond it as well unless
            `clamp` limits them.

    Raises:
        InputError: a number is out of its range, or a field has no effect with the others; `place` is
            ``rewards.<field>``.
    """

    weight: float = 1.0
    role: Role = "sum"
    threshold: float | None = None
    clamp: tuple[float, float] | None = None
    normalize: Normalization = "none"
    range: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        check_fields(self, "rewards")
        for field in ("clamp", "range"):
            interval = getattr(self, field)
            if interval is not None and not interval[0] < interval[1]:
                raise InputError(f"rewards.{field}", interval, "Give the lower number first.")
        if self.normalize == "range" and self.range is None:
            raise InputError("rewards.range", None, "normalize is range; give the values that become 0 and 1.")
        if self.normalize != "range" and self.range is not None:
            raise InputError("rewards.range", self.range, "It needs normalize: range; set that, or leave this out.")
        if self.role == "gate":
            self._check_gate()
        elif self.threshold is not None:
            raise InputError("rewards.threshold", self.threshold, "Only a gate has one; set role: gate.")

    def _check_gate(self) -> None:
        if self.weight != 1:
            raise InputError("rewards.weight", self.weight, "A gate multiplies and has no weight; leave it out.")
        if self.normalize in ("group", "running"):
            hint = "What multiplies has to mean the same in every group; choose none or range."
            raise InputError("rewards.normalize", self.normalize, hint)
        if self.threshold is None:
            return
        for field in ("clamp", "range"):
            if getattr(self, field) is not None:
                hint = "A threshold makes the gate 0 or 1 by the unscaled value; leave one of the two out."
                raise InputError(f"rewards.{field}", getattr(self, field), hint)
