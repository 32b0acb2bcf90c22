"""Losses over the Gaussians of denoising steps: against a hand-made Gaussian, and by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_core.losses.microbatch_loss import LossInputs, compute_microbatch_loss
from grpo_core.losses.reductions import Denominators
from grpo_core.losses.settings import LossSettings
from grpo_core.rollouts.records import StepGaussians
from tests.grpo_core.losses.oracles import select

ROWS, STEPS, VALUES = 4, 3, 4096
STD = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
DT = torch.tensor([0.2, 0.15, 0.1], dtype=torch.float64)


class Moved:
    """Latents drawn around 0 whose mean has moved by `shift` since: log-probs, drift and noise of every step."""

    def __init__(self, scale: float = 0.05, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (ROWS, STEPS, VALUES)
        self.noise = torch.randn(*shape, generator=generator, dtype=torch.float64)
        self.shift = (scale * torch.randn(*shape, generator=generator, dtype=torch.float64)).requires_grad_()
        self.advantages = torch.tensor([1.0, -1.0, 0.5, -2.0], dtype=torch.float64)

    def inputs(self) -> LossInputs:
        std = STD[:, None]
        latents = std * self.noise
        old = -(latents.square() / (2 * std.square())).mean(-1)
        new = -((latents - self.shift).square() / (2 * std.square())).mean(-1)
        drift = (self.shift.square() / (2 * std.square())).mean(-1)
        shape = (ROWS, STEPS)
        return LossInputs(
            logprobs=new,
            old_logprobs=old,
            advantages=self.advantages,
            loss_mask=torch.ones(shape, dtype=torch.bool),
            gaussians=StepGaussians(drift, STD.expand(shape), DT.expand(shape)),
        )


def loss_of(inputs: LossInputs, **settings: Any) -> tuple[Tensor, Any]:
    return compute_microbatch_loss(inputs, LossSettings(**settings))


# GRPO-Guard


def test_the_guarded_ratio_is_the_noise_times_the_shift() -> None:
    """log-ratio + KL = noise shift / std, so r = exp(mean noise shift): no std in it, and no bias."""
    moved = Moved()
    centred = (moved.noise * moved.shift).mean(-1)
    ratio = centred.exp()
    low, high = 1 - 1e-3, 1 + 1e-3
    advantages = moved.advantages[:, None]
    terms = -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages) / DT
    found, details = loss_of(moved.inputs(), loss="grpo_guard", clip_range=1e-3)
    torch.testing.assert_close(found, terms.mean(), rtol=1e-9, atol=0)
    assert torch.equal(details.clipped_high, (ratio > high) & (advantages > 0))
    assert torch.equal(details.clipped_low, (ratio < low) & (advantages < 0))
    assert 0 < int(details.clipped_high.sum() + details.clipped_low.sum()) < ROWS * STEPS
    (gradient,) = torch.autograd.grad(found, moved.shift, retain_graph=True)
    (expected,) = torch.autograd.grad(terms.mean(), moved.shift)
    torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-15)


# Flow-DPPO


def test_a_step_that_has_moved_far_may_only_move_back() -> None:
    inputs = Moved().inputs()
    assert inputs.gaussians is not None
    drift = torch.tensor([[0.9e-5, 1.1e-5, 1.1e-5], [1.1e-5, 1.1e-5, 0.0]], dtype=torch.float64)
    log_ratio = torch.tensor([[0.1, 0.1, -0.1], [0.1, -0.1, -0.1]], dtype=torch.float64)
    old = torch.full((2, 3), -1.0, dtype=torch.float64)
    two = LossInputs(
        logprobs=(old + log_ratio).requires_grad_(),
        old_logprobs=old,
        advantages=torch.tensor([2.0, -1.0], dtype=torch.float64),
        loss_mask=torch.ones(2, 3, dtype=torch.bool),
        gaussians=StepGaussians(drift, torch.ones_like(drift), torch.ones_like(drift)),
    )
    found, details = loss_of(two, loss="flow_dppo")
    up, down = math.exp(0.1), math.exp(-0.1)
    # Row 1: close, moving on; far, moving on; far, moving back. Row 2 (to become unlikelier): back; on; close.
    values = torch.tensor([[-2 * up, 0.0, -2 * down], [up, 0.0, down]], dtype=torch.float64)
    torch.testing.assert_close(details.surrogate, values, rtol=1e-12, atol=0)
    torch.testing.assert_close(found, values.mean(), rtol=1e-12, atol=0)
    assert details.clipped_high.tolist() == [[False, True, False], [False] * 3]
    assert details.clipped_low.tolist() == [[False] * 3, [False, True, False]]


@pytest.mark.parametrize("loss", ["grpo_guard", "flow_dppo"])
def test_tokens_have_no_gaussians(loss: str) -> None:
    with pytest.raises(ValueError, match="denoising steps"):
        loss_of(replace(Moved().inputs(), gaussians=None), loss=loss)


@pytest.mark.parametrize("loss", ["grpo_guard", "flow_dppo"])
def test_microbatches_add_up_to_the_minibatch(loss: str) -> None:
    inputs = Moved().inputs()
    settings = LossSettings(loss=loss, loss_settings={"dppo_threshold": 1e-3} if loss == "flow_dppo" else {})
    counts = Denominators.of(inputs.loss_mask)
    parts = [compute_microbatch_loss(select(inputs, [row]), settings, counts)[0] for row in range(ROWS)]
    torch.testing.assert_close(sum(parts), compute_microbatch_loss(inputs, settings)[0], rtol=1e-12, atol=0)


# The exact KL


def test_the_exact_kl_enters_the_loss_as_it_is() -> None:
    moved = Moved()
    inputs = moved.inputs()
    assert inputs.gaussians is not None
    kl = 3.0 * inputs.gaussians.drift
    plain, _ = loss_of(inputs)
    found, details = loss_of(replace(inputs, kl=kl), kl_coef=0.25, kl_estimator="exact")
    torch.testing.assert_close(found - plain, 0.25 * kl.mean(), rtol=1e-9, atol=0)
    assert torch.equal(details.kl, kl.detach())
    (gradient,) = torch.autograd.grad(found - plain, moved.shift)
    # KL = 3 mean(shift^2) / (2 std^2), averaged over steps and rows.
    expected = 0.25 * 3 * moved.shift.detach() / STD[:, None].square() / VALUES / (ROWS * STEPS)
    torch.testing.assert_close(gradient, expected, rtol=1e-7, atol=1e-16)


def test_the_exact_kl_has_to_be_given() -> None:
    with pytest.raises(ValueError, match="kl"):
        loss_of(Moved().inputs(), kl_coef=0.1, kl_estimator="exact")
