"""Every switch of the policy loss, and the combinations that mean nothing."""

import math
from dataclasses import dataclass
from typing import get_args

from grpo_core.errors import InputError
from grpo_core.losses.kl import KlEstimator
from grpo_core.losses.mismatch import MismatchSettings
from grpo_core.losses.ratios import ImportanceLevel
from grpo_core.losses.reductions import LossName

CLIPPED_LOSSES: tuple[LossName, ...] = ("grpo", "bnpo", "dr_grpo", "dapo", "gspo", "luspo")
SEQUENCE_LOSSES: tuple[LossName, ...] = ("gspo", "luspo")
TOKEN_LOSSES: tuple[LossName, ...] = ("cispo", "vespo")


def default_importance_level(loss: LossName) -> ImportanceLevel:
    """The level that the loss's paper uses."""
    return "sequence" if loss in SEQUENCE_LOSSES else "token"


@dataclass(frozen=True)
class LossSettings:
    """Which loss, and its numbers; those of other losses are not looked at.

    Attributes:
        loss: grpo, bnpo, dr_grpo, dapo clip the ratio and differ in their reduction; gspo is grpo with a ratio a
            sequence, luspo the same times the row's length; cispo caps a constant weight; sapo gates smoothly;
            vespo weights rows by a smooth function of their ratio.
        importance_level: one ratio a token, or one a sequence.
        clip_range: the ratio is clipped from below at 1 - clip_range.
        clip_range_high: and from above at 1 + clip_range_high.
        delta: cap on the ratio of the unclipped branch, above 1 + clip_range_high; None: no cap.
        ratio_cap: cispo's cap on the ratio itself; TRL reads it from epsilon_high.
        sapo_temperature_pos: of the gate where A > 0.
        sapo_temperature_neg: of the gate elsewhere.
        vespo_k_pos: power of the row's ratio where A >= 0.
        vespo_lambda_pos: its decay where A >= 0.
        vespo_k_neg: power of the row's ratio where A < 0.
        vespo_lambda_neg: its decay where A < 0.
        kl_coef: weight of the KL to the reference, added after masks, clipping and weights.
        kl_estimator: k1, k2 or k3. On policy, k1 in the loss has zero expected gradient unless it is corrected.
        kl_importance_correction: multiply the KL by the importance ratio, gradient included.
        entropy_coef: weight of the bonus, the mean entropy of the tokens that the entropy mask keeps.
        mismatch: weights for a sampler that is not the policy; None applies none.
        off_policy_threshold: rows with A < 0 that the policy left by more nats a token than this have no policy
            term; None keeps all rows.

    Raises:
        InputError: a number is out of its range, or the combination means nothing; `place` is its configuration key.
    """

    loss: LossName
    importance_level: ImportanceLevel
    clip_range: float = 0.2
    clip_range_high: float = 0.2
    delta: float | None = None
    ratio_cap: float = 5.0
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    vespo_k_pos: float = 2.0
    vespo_lambda_pos: float = 3.0
    vespo_k_neg: float = 3.0
    vespo_lambda_neg: float = 2.0
    kl_coef: float = 0.0
    kl_estimator: KlEstimator = "k3"
    kl_importance_correction: bool = False
    entropy_coef: float = 0.0
    mismatch: MismatchSettings | None = None
    off_policy_threshold: float | None = None

    def __post_init__(self) -> None:
        self._check_ranges()
        self._check_level()
        self._check_bounds()
        if self.loss == "vespo" and self.mismatch is not None and self.mismatch.level == "sequence":
            hint = "vespo multiplies the token weights of a row itself; set it to token, or choose another loss."
            raise InputError("update.mismatch.level", self.mismatch.level, hint)

    def _check_ranges(self) -> None:
        positive = [
            "clip_range",
            "clip_range_high",
            "ratio_cap",
            "sapo_temperature_pos",
            "sapo_temperature_neg",
            "vespo_k_pos",
            "vespo_lambda_pos",
            "vespo_k_neg",
            "vespo_lambda_neg",
        ]
        if self.off_policy_threshold is not None:
            positive.append("off_policy_threshold")
        for field in positive:
            if not getattr(self, field) > 0:
                raise InputError(f"update.{field}", getattr(self, field), "Give a number above 0.")
        for field in ("kl_coef", "entropy_coef"):
            if not 0 <= getattr(self, field) < math.inf:
                raise InputError(f"update.{field}", getattr(self, field), "Give a finite number, 0 or above.")
        if self.clip_range >= 1:
            raise InputError("update.clip_range", self.clip_range, "Give a number below 1: a ratio is never negative.")
        if self.kl_estimator not in get_args(KlEstimator):
            raise InputError("update.kl_estimator", self.kl_estimator, "Choose k1, k2 or k3.")

    def _check_level(self) -> None:
        if self.loss not in get_args(LossName):
            raise InputError("update.loss", self.loss, f"Choose one of {', '.join(get_args(LossName))}.")
        if self.importance_level not in get_args(ImportanceLevel):
            raise InputError("update.importance_level", self.importance_level, "Choose token or sequence.")
        if self.loss in SEQUENCE_LOSSES and self.importance_level == "token":
            hint = f"{self.loss} has one ratio a sequence; set it to sequence, or update.loss to grpo."
            raise InputError("update.importance_level", self.importance_level, hint)
        if self.loss in TOKEN_LOSSES and self.importance_level == "sequence":
            hint = f"{self.loss} is defined with token ratios; set it to token, or update.loss to gspo."
            raise InputError("update.importance_level", self.importance_level, hint)

    def _check_bounds(self) -> None:
        if self.loss == "cispo" and self.ratio_cap < 1:
            hint = "It caps the ratio itself, not its distance from 1; give at least 1, for example 5.0."
            raise InputError("update.ratio_cap", self.ratio_cap, hint)
        if self.delta is None:
            return
        if self.loss not in CLIPPED_LOSSES:
            hint = f"{self.loss} does not clip; leave it out, or choose one of {', '.join(CLIPPED_LOSSES)}."
            raise InputError("update.delta", self.delta, hint)
        if not self.delta > 1 + self.clip_range_high:
            hint = (
                f"It bounds ratios beyond the upper clip; give more than 1 + clip_range_high = "
                f"{1 + self.clip_range_high:g}, or leave it out."
            )
            raise InputError("update.delta", self.delta, hint)
