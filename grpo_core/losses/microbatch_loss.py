"""The loss of one microbatch: policy term, masks, weights, KL, reduction and entropy bonus, in this order."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_core.losses.policy_loss import PolicyTerm, TermInputs, find_loss
from grpo_core.losses.ratios import (
    estimate_kl,
    importance_ratio,
    is_clamped,
    log_ratio_at,
    mismatch_weights,
    token_log_ratio,
)
from grpo_core.losses.reductions import Denominators, masked_sum, on_policy_rows
from grpo_core.losses.settings import LossSettings
from grpo_core.rollouts.records import StepGaussians


@dataclass(frozen=True)
class LossInputs:
    """The tensors of a microbatch; values where the loss mask is False are never read.

    Attributes:
        logprobs: under the policy that is being trained, with gradient.
        old_logprobs: under the policy before the update; a constant, like all that follow but the entropy.
        loss_mask: True for a trained token; masked overlong rows are already False.
        rollout_logprobs: as recorded while sampling; None where the sampler is the policy before the update.
        ref_logprobs: under the reference; None without one.
        entropy: of the distribution of each token, nats, with gradient; None where the bonus is off.
        entropy_mask: the tokens that have a policy term and an entropy bonus; None: all trained ones.
        kl: exact KL(policy || reference) of each denoising step, nats, with gradient; None where it is estimated.
        gaussians: of denoising steps; None for tokens.
    """

    logprobs: Float[Tensor, "batch time"]
    old_logprobs: Float[Tensor, "batch time"]
    advantages: Float[Tensor, " batch"]
    loss_mask: Bool[Tensor, "batch time"]
    rollout_logprobs: Float[Tensor, "batch time"] | None = None
    ref_logprobs: Float[Tensor, "batch time"] | None = None
    entropy: Float[Tensor, "batch time"] | None = None
    entropy_mask: Bool[Tensor, "batch time"] | None = None
    kl: Float[Tensor, "batch time"] | None = None
    gaussians: StepGaussians | None = None


@dataclass(frozen=True)
class TokenLoss:
    """The terms of the loss per token before any reduction: constants, zero (False) where masked.

    Attributes:
        policy_loss: the microbatch's share of the minibatch's loss without KL and entropy bonus, a scalar.
        surrogate: policy term, after masks and mismatch weights; of a loss that gives a scalar, all zero.
        kl: estimate of KL(policy || reference) as it enters the loss, with its weights and before kl_coef.
        importance_ratio: exp(logprobs - old_logprobs), or its row's at sequence level.
        log_ratio_clamped: the ratio's exponent is clamped to +-grpo_core.losses.ratios.MAX_LOG_RATIO.
        clipped_low: the lower bound is active; clipped_high: the upper one. Never for losses without them.
        active: tokens that have a policy term: neither the entropy mask nor the off-policy mask removes them.
        mismatch_weights: correction for the sampler, 1 where masked; None where none is configured.
    """

    policy_loss: Float[Tensor, ""]
    surrogate: Float[Tensor, "batch time"]
    kl: Float[Tensor, "batch time"]
    importance_ratio: Float[Tensor, "batch time"]
    log_ratio_clamped: Bool[Tensor, "batch time"]
    clipped_low: Bool[Tensor, "batch time"]
    clipped_high: Bool[Tensor, "batch time"]
    active: Bool[Tensor, "batch time"]
    mismatch_weights: Float[Tensor, "batch time"] | None = None


def compute_microbatch_loss(
    inputs: LossInputs, settings: LossSettings | None = None, denominators: Denominators | None = None
) -> tuple[Float[Tensor, ""], TokenLoss]:
    """Compute a microbatch's share of the minibatch's loss; ValueError if an input of a term is missing.

    reduce(policy term + kl_coef KL) - entropy_coef * (mean entropy). With the denominators of the whole minibatch, the
    values and gradients of its microbatches add up to the minibatch's; without, these rows are all. The settings are by
    default grpo's, clipped at 0.2, without KL and entropy bonus.
    """
    settings = LossSettings() if settings is None else settings
    denominators = Denominators.of(inputs.loss_mask, inputs.entropy_mask) if denominators is None else denominators
    _require_inputs(inputs, settings)
    mask, (policy_term, reduce) = inputs.loss_mask, find_loss(settings.loss)
    terms = _term_inputs(inputs, settings, denominators)
    found = policy_term(terms, settings)
    term = found if isinstance(found, PolicyTerm) else PolicyTerm(found)
    active = _active_tokens(inputs, settings)
    surrogate, policy_loss = torch.zeros_like(terms.ratio), term.values
    kl = _kl(inputs, settings, terms)
    if term.values.ndim:
        weights = None if settings.traits.uses_mismatch_weights else terms.mismatch_weights
        surrogate = torch.where(active, term.values if weights is None else term.values * weights, 0.0)
        policy_loss = reduce(surrogate.detach(), mask, denominators)
        loss = reduce(surrogate + settings.kl_coef * kl, mask, denominators)
    else:
        loss = policy_loss + settings.kl_coef * reduce(kl, mask, denominators)
    if settings.entropy_coef > 0:
        loss = loss - settings.entropy_coef * _mean_entropy(inputs, denominators)
    nowhere = torch.zeros_like(mask)
    details = TokenLoss(
        policy_loss=policy_loss.detach(),
        surrogate=surrogate.detach(),
        kl=kl.detach(),
        importance_ratio=torch.where(mask, terms.ratio, 0.0).detach(),
        log_ratio_clamped=mask & is_clamped(log_ratio_at(terms.log_ratio, mask, settings.level)),
        clipped_low=nowhere if term.clipped_low is None else term.clipped_low & mask,
        clipped_high=nowhere if term.clipped_high is None else term.clipped_high & mask,
        active=active,
        mismatch_weights=terms.mismatch_weights,
    )
    return loss, details


def _require_inputs(inputs: LossInputs, settings: LossSettings) -> None:
    for name, switched_on, switch in (
        ("kl" if settings.kl_estimator == "exact" else "ref_logprobs", settings.kl_coef > 0, "kl_coef"),
        ("rollout_logprobs", settings.mismatch.mode != "none", "mismatch"),
        ("entropy", settings.entropy_coef > 0, "entropy_coef"),
    ):
        if switched_on and getattr(inputs, name) is None:
            raise ValueError(f"the loss needs {name}, which is None: give it, or switch off {switch}")


def _term_inputs(inputs: LossInputs, settings: LossSettings, denominators: Denominators) -> TermInputs:
    mask = inputs.loss_mask
    log_ratio = token_log_ratio(inputs.logprobs, inputs.old_logprobs, mask)
    weights = None
    if settings.mismatch.mode != "none" and inputs.rollout_logprobs is not None:
        weights = mismatch_weights(inputs.old_logprobs, inputs.rollout_logprobs, mask, settings.mismatch)
    return TermInputs(
        logprobs=torch.where(mask, inputs.logprobs, 0.0),
        log_ratio=log_ratio,
        ratio=importance_ratio(log_ratio_at(log_ratio, mask, settings.level)),
        advantages=inputs.advantages.detach(),
        loss_mask=mask,
        mismatch_weights=weights,
        denominators=denominators,
        gaussians=inputs.gaussians,
    )


def _active_tokens(inputs: LossInputs, settings: LossSettings) -> Bool[Tensor, "batch time"]:
    """Return the trained tokens to which the entropy mask and the off-policy mask leave a policy term."""
    active = _entropy_tokens(inputs)
    if settings.off_policy_threshold is None:
        return active
    # The log-probs recorded while sampling show both the drift of the updates and that of the sampler.
    sampling = inputs.old_logprobs if inputs.rollout_logprobs is None else inputs.rollout_logprobs
    threshold = settings.off_policy_threshold
    rows = on_policy_rows(inputs.logprobs, sampling, inputs.advantages, inputs.loss_mask, threshold=threshold)
    return active & rows.unsqueeze(-1)


def _kl(inputs: LossInputs, settings: LossSettings, terms: TermInputs) -> Float[Tensor, "batch time"]:
    if settings.kl_estimator == "exact":
        return torch.zeros_like(terms.ratio) if inputs.kl is None else torch.where(inputs.loss_mask, inputs.kl, 0.0)
    if inputs.ref_logprobs is None:
        return torch.zeros_like(terms.ratio)
    # The ratio leads from the weights before the update, the mismatch weights from the sampler to those.
    ratio = terms.ratio if terms.mismatch_weights is None else terms.ratio * terms.mismatch_weights
    corrected = ratio if settings.kl_importance_correction else None
    return estimate_kl(
        inputs.logprobs, inputs.ref_logprobs, inputs.loss_mask, settings.kl_estimator, importance_ratio=corrected
    )


def _entropy_tokens(inputs: LossInputs) -> Bool[Tensor, "batch time"]:
    return inputs.loss_mask if inputs.entropy_mask is None else inputs.loss_mask & inputs.entropy_mask


def _mean_entropy(inputs: LossInputs, denominators: Denominators) -> Float[Tensor, ""]:
    """Return a microbatch's share of the mean over the minibatch's tokens, whatever the loss's own reduction."""
    assert inputs.entropy is not None, "required with the coefficient"
    return masked_sum(inputs.entropy, _entropy_tokens(inputs)) / max(denominators.entropy_tokens, 1)


def count_clipped(
    terms: TokenLoss, loss_mask: Bool[Tensor, "batch time"], settings: LossSettings
) -> Float[Tensor, " low_high_counted"]:
    """Count where the lower and where the upper bound is active, out of how many tokens, or rows of one ratio each."""
    flags = (terms.clipped_low, terms.clipped_high, loss_mask)
    if settings.level == "sequence":
        flags = (terms.clipped_low.any(-1), terms.clipped_high.any(-1), torch.ones_like(loss_mask[:, 0]))
    return torch.stack([each.sum() for each in flags]).double()


def clipped_share_of_rows(
    clipped: Bool[Tensor, "batch time"], loss_mask: Bool[Tensor, "batch time"]
) -> Float[Tensor, " batch"]:
    """Return each row's share of clipped tokens; NaN for a row without trained tokens."""
    lengths = loss_mask.sum(-1)
    shares = (clipped & loss_mask).sum(-1) / lengths.clamp(min=1)
    return torch.where(lengths > 0, shares, torch.nan)
