"""What one reward does in the mix, and its values on the scale on which they are added or multiplied."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_core.errors import InputError
from grpo_core.settings import check_fields

Role = Literal["sum", "gate"]
Normalization = Literal["none", "group", "running", "range"]


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


def scaled_values(
    values: Float[Tensor, "*samples rewards"], terms: Sequence[RewardTerm]
) -> Float[Tensor, "*samples rewards"]:
    """Clamp the values, then apply the fixed range; a gate's factor is at least 0. NaN stays NaN."""
    assert values.shape[-1] == len(terms), f"one term a reward, got {len(terms)} for {values.shape[-1]}"
    return torch.stack([_scaled(values[..., index], term) for index, term in enumerate(terms)], -1)


def _scaled(values: Float[Tensor, "*samples"], term: RewardTerm) -> Float[Tensor, "*samples"]:
    if term.threshold is not None:
        # Scores are computed in fp32, where .7 may lie below .7 of fp64.
        passed = values.float() >= torch.tensor(term.threshold, dtype=torch.float32, device=values.device)
        return torch.where(values.isnan(), torch.nan, passed.to(values.dtype))
    if term.clamp is not None:
        values = values.clamp(*term.clamp)
    if term.range is not None:
        low, high = term.range
        values = (values - low) / (high - low)
    return values.clamp(min=0.0) if term.role == "gate" else values
