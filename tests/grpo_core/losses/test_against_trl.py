"""Each loss, its gradient, weights, masks and clip metrics against TRL's own code."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_core.losses.microbatch_loss import LossInputs, clipped_share_of_rows, count_clipped
from grpo_core.losses.ratios import mismatch_metrics, mismatch_weights
from grpo_core.losses.settings import LOSSES, MismatchSettings
from tests.grpo_core.losses.oracles import (
    TOKEN_LOSSES,
    configured,
    count,
    loss_of,
    random_inputs,
    require_equal,
    select,
    trl_loss,
    trl_sampling_ratio,
    trl_trainer,
    with_entropy_mask,
)

SEEDS = st.integers(0, 2**32 - 1)
CLIPPED = [loss for loss in TOKEN_LOSSES if LOSSES[loss].clips]


def without_empty_rows(inputs: LossInputs) -> LossInputs:
    return select(inputs, inputs.loss_mask.any(-1).nonzero().flatten().tolist())


PLAIN = [(loss, {}) for loss in TOKEN_LOSSES]
SEQUENCE = [(loss, {"importance_level": "sequence"}) for loss in ("bnpo", "dr_grpo", "dapo", "sapo")]
DELTA = [(loss, {"delta": 1.5}) for loss in CLIPPED]
KL = [(loss, {"kl_coef": 0.3, "kl_importance_correction": corrected}) for loss in TOKEN_LOSSES for corrected in (0, 1)]
MISMATCH = [
    (loss, {"mismatch": MismatchSettings(mode, level, 1.3, floor)})
    for loss in TOKEN_LOSSES
    for mode in ("truncate", "mask")
    for level in ("token", "sequence")
    for floor in (0.0, 0.7)
    if (loss, level) != ("vespo", "sequence")
]
OFF_POLICY = [(loss, {"off_policy_threshold": 0.1}) for loss in TOKEN_LOSSES]
BONUS = [(loss, {"entropy_coef": 0.2}) for loss in TOKEN_LOSSES]
EVERYTHING = [
    (
        loss,
        {
            "kl_coef": 0.1,
            "entropy_coef": 0.05,
            "mismatch": MismatchSettings("truncate", "token", 1.5),
            "off_policy_threshold": 0.2,
            **({"delta": 2.0} if loss in CLIPPED else {}),
        },
    )
    for loss in TOKEN_LOSSES
]


@pytest.mark.parametrize(
    ("loss", "options"), [*PLAIN, *SEQUENCE, *DELTA, *KL, *MISMATCH, *OFF_POLICY, *BONUS, *EVERYTHING]
)
def test_loss_and_gradient(loss: str, options: dict[str, Any]) -> None:
    """A row without a token and a group without spread among them."""
    if "kl_importance_correction" in options:
        options = options | {"kl_importance_correction": bool(options["kl_importance_correction"])}
    settings = configured(loss, **options)
    inputs = replace(random_inputs(1, rows=8), entropy_mask=None)
    require_equal(loss_of(inputs, settings), trl_loss(inputs, settings))


@pytest.mark.parametrize("loss", TOKEN_LOSSES)
@hypothesis_settings(max_examples=8)
@given(SEEDS)
def test_loss_and_gradient_of_any_batch(loss: str, seed: int) -> None:
    """With every switch on, the entropy mask included."""
    inputs = with_entropy_mask(random_inputs(seed), 0.4)
    settings = configured(loss, **dict(EVERYTHING)[loss])
    require_equal(loss_of(inputs, settings), trl_loss(inputs, settings, quantile=0.4))


@pytest.mark.parametrize("loss", TOKEN_LOSSES)
def test_in_single_precision(loss: str) -> None:
    inputs = random_inputs(5)
    single = {
        name: value.float() if value is not None and value.is_floating_point() else value
        for name, value in vars(replace(inputs, entropy_mask=None)).items()
    }
    inputs = LossInputs(**single)
    settings = configured(loss, kl_coef=0.1)
    ours, theirs = loss_of(inputs, settings), trl_loss(inputs, settings)
    assert ours.value == pytest.approx(theirs.value, rel=2e-6)
    torch.testing.assert_close(ours.logprobs, theirs.logprobs, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("loss", TOKEN_LOSSES)
def test_first_step(loss: str) -> None:
    """TRL puts the detached log-probs in the old ones' place: the ratio is 1 and has a gradient."""
    inputs = replace(random_inputs(6), entropy_mask=None)
    inputs = replace(inputs, old_logprobs=inputs.logprobs)
    settings = configured(loss, kl_coef=0.1, kl_importance_correction=True)
    require_equal(loss_of(inputs, settings), trl_loss(inputs, settings, first_step=True))


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.8, 1.0])
@hypothesis_settings(max_examples=8)
@given(SEEDS)
def test_entropy_mask(share: float, seed: int) -> None:
    inputs = with_entropy_mask(random_inputs(seed), share)
    trainer = trl_trainer(configured("grpo"), accumulation=1, per_generation=1, quantile=share)
    theirs = trainer.get_high_entropy_mask(inputs.entropy, inputs.loss_mask.long(), 1 - share)
    assert inputs.entropy_mask is not None
    assert torch.equal(inputs.entropy_mask, theirs)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("mode", ["truncate", "mask"])
@given(SEEDS, st.floats(1.0, 4.0), st.floats(0.0, 0.99))
def test_mismatch_weights(level: Any, mode: Any, seed: int, cap: float, floor: float) -> None:
    inputs = random_inputs(seed)
    assert inputs.rollout_logprobs is not None
    settings = MismatchSettings(mode, level, cap, floor)
    trainer = trl_trainer(configured("grpo", mismatch=settings), accumulation=1, per_generation=1, quantile=1.0)
    ratio, mask = trl_sampling_ratio(trainer, inputs), inputs.loss_mask
    ours = mismatch_weights(inputs.old_logprobs, inputs.rollout_logprobs, mask, settings)
    torch.testing.assert_close(ours[mask], ratio.expand_as(mask)[mask], rtol=1e-9, atol=0)
    # TRL logs the ratios after their bound: one per token, or one per row.
    counted = ratio.flatten() if level == "sequence" else ratio[mask]
    logged = {"min": counted.min(), "mean": counted.mean(), "max": counted.max()}
    assert mismatch_metrics(ours, mask, level) == pytest.approx(
        {f"sampling/importance_sampling_ratio/{name}": float(value) for name, value in logged.items()}
    )


@pytest.mark.parametrize("loss", TOKEN_LOSSES)
def test_clip_metrics(loss: str) -> None:
    inputs = replace(without_empty_rows(random_inputs(1, rows=16)), entropy_mask=None)
    settings = configured(loss, kl_coef=0.1, delta=1.5 if loss in CLIPPED else None)
    metrics = trl_loss(inputs, settings).metrics
    terms, mask = loss_of(inputs, settings).terms[0], inputs.loss_mask
    low, high, counted = count_clipped(terms, mask, settings).tolist()
    assert metrics["kl"] == pytest.approx(float(terms.kl.sum() / mask.sum()))
    if loss == "cispo":
        assert high > 0
        assert metrics["cispo_clip_ratio"] == pytest.approx(high / counted)
    elif loss in CLIPPED:
        shares = {
            "low_mean": low / counted,
            "high_mean": high / counted,
            "region_mean": (low + high) / counted,
            "low_min": float(clipped_share_of_rows(terms.clipped_low, mask).min()),
            "high_max": float(clipped_share_of_rows(terms.clipped_high, mask).max()),
        }
        assert {name: metrics[f"clip_ratio/{name}"] for name in shares} == pytest.approx(shares)
    else:
        assert low == high == 0


@pytest.mark.parametrize("loss", ["dapo", "cispo", "vespo"])
@pytest.mark.parametrize("sizes", [(4, 4, 4), (6, 6), (4, 8), (2, 4, 6)])
def test_rollout_set_cut_into_minibatches(loss: str, sizes: tuple[int, ...]) -> None:
    """TRL's normaliser: the generation batch's tokens times an accumulation window's share of its steps."""
    rollouts = replace(random_inputs(7, rows=12), entropy_mask=None)
    settings = configured(loss)
    tokens, start = int(rollouts.loss_mask.sum()), 0
    for size in sizes:
        minibatch = select(rollouts, range(start, start + size))
        split = [range(first, first + 2) for first in range(0, size, 2)]
        theirs = trl_loss(minibatch, settings, split=split, per_generation=6, rollout_tokens=tokens)
        denominators = count(minibatch, rollout_rows=12, rollout_tokens=tokens)
        require_equal(loss_of(minibatch, settings, denominators, split=[range(1), range(1, size)]), theirs)
        start += size


def relative_change(first: Tensor, second: Tensor) -> float:
    return float((first - second).abs().max() / first.abs().max())


HALVES, UNEVEN = [range(3), range(3, 6)], [range(4), range(4, 6)]


@pytest.mark.parametrize(
    ("loss", "split", "options", "change"),
    [
        # The mean of the microbatches' token means: a short microbatch's tokens weigh more.
        ("bnpo", HALVES, {}, 0.02),
        # Each microbatch is divided by its own rows: a last one with fewer rows weighs more a row.
        *((loss, UNEVEN, {}, 0.1) for loss in ("grpo", "dr_grpo", "sapo", "luspo")),
        # The bonus is a mean of the microbatches' token means, whatever the loss's own reduction.
        ("dapo", HALVES, {"entropy_coef": 0.5}, 0.02),
    ],
)
def test_losses_of_trl_depend_on_the_split(
    loss: str, split: list[range], options: dict[str, float], change: float
) -> None:
    inputs = replace(random_inputs(9), entropy_mask=None)
    settings = configured(loss, **options)
    whole, parts = trl_loss(inputs, settings), trl_loss(inputs, settings, split=split)
    quantity = "entropy" if options else "logprobs"
    assert relative_change(getattr(whole, quantity), getattr(parts, quantity)) > change
    require_equal(loss_of(inputs, settings, split=split), whole)


def test_entropy_quantile_of_trl_depends_on_the_split() -> None:
    """TRL takes the quantile of each microbatch, so which tokens train depends on which rows share a forward pass."""
    inputs = with_entropy_mask(random_inputs(11), 0.3)
    settings = configured("dapo")
    split = [range(2), range(2, 4), range(4, 6)]
    whole = trl_loss(inputs, settings, quantile=0.3)
    parts = trl_loss(inputs, settings, quantile=0.3, split=split)
    assert ((whole.logprobs != 0) != (parts.logprobs != 0)).any()
    require_equal(loss_of(inputs, settings, split=split), whole)


def test_cispo_of_trl_reads_its_cap_from_epsilon_high() -> None:
    """With TRL's default of 0.2 there, every ratio above 0.2 is cut to 0.2; `LossSettings` refuses such a cap."""
    inputs = replace(random_inputs(12), entropy_mask=None)
    inputs = replace(inputs, old_logprobs=inputs.logprobs)
    settings = configured("cispo")
    found = trl_loss(inputs, settings, epsilon_high=0.2).logprobs
    torch.testing.assert_close(found, 0.2 * loss_of(inputs, settings).logprobs)


def test_mismatch_weights_leave_out_the_kl_in_trl() -> None:
    """TRL multiplies the KL by the ratio to the old policy and not by that to the sampler."""
    inputs = replace(random_inputs(14), entropy_mask=None)
    settings = configured("dapo", kl_coef=0.3, kl_importance_correction=True, mismatch=MismatchSettings("truncate"))
    no_advantage = replace(inputs, advantages=torch.zeros_like(inputs.advantages))
    theirs = trl_loss(no_advantage, settings)
    require_equal(loss_of(no_advantage, replace(settings, mismatch=MismatchSettings())), theirs)
    assert relative_change(theirs.logprobs, loss_of(no_advantage, settings).logprobs) > 0.1


def test_masked_garbage_reaches_the_loss_in_trl() -> None:
    """TRL multiplies by the mask, so a NaN log-prob at a padded place makes its loss NaN; here it is never seen."""
    inputs = replace(random_inputs(13), entropy_mask=None)
    broken = replace(inputs, old_logprobs=torch.where(inputs.loss_mask, inputs.old_logprobs, torch.nan))
    settings = configured("dapo")
    assert math.isnan(trl_loss(broken, settings).value)
    assert loss_of(broken, settings).value == loss_of(inputs, settings).value
