"""The policy terms of the losses, and how a loss is found by its name.

A new loss is one function here and one entry in LOSSES of :mod:`grpo_core.losses.settings`, or one function in any
module that :func:`find_loss` can import. It takes :class:`TermInputs` and the settings and returns a
:class:`PolicyTerm`; values where the loss mask is False are undefined, because the caller drops them.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_core.losses.ratios import importance_ratio
from grpo_core.losses.reductions import REDUCTIONS, Denominators, Reduction, mean_of_row_means
from grpo_core.losses.settings import LOSSES, LossSettings, load_custom_loss
from grpo_core.rollouts.records import StepGaussians

VESPO_LOWEST, VESPO_HIGHEST = math.log(1e-8), 20.0
"""Bounds of the logarithm of vespo's weight."""


@dataclass(frozen=True)
class TermInputs:
    """The inputs of a loss for one microbatch.

    Attributes:
        logprobs: under the policy that is being trained, nats, with gradient; 0 where masked.
        log_ratio: logprobs - old_logprobs, with gradient; 0 where masked.
        ratio: importance ratio of each token, or of its row, with gradient; its exponent is clamped.
        loss_mask: True for a trained token.
        mismatch_weights: correction for a sampler that is not the policy, 1 where masked; None without one.
        denominators: counts of the minibatch, for a loss that reduces its tokens itself.
        gaussians: of denoising steps; None for tokens.
    """

    logprobs: Float[Tensor, "batch time"]
    log_ratio: Float[Tensor, "batch time"]
    ratio: Float[Tensor, "batch time"]
    advantages: Float[Tensor, " batch"]
    loss_mask: Bool[Tensor, "batch time"]
    mismatch_weights: Float[Tensor, "batch time"] | None
    denominators: Denominators
    gaussians: StepGaussians | None = None


@dataclass(frozen=True)
class PolicyTerm:
    """The policy term of each token, and where its bounds stop the gradient; None where the loss has no such bound.

    `values` are minimised; a scalar is the microbatch's share of the minibatch's policy loss, already reduced.
    """

    values: Float[Tensor, "batch time"] | Float[Tensor, ""]
    clipped_low: Bool[Tensor, "batch time"] | None = None
    clipped_high: Bool[Tensor, "batch time"] | None = None


Term = Callable[[TermInputs, LossSettings], PolicyTerm | Tensor]
"""Gives the policy term of each token, [batch, time], or its reduced value as a scalar."""


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
    cap = settings.own["ratio_cap"]
    values = -ratio.clamp(max=cap) * advantage * inputs.logprobs
    return PolicyTerm(values, clipped_high=(ratio > cap) & (advantage > 0))


def sapo(inputs: TermInputs, settings: LossSettings) -> PolicyTerm:
    """Return -A sigmoid(tau (r - 1)) 4 / tau: a smooth gate whose slope at r = 1 is that of r itself.

    Soft Adaptive Policy Optimization, 2025 (arXiv:2511.20347). tau is sapo_temperature_pos where A > 0 and
    sapo_temperature_neg elsewhere; a larger one pushes unlikely tokens down less far.
    """
    ratio, advantage = inputs.ratio, inputs.advantages.unsqueeze(-1)
    positive, negative = settings.own["sapo_temperature_pos"], settings.own["sapo_temperature_neg"]
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
    positive, own = inputs.advantages >= 0, settings.own
    k = torch.where(positive, own["vespo_k_pos"], own["vespo_k_neg"]).to(log_w.dtype)
    decay = torch.where(positive, own["vespo_lambda_pos"], own["vespo_lambda_neg"]).to(log_w.dtype)
    return (decay + k * log_w - decay * log_w.exp()).exp()


def grpo_guard(inputs: TermInputs, settings: LossSettings) -> PolicyTerm:
    """Return the clipped term over dt, with a ratio whose mean is 1 and whose spread is the same at all steps.

    GRPO-Guard, 2025 (arXiv:2510.22319): r = exp((log-ratio + KL(policy || policy before the update)) std). Where the
    log-prob is a mean over the latents' values, the exponent is the mean of noise times the shift of the mean.
    """
    gaussians = _gaussians(inputs)
    ratio = importance_ratio((inputs.log_ratio + gaussians.drift) * gaussians.std)
    term = clipped(replace(inputs, ratio=ratio), settings)
    return replace(term, values=term.values / gaussians.dt)


def flow_dppo(inputs: TermInputs, settings: LossSettings) -> PolicyTerm:
    """Return -r A without a clip; a step that has moved by dppo_threshold may only move back.

    Flow-DPPO, 2026 (arXiv:2606.11025). Such a step counts as clipped.
    """
    ratio, advantage = inputs.ratio, inputs.advantages.unsqueeze(-1)
    moved = _gaussians(inputs).drift.detach() >= settings.own["dppo_threshold"]
    low, high = moved & (ratio < 1) & (advantage < 0), moved & (ratio > 1) & (advantage > 0)
    return PolicyTerm(torch.where(low | high, 0.0, -ratio * advantage), clipped_low=low, clipped_high=high)


def _gaussians(inputs: TermInputs) -> StepGaussians:
    if inputs.gaussians is None:
        raise ValueError("the loss reads the Gaussians of denoising steps, which tokens do not have")
    return inputs.gaussians


# By name, because settings are checked before torch is imported.
_TERMS: Mapping[str, Term] = {traits.term: globals()[traits.term] for traits in LOSSES.values()}


def find_loss(name: str) -> tuple[Term, Reduction]:
    """Return the policy term of a loss of LOSSES, or a user's function as one, and its reduction; or InputError.

    The function, `package.module:function` or `path/to/file.py:function`, takes (TermInputs, LossSettings) and returns
    the policy term of each token, [batch, time], which is masked, multiplied by the mismatch weights and averaged as in
    grpo; or a scalar, the microbatch's share of the minibatch's policy loss.
    """
    traits = LOSSES.get(name)
    if traits is None:
        return cast(Term, load_custom_loss(name).call), mean_of_row_means
    return _TERMS[traits.term], REDUCTIONS[traits.reduction]
