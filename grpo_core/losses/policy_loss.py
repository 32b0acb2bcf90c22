"""The loss of one microbatch: policy term, masks, weights, KL, reduction and entropy bonus, in this order."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_core.losses.kl import estimate_kl
from grpo_core.losses.masks import on_policy_rows
from grpo_core.losses.mismatch import MismatchWeights, mismatch_weights
from grpo_core.losses.ratios import importance_ratio, token_log_ratio
from grpo_core.losses.reductions import Denominators, masked_sum, reduce_tokens
from grpo_core.losses.settings import LossSettings
from grpo_core.losses.surrogates import (
    cispo_flags,
    cispo_surrogate,
    clip_flags,
    clipped_surrogate,
    sapo_surrogate,
    vespo_surrogate,
    vespo_weights,
)


@dataclass(frozen=True)
class LossInputs:
    """What a microbatch's loss is made of; what stands where the loss mask is False is never seen.

    Attributes:
        logprobs: under the policy that is being trained, with gradient.
        old_logprobs: under the policy before the update; a constant, as are all that follow but the entropy.
        advantages: one a row.
        loss_mask: True for a trained token; overlong rows already taken out.
        rollout_logprobs: as recorded while sampling; None where the sampler is the policy before the update.
        ref_logprobs: under the reference; None without one.
        entropy: of the distribution of each token, nats, with gradient; None where the bonus is off.
        entropy_mask: the tokens that have a policy term and an entropy bonus; None: all trained ones.
    """

    logprobs: Float[Tensor, "batch time"]
    old_logprobs: Float[Tensor, "batch time"]
    advantages: Float[Tensor, " batch"]
    loss_mask: Bool[Tensor, "batch time"]
    rollout_logprobs: Float[Tensor, "batch time"] | None = None
    ref_logprobs: Float[Tensor, "batch time"] | None = None
    entropy: Float[Tensor, "batch time"] | None = None
    entropy_mask: Bool[Tensor, "batch time"] | None = None


@dataclass(frozen=True)
class TokenLoss:
    """Per-token terms of the loss before any reduction: constants, zero (False) where masked.

    Attributes:
        surrogate: policy term, after masks and mismatch weights.
        kl: estimate of KL(policy || reference) as it stands in the loss, before kl_coef; all zero without a reference.
        importance_ratio: exp(logprobs - old_logprobs), or its row's at sequence level.
        clipped_low: the lower bound is active: r < 1 - clip_range and A < 0. Never for cispo, sapo and vespo.
        clipped_high: the upper bound is active: r > 1 + clip_range_high and A > 0; r > ratio_cap and A > 0 for
            cispo. Never for sapo and vespo.
        active: tokens that have a policy term: neither entropy nor drift has taken them out.
        mismatch: weights for the sampler, with the ratios behind them; None where no correction is set.
    """

    surrogate: Float[Tensor, "batch time"]
    kl: Float[Tensor, "batch time"]
    importance_ratio: Float[Tensor, "batch time"]
    clipped_low: Bool[Tensor, "batch time"]
    clipped_high: Bool[Tensor, "batch time"]
    active: Bool[Tensor, "batch time"]
    mismatch: MismatchWeights | None = None


def compute_policy_loss(
    inputs: LossInputs, settings: LossSettings, denominators: Denominators
) -> tuple[Float[Tensor, ""], TokenLoss]:
    """The microbatch's share of the minibatch's loss.

    reduce(policy term + kl_coef KL) - entropy_coef * (mean entropy). With the counts of the whole minibatch, the
    values and gradients of its microbatches add up to the minibatch's.

    Args:
        inputs: one microbatch.
        settings: which loss, and its numbers.
        denominators: counts of the whole minibatch and rollout set.

    Raises:
        ValueError: a term is switched on and what it is computed from is missing.
    """
    _require_inputs(inputs, settings)
    mask = inputs.loss_mask
    logprobs = torch.where(mask, inputs.logprobs, 0.0)
    log_ratio = token_log_ratio(inputs.logprobs, inputs.old_logprobs, mask)
    ratio = importance_ratio(log_ratio, mask, settings.importance_level)
    mismatch = _mismatch(inputs, settings)
    active = _active_tokens(inputs, settings)
    surrogate = _policy_term(settings, logprobs, log_ratio, ratio, inputs.advantages.detach(), mismatch)
    surrogate = torch.where(active, surrogate, 0.0)
    kl = _kl(inputs, settings, ratio)
    low, high = _clip_flags(settings, ratio.detach(), inputs.advantages)
    loss = reduce_tokens(surrogate + settings.kl_coef * kl, mask, settings.loss, denominators)
    if settings.entropy_coef > 0:
        loss = loss - settings.entropy_coef * _mean_entropy(inputs, denominators)
    terms = TokenLoss(
        surrogate=surrogate.detach(),
        kl=kl.detach(),
        importance_ratio=torch.where(mask, ratio, 0.0).detach(),
        clipped_low=low & mask,
        clipped_high=high & mask,
        active=active,
        mismatch=mismatch,
    )
    return loss, terms


def _require_inputs(inputs: LossInputs, settings: LossSettings) -> None:
    for switch, value, field in (
        (settings.kl_coef > 0, inputs.ref_logprobs, "ref_logprobs"),
        (settings.mismatch is not None, inputs.rollout_logprobs, "rollout_logprobs"),
        (settings.entropy_coef > 0, inputs.entropy, "entropy"),
    ):
        if switch and value is None:
            raise ValueError(f"the loss needs {field} and there are none: give them, or switch off {_NEEDED_BY[field]}")


_NEEDED_BY = {"ref_logprobs": "kl_coef", "rollout_logprobs": "mismatch", "entropy": "entropy_coef"}


def _policy_term(
    settings: LossSettings,
    logprobs: Float[Tensor, "batch time"],
    log_ratio: Float[Tensor, "batch time"],
    ratio: Float[Tensor, "batch time"],
    advantages: Float[Tensor, " batch"],
    mismatch: MismatchWeights | None,
) -> Float[Tensor, "batch time"]:
    """The surrogate of the loss's family, mismatch weights included."""
    weights = None if mismatch is None else mismatch.weights
    if settings.loss == "vespo":
        rows = vespo_weights(
            log_ratio,
            weights,
            advantages,
            k_pos=settings.vespo_k_pos,
            lambda_pos=settings.vespo_lambda_pos,
            k_neg=settings.vespo_k_neg,
            lambda_neg=settings.vespo_lambda_neg,
        )
        return vespo_surrogate(logprobs, rows, advantages)
    if settings.loss == "cispo":
        term = cispo_surrogate(logprobs, ratio, advantages, ratio_cap=settings.ratio_cap)
    elif settings.loss == "sapo":
        positive, negative = settings.sapo_temperature_pos, settings.sapo_temperature_neg
        term = sapo_surrogate(ratio, advantages, temperature_pos=positive, temperature_neg=negative)
    else:
        term = clipped_surrogate(
            ratio,
            advantages,
            clip_range=settings.clip_range,
            clip_range_high=settings.clip_range_high,
            delta=settings.delta,
        )
    return term if weights is None else term * weights


def _clip_flags(
    settings: LossSettings, ratio: Float[Tensor, "batch time"], advantages: Float[Tensor, " batch"]
) -> tuple[Bool[Tensor, "batch time"], Bool[Tensor, "batch time"]]:
    nowhere = torch.zeros_like(ratio, dtype=torch.bool)
    if settings.loss == "cispo":
        return nowhere, cispo_flags(ratio, advantages, ratio_cap=settings.ratio_cap)
    if settings.loss in ("sapo", "vespo"):
        return nowhere, nowhere
    low, high = settings.clip_range, settings.clip_range_high
    return clip_flags(ratio, advantages, clip_range=low, clip_range_high=high)


def _mismatch(inputs: LossInputs, settings: LossSettings) -> MismatchWeights | None:
    if settings.mismatch is None or inputs.rollout_logprobs is None:
        return None
    return mismatch_weights(inputs.old_logprobs, inputs.rollout_logprobs, inputs.loss_mask, settings.mismatch)


def _active_tokens(inputs: LossInputs, settings: LossSettings) -> Bool[Tensor, "batch time"]:
    """The trained tokens that the entropy mask and the off-policy mask leave a policy term."""
    active = _entropy_tokens(inputs)
    if settings.off_policy_threshold is None:
        return active
    # What was recorded while sampling shows both the drift of the updates and that of the sampler.
    sampling = inputs.old_logprobs if inputs.rollout_logprobs is None else inputs.rollout_logprobs
    threshold = settings.off_policy_threshold
    rows = on_policy_rows(inputs.logprobs, sampling, inputs.advantages, inputs.loss_mask, threshold=threshold)
    return active & rows.unsqueeze(-1)


def _kl(inputs: LossInputs, settings: LossSettings, ratio: Float[Tensor, "batch time"]) -> Float[Tensor, "batch time"]:
    if inputs.ref_logprobs is None:
        return torch.zeros_like(ratio)
    corrected = ratio if settings.kl_importance_correction else None
    return estimate_kl(
        inputs.logprobs, inputs.ref_logprobs, inputs.loss_mask, settings.kl_estimator, importance_ratio=corrected
    )


def _entropy_tokens(inputs: LossInputs) -> Bool[Tensor, "batch time"]:
    return inputs.loss_mask if inputs.entropy_mask is None else inputs.loss_mask & inputs.entropy_mask


def _mean_entropy(inputs: LossInputs, denominators: Denominators) -> Float[Tensor, ""]:
    """A microbatch's share of the mean over the minibatch's tokens; no loss's own reduction touches it."""
    assert inputs.entropy is not None, "required with the coefficient"
    return masked_sum(inputs.entropy, _entropy_tokens(inputs)) / max(denominators.entropy_tokens, 1)
