"""Every option of the policy loss, and the combinations that are refused."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat

from grpo_core.errors import InputError
from grpo_core.losses.kl import KlEstimator
from grpo_core.losses.mismatch import MismatchSettings
from grpo_core.losses.ratios import ImportanceLevel
from grpo_core.losses.registry import LOSSES, Loss, find_loss
from grpo_core.settings import check_fields


@dataclass(frozen=True)
class LossSettings:
    """Select the loss and its coefficients; coefficients of other losses have no effect.

    Attributes:
        loss: a name in grpo_core.losses.registry.LOSSES, or a user's function as `package.module:function`.
        importance_level: one ratio per token, or one per sequence; None takes the loss's default.
        clip_range: the ratio is clipped from below at 1 - clip_range; in (0, 1).
        clip_range_high: and from above at 1 + clip_range_high; None is the same as clip_range.
        delta: cap on the ratio of the unclipped branch, above 1 + clip_range_high; None is no cap.
        ratio_cap: cispo's cap on the ratio itself, at least 1; TRL reads it from epsilon_high.
        sapo_temperature_pos: of the gate where A > 0.
        sapo_temperature_neg: of the gate elsewhere.
        vespo_k_pos: power of the row's ratio where A >= 0.
        vespo_lambda_pos: its decay where A >= 0.
        vespo_k_neg: power of the row's ratio where A < 0.
        vespo_lambda_neg: its decay where A < 0.
        kl_coef: weight of the KL to the reference, added after masks, clipping and weights; 0 or above.
        kl_estimator: k1, k2 or k3. On policy, k1 in the loss has zero expected gradient unless it is corrected.
        kl_importance_correction: multiply the KL by the importance ratio, gradient included.
        entropy_coef: weight of the bonus, the mean entropy of the tokens that the entropy mask keeps; 0 or above.
        mismatch: weights for a sampler that is not the policy.
        off_policy_threshold: rows with A < 0 from which the policy moved by more nats per token have no policy term;
            None keeps all rows.

    Raises:
        InputError: a number is out of its range, or fields contradict each other; `place` is its configuration key.
    """

    loss: str = "grpo"
    importance_level: ImportanceLevel | None = None
    clip_range: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_range_high: PositiveFloat | None = None
    delta: PositiveFloat | None = None
    ratio_cap: PositiveFloat = 5.0
    sapo_temperature_pos: PositiveFloat = 1.0
    sapo_temperature_neg: PositiveFloat = 1.05
    vespo_k_pos: PositiveFloat = 2.0
    vespo_lambda_pos: PositiveFloat = 3.0
    vespo_k_neg: PositiveFloat = 3.0
    vespo_lambda_neg: PositiveFloat = 2.0
    kl_coef: NonNegativeFloat = 0.0
    kl_estimator: KlEstimator = "k3"
    kl_importance_correction: bool = True
    entropy_coef: NonNegativeFloat = 0.0
    mismatch: MismatchSettings = field(default_factory=MismatchSettings)
    off_policy_threshold: PositiveFloat | None = None

    def __post_init__(self) -> None:
        check_fields(self, "update")
        self._check_level()
        self._check_bounds()

    @cached_property
    def definition(self) -> Loss:
        """The loss by that name."""
        return find_loss(self.loss)

    @property
    def level(self) -> ImportanceLevel:
        """The importance level, the loss's default if none is set."""
        return self.importance_level or self.definition.importance_levels[0]

    @property
    def upper_clip_range(self) -> float:
        """clip_range_high, or clip_range if none is set."""
        return self.clip_range if self.clip_range_high is None else self.clip_range_high

    def _check_level(self) -> None:
        levels = self.definition.importance_levels
        if self.level not in levels:
            other = "gspo" if self.level == "sequence" else "grpo"
            hint = f"{self.loss} is defined with {levels[0]} ratios; set it to {levels[0]}, or update.loss to {other}."
            raise InputError("update.importance_level", self.level, hint)
        if self.definition.uses_mismatch_weights and self.mismatch.mode != "none" and self.mismatch.level != "token":
            hint = f"{self.loss} multiplies the token weights of a row itself; set it to token, or choose another loss."
            raise InputError("update.mismatch.level", self.mismatch.level, hint)

    def _check_bounds(self) -> None:
        if self.loss == "cispo" and self.ratio_cap < 1:
            hint = "It caps the ratio itself, not its distance from 1; give at least 1, for example 5.0."
            raise InputError("update.ratio_cap", self.ratio_cap, hint)
        if self.delta is None:
            return
        if not self.definition.clips:
            clipping = ", ".join(name for name, loss in LOSSES.items() if loss.clips)
            hint = f"{self.loss} does not clip; leave it out, or choose one of {clipping}."
            raise InputError("update.delta", self.delta, hint)
        bound = 1 + self.upper_clip_range
        if not self.delta > bound:
            hint = f"It bounds ratios beyond the upper clip; give more than 1 + clip_range_high = {bound:g}."
            raise InputError("update.delta", self.delta, hint)
