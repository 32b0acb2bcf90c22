"""Where TRL's numbers depend on what they should not: shown on its own code, beside what ours does."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from grpo_core.losses import LossSettings, MismatchSettings
from tests.grpo_core.losses.batches import loss_of, random_inputs
from tests.grpo_core.losses.trl_oracle import configured, require_equal, trl_loss, with_entropy_mask


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
    """With TRL's default of 0.2 there, every ratio above 0.2 is cut to 0.2; here such a cap is refused."""
    inputs = replace(random_inputs(12), entropy_mask=None)
    inputs = replace(inputs, old_logprobs=inputs.logprobs)
    settings = configured("cispo")
    found = trl_loss(inputs, settings, epsilon_high=0.2).logprobs
    torch.testing.assert_close(found, 0.2 * loss_of(inputs, settings).logprobs)
    with pytest.raises(ValueError, match=r"update\.ratio_cap"):
        LossSettings("cispo", "token", ratio_cap=0.2)


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
