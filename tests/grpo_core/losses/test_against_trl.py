"""Each loss, its gradient, weights, masks and clip metrics against TRL's own code."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from grpo_core.losses.microbatch_loss import LossInputs, clipped_share_of_rows, count_clipped
from grpo_core.losses.ratios import counted_weights, mismatch_metrics, mismatch_weights
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
    assert mismatch_metrics(counted_weights(ours, mask, level)) == pytest.approx(
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
