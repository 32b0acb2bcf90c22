"""Every loss: the inputs and options of all, the policy term of each token, the reduction, and the names.

A new loss is one function, here or in any module that :func:`find_loss` can import, and one entry in LOSSES. It takes
:class:`TermInputs` and the settings and returns a :class:`PolicyTerm`, whose values are minimised; values where the
loss mask is False are undefined, because the caller drops them.
"""

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, cast

import torch
from jaxtyping import Bool, Float
from pydantic import Field, NonNegativeFloat, PositiveFloat
from torch import Tensor

from grpo_core.errors import InputError
from grpo_core.losses.kl import KlEstimator
from grpo_core.losses.ratios import ImportanceLevel, MismatchSettings
from grpo_core.losses.reductions import (
    Denominators,
    Reduction,
    constant_length_mean,
    mean_of_expected_tokens,
    mean_of_row_means,
    mean_of_row_sums,
    mean_of_tokens,
)
from grpo_core.settings import check_fields
from grpo_core.user_functions import REFERENCE, UserFunction, load_function

VESPO_LOWEST, VESPO_HIGHEST = math.log(1e-8), 20.0
"""Bounds of the logarithm of vespo's weight."""


@dataclass(frozen=True)
class TermInputs:
    """The inputs of a loss for one microbatch.

    Attributes:
        logprobs: under the policy that is being trained, nats, with gradient; 0 where masked.
        log_ratio: logprobs - old_logprobs, with gradient; 0 where masked.
        ratio: importance ratio of each token, or of its row, with gradient; its exponent is clamped.
        advantages: one per row.
        loss_mask: True for a trained token.
        mismatch_weights: correction for a sampler that is not the policy, 1 where masked; None without one.
        denominators: counts of the minibatch, for a loss that reduces its tokens itself.
    """

    logprobs: Float[Tensor, "batch time"]
    log_ratio: Float[Tensor, "batch time"]
    ratio: Float[Tensor, "batch time"]
    advantages: Float[Tensor, " batch"]
    loss_mask: Bool[Tensor, "batch time"]
    mismatch_weights: Float[Tensor, "batch time"] | None
    denominators: Denominators


@dataclass(frozen=True)
class PolicyTerm:
    """The policy term of each token, and where its bounds stop the gradient.

    Attributes:
        values: to be minimised; a scalar is the microbatch's share of the minibatch's policy loss, already reduced.
        clipped_low: the lower bound is active; None where the loss has none.
        clipped_high: the upper bound is active; None where the loss has none.
    """

    values: Float[Tensor, "batch time"] | Float[Tensor, ""]
    clipped_low: Bool[Tensor, "batch time"] | None = None
    clipped_high: Bool[Tensor, "batch time"] | None = None


@dataclass(frozen=True)
class Loss:
    """What distinguishes one loss from another.

    Attributes:
        term: gives the policy term of each token, [batch, time], or its reduced value as a scalar.
        reduction: from one value per token to the minibatch's loss; a KL is reduced the same way.
        importance_levels: that the loss is defined for; the first is the default.
        clips: whether the ratio is clipped, so that `delta` has a meaning.
        uses_mismatch_weights: the term contains the mismatch weights; otherwise it is multiplied by them.
    """

    term: Callable[[TermInputs, "LossSettings"], PolicyTerm | Tensor]
    reduction: Reduction = mean_of_row_means
    importance_levels: tuple[ImportanceLevel, ...] = ("token", "sequence")
    clips: bool = False
    uses_mismatch_weights: bool = False


@dataclass(frozen=True)
class LossSettings:
    """Select the loss and its coefficients; coefficients of other losses have no effect.

    Attributes:
        loss: a name in grpo_core.losses.policy_loss.LOSSES, or a user's function as `package.module:function`.
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
        kl_importance_correction: multiply the KL by the importance ratio, gradient included, and by the mismatch
            weights.
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


def clipped(inputs: TermInputs, settings: LossSettings) -> PolicyTerm:
    """Return -min(min(r, delta) A, clip(r, 1 - clip_range, 1 + clip_range_high) A).

    Shao et al., 2024, GRPO (arXiv:2402.03300), equation 3; the higher upper bound is DAPO's (arXiv:2503.14476,
    equation 10), delta that of INTELLECT-2 (arXiv:2505.07291): it bounds the loss where A < 0, where nothing else
    bounds the ratio. The bounds are active at r < 1 - clip_range with A < 0 and at r > 1 + clip_range_high with A > 0.
    """
    ratio, advantage = inputs.ratio, inputs.advantages.unsqueeze(-1)
    low, high = 1.0 - settings.clip_range, 1.0 + settings.upper_clip_range
    unclipped = ratio if settings.delta is None else ratio.clamp(max=settings.delta)
    values = -torch.minimum(unclipped * advantage, ratio.clamp(low, high) * advantage)
    return PolicyTerm(
        values,
        clipped_low=(ratio < low) & (advantage < 0),
        clipped_high=(ratio > high) & (advantage > 0),
    )


def cispo(inputs: TermInputs, settings: LossSettings) -> PolicyTerm:
    """Return -stopgrad(min(r, ratio_cap)) A logprob: the weight is capped and no token loses its gradient.

    MiniMax, 2025, MiniMax-M1 (arXiv:2506.13585), equations 4 and 5, without a lower bound. The upper bound counts as
    active at r > ratio_cap with A > 0: it holds back a token that is to become likelier.
    """
    ratio, advantage = inputs.ratio.detach(), inputs.advantages.unsqueeze(-1)
    values = -ratio.clamp(max=settings.ratio_cap) * advantage * inputs.logprobs
    return PolicyTerm(values, clipped_high=(ratio > settings.ratio_cap) & (advantage > 0))


def sapo(inputs: TermInputs, settings: LossSettings) -> PolicyTerm:
    """Return -A sigmoid(tau (r - 1)) 4 / tau: a smooth gate whose slope at r = 1 is that of r itself.

    Soft Adaptive Policy Optimization, 2025 (arXiv:2511.20347). tau is sapo_temperature_pos where A > 0 and
    sapo_temperature_neg elsewhere; a larger one pushes unlikely tokens down less far.
    """
    ratio, advantage = inputs.ratio, inputs.advantages.unsqueeze(-1)
    positive, negative = settings.sapo_temperature_pos, settings.sapo_temperature_neg
    temperature = torch.where(advantage > 0, positive, negative).to(ratio.dtype)
    values = -torch.sigmoid(temperature * (ratio - 1.0)) * 4.0 / temperature * advantage
    return PolicyTerm(values)


def vespo(inputs: TermInputs, settings: LossSettings) -> PolicyTerm:
    """Return -phi A logprob with the constant weight phi of each row from :func:`vespo_weights`."""
    weights = vespo_weights(inputs, settings)
    return PolicyTerm(-(weights * inputs.advantages).unsqueeze(-1) * inputs.logprobs)


@torch.no_grad()
def vespo_weights(inputs: TermInputs, settings: LossSettings) -> Float[Tensor, " batch"]:
    """Return phi(w) = w^k exp(lambda (1 - w)) of each row, w the product of its token ratios; phi(1) = 1.

    VESPO, 2026 (arXiv:2602.10693). k and lambda are those of the advantage's sign, 0 counted as positive. Mismatch
    weights multiply w. Each token's log-ratio is clamped to +-20 nats, and log w to [log 1e-8, 20].
    """
    log_w = inputs.log_ratio.clamp(-VESPO_HIGHEST, VESPO_HIGHEST).sum(-1)
    if inputs.mismatch_weights is not None:
        log_w = log_w + inputs.mismatch_weights.log().clamp(VESPO_LOWEST, VESPO_HIGHEST).sum(-1)
    log_w = log_w.clamp(VESPO_LOWEST, VESPO_HIGHEST)
    positive = inputs.advantages >= 0
    k = torch.where(positive, settings.vespo_k_pos, settings.vespo_k_neg).to(log_w.dtype)
    decay = torch.where(positive, settings.vespo_lambda_pos, settings.vespo_lambda_neg).to(log_w.dtype)
    return (decay + k * log_w - decay * log_w.exp()).exp()


LOSSES: Mapping[str, Loss] = MappingProxyType(
    {
        "grpo": Loss(clipped, clips=True),
        "bnpo": Loss(clipped, mean_of_tokens, clips=True),
        "dr_grpo": Loss(clipped, constant_length_mean, clips=True),
        "dapo": Loss(clipped, mean_of_expected_tokens, clips=True),
        "gspo": Loss(clipped, importance_levels=("sequence",), clips=True),
        "luspo": Loss(clipped, mean_of_row_sums, ("sequence",), clips=True),
        "cispo": Loss(cispo, mean_of_expected_tokens, ("token",)),
        "sapo": Loss(sapo),
        "vespo": Loss(vespo, mean_of_expected_tokens, ("token",), uses_mismatch_weights=True),
    }
)
"""By the name in `update.loss`."""


def find_loss(name: str) -> Loss:
    """Return a loss of LOSSES, or a user's function as a loss.

    Args:
        name: a key of LOSSES, or `package.module:function` or `path/to/file.py:function`. The function takes
            (TermInputs, LossSettings) and returns the policy term of each token, [batch, time], which is masked,
            multiplied by the mismatch weights and averaged as in grpo; or a scalar, which is used unchanged as the
            microbatch's share of the minibatch's policy loss.

    Raises:
        InputError: there is no such loss or function, or its module cannot be imported.
    """
    if name in LOSSES:
        return LOSSES[name]
    return Loss(cast(Any, _load_custom(name).call))


def custom_loss_digest(name: str) -> str | None:
    """Return the sha256 of a custom loss's source file; None for a loss of LOSSES."""
    return None if name in LOSSES else _load_custom(name).sha256


def _load_custom(name: str) -> UserFunction:
    if not REFERENCE.fullmatch(name):
        close = difflib.get_close_matches(name, LOSSES, n=1)
        suggestion = f"Did you mean {close[0]}? " if close else ""
        hint = f"{suggestion}Choose one of {', '.join(LOSSES)}, or name your own function as package.module:function."
        raise InputError("update.loss", name, hint)
    return load_function("update.loss", name)
