"""Losses of tokens and of the Gaussians of denoising steps, by hand; combinations that mean nothing are refused."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_core.errors import InputError
from grpo_core.losses.microbatch_loss import LossInputs, compute_microbatch_loss
from grpo_core.losses.policy_loss import VESPO_HIGHEST, VESPO_LOWEST, TermInputs, vespo_weights
from grpo_core.losses.ratios import estimate_kl, mismatch_weights
from grpo_core.losses.reductions import Denominators, entropy_threshold, on_policy_rows
from grpo_core.losses.settings import LossSettings, MismatchSettings, load_custom_loss
from grpo_core.rollouts.records import StepGaussians
from tests.grpo_core.losses.oracles import select


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ({"loss": "cispo", "importance_level": "sequence"}, "importance_level"),
        ({"loss": "vespo", "importance_level": "sequence"}, "importance_level"),
        ({"loss": "gspo", "importance_level": "token"}, "importance_level"),
        ({"loss": "luspo", "importance_level": "token"}, "importance_level"),
        ({"loss": "gprpo"}, "loss"),
        ({"loss": "cispo", "delta": 4.0}, "delta"),
        ({"loss": "sapo", "delta": 4.0}, "delta"),
        ({"loss": "vespo", "delta": 4.0}, "delta"),
        ({"delta": 1.2}, "delta"),
        ({"delta": math.nan}, "delta"),
        ({"loss": "cispo", "loss_settings": {"ratio_cap": 0.28}}, "loss_settings.ratio_cap"),
        ({"clip_range": 0.0}, "clip_range"),
        ({"clip_range": 1.0}, "clip_range"),
        ({"clip_range_high": -0.1}, "clip_range_high"),
        ({"clip_range_high": math.nan}, "clip_range_high"),
        ({"loss": "sapo", "loss_settings": {"sapo_temperature_pos": 0.0}}, "loss_settings.sapo_temperature_pos"),
        ({"loss": "sapo", "loss_settings": {"ratio_cap": 2.0}}, "loss_settings.ratio_cap"),
        ({"loss_settings": {"vespo_lambda_neg": 1.0}}, "loss_settings.vespo_lambda_neg"),
        ({"kl_coef": -0.1}, "kl_coef"),
        ({"kl_coef": math.inf}, "kl_coef"),
        ({"entropy_coef": -0.1}, "entropy_coef"),
        ({"off_policy_threshold": 0.0}, "off_policy_threshold"),
        (
            {"loss": "vespo", "mismatch": MismatchSettings("truncate", "sequence")},
            "mismatch.level",
        ),
    ],
)
def test_refused(settings: dict[str, Any], place: str) -> None:
    with pytest.raises(InputError) as caught:
        LossSettings(**settings)
    assert caught.value.place == f"update.{place}"


@pytest.mark.parametrize("loss", ["gprpo", "no_such_module:loss", "math:pi"])
def test_a_function_that_is_none_is_refused_when_it_is_loaded(loss: str) -> None:
    with pytest.raises(InputError) as caught:
        load_custom_loss(loss)
    assert (caught.value.place, caught.value.value) == ("update.loss", loss)


def test_settings_run_no_code(tmp_path: Path) -> None:
    """They are read from runs that may be anybody's."""
    (tmp_path / "mine.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'trace')!r}).touch()\n")
    LossSettings(loss=f"{tmp_path}/mine.py:loss")
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize(
    "settings",
    [
        {"loss": "grpo", "importance_level": "sequence", "clip_range": 3e-4, "clip_range_high": 4e-4},
        {"loss": "dapo", "importance_level": "token", "delta": 1.21},
        {"loss": "gspo", "importance_level": "sequence", "delta": 2.0, "kl_coef": 0.1, "kl_estimator": "k1"},
        {
            "loss": "cispo",
            "importance_level": "token",
            "loss_settings": {"ratio_cap": 1.0},
            "kl_importance_correction": True,
        },
        # Its ratio is clipped, so that a cap on the unclipped branch has a meaning.
        {"loss": "grpo_guard", "delta": 2.0},
        # A user's function reads what it likes.
        {"loss": "package.module:function", "loss_settings": {"anything": -0.5}},
    ],
)
def test_accepted(settings: dict[str, Any]) -> None:
    LossSettings(**settings)


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_a_product_too_large_for_a_float_is_bounded(mode: Any) -> None:
    far = torch.full((1, 400), 1.0)
    found = mismatch_weights(far, torch.zeros(1, 400), far.bool(), MismatchSettings(mode, "sequence"))
    assert torch.equal(found, torch.full((1, 400), 3.0 if mode == "truncate" else 0.0))


def test_a_log_prob_that_is_not_a_number_stays_one() -> None:
    """A weight made up in its place would hide a damaged record."""
    rollout = torch.tensor([[math.nan, 0.0]])
    found = mismatch_weights(torch.zeros(1, 2), rollout, torch.ones(1, 2).bool(), MismatchSettings("mask"))
    assert found.isnan().tolist() == [[True, False]]


@pytest.mark.parametrize(
    ("cap", "floor", "place"),
    [(0.9, 0.0, "cap"), (math.nan, 0.0, "cap"), (3.0, 1.1, "floor"), (3.0, -0.1, "floor"), (1.0, 1.0, "floor")],
)
def test_bounds_that_exclude_agreement_are_refused(cap: float, floor: float, place: str) -> None:
    with pytest.raises(InputError) as caught:
        MismatchSettings("truncate", "token", cap, floor)
    assert caught.value.place == f"update.mismatch.{place}"


@pytest.mark.parametrize(
    ("weights", "log_ratio", "log_w"),
    [
        # Each weight is bounded by itself: log 1e-8 + log 4 is inside the bounds of log w.
        ([0.0, 4.0], 0.0, VESPO_LOWEST + math.log(4)),
        ([1.0, 1.0], -15.0, VESPO_LOWEST),
        ([1.0, 1.0], 15.0, VESPO_HIGHEST),
    ],
)
def test_log_w_of_vespo_is_bounded(weights: list[float], log_ratio: float, log_w: float) -> None:
    zeros = torch.zeros(1, 2)
    inputs = TermInputs(
        zeros,
        zeros + log_ratio,
        zeros.exp(),
        torch.ones(1),
        zeros.bool().logical_not(),
        torch.tensor([weights]),
        Denominators(1, 2, 2, 1, 2, 2),
    )
    settings = LossSettings("vespo", loss_settings={"vespo_k_pos": 0.1, "vespo_lambda_pos": 1e-8})
    expected = 1e-8 + 0.1 * log_w - 1e-8 * math.exp(log_w)
    assert vespo_weights(inputs, settings).log().item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1, math.nan])
def test_a_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match=str(share)):
        entropy_threshold(torch.ones(3), share)


def test_a_row_without_tokens_has_not_drifted() -> None:
    nothing = torch.zeros(1, 2, dtype=torch.bool)
    rows = on_policy_rows(
        torch.zeros(1, 2), torch.full((1, 2), torch.inf), torch.tensor([-1.0]), nothing, threshold=0.1
    )
    assert rows.tolist() == [True]


LOGITS = torch.tensor([[0.3, -1.0, 0.7, 0.2]], dtype=torch.float64)
REFERENCE = torch.tensor([[0.4, 0.1, 0.25, 0.25]], dtype=torch.float64).log()
ALL = torch.ones(1, 4, dtype=torch.bool)


def gradient(objective: Tensor, logits: Tensor) -> Tensor:
    return torch.autograd.grad(objective, logits)[0]


def policy() -> tuple[Tensor, Tensor]:
    logits = LOGITS.clone().requires_grad_()
    return logits, logits.log_softmax(-1)


def true_kl_gradient(*, reverse: bool) -> Tensor:
    logits, logprobs = policy()
    if reverse:
        return gradient((logprobs.exp() * (logprobs - REFERENCE)).sum(), logits)
    return gradient((REFERENCE.exp() * (REFERENCE - logprobs)).sum(), logits)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_expected_gradient_on_policy(estimator: Any) -> None:
    """k1: none. k2: that of KL(policy || reference). k3: that of KL(reference || policy)."""
    logits, logprobs = policy()
    found = gradient((logprobs.detach().exp() * estimate_kl(logprobs, REFERENCE, ALL, estimator)).sum(), logits)
    expected = {
        "k1": torch.zeros_like(LOGITS),
        "k2": true_kl_gradient(reverse=True),
        "k3": true_kl_gradient(reverse=False),
    }[estimator]
    torch.testing.assert_close(found, expected)


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
