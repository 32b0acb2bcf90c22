"""Combinations that mean nothing are refused with the key to hint; the others are not."""

import math
from typing import Any

import pytest

from grpo_core.errors import InputError
from grpo_core.losses import LossSettings, MismatchSettings


@pytest.mark.parametrize(
    ("settings", "place", "hint"),
    [
        ({"loss": "cispo", "importance_level": "sequence"}, "importance_level", "update.loss to gspo"),
        ({"loss": "vespo", "importance_level": "sequence"}, "importance_level", "token ratios"),
        ({"loss": "gspo", "importance_level": "token"}, "importance_level", "update.loss to grpo"),
        ({"loss": "luspo", "importance_level": "token"}, "importance_level", "sequence"),
        ({"loss": "gprpo"}, "loss", "Did you mean grpo"),
        ({"loss": "no_such_module:loss"}, "loss", "no_such_module"),
        ({"loss": "math:pi"}, "loss", "not a function"),
        ({"loss": "cispo", "delta": 4.0}, "delta", "does not clip"),
        ({"loss": "sapo", "delta": 4.0}, "delta", "does not clip"),
        ({"loss": "vespo", "delta": 4.0}, "delta", "does not clip"),
        ({"delta": 1.2}, "delta", "more than 1 + clip_range_high = 1.2"),
        ({"delta": math.nan}, "delta", "more than"),
        ({"loss": "cispo", "ratio_cap": 0.28}, "ratio_cap", "not its distance from 1"),
        ({"clip_range": 0.0}, "clip_range", "above 0"),
        ({"clip_range": 1.0}, "clip_range", "below 1"),
        ({"clip_range_high": -0.1}, "clip_range_high", "above 0"),
        ({"clip_range_high": math.nan}, "clip_range_high", "above 0"),
        ({"sapo_temperature_pos": 0.0}, "sapo_temperature_pos", "above 0"),
        ({"sapo_temperature_neg": -1.0}, "sapo_temperature_neg", "above 0"),
        ({"vespo_lambda_neg": 0.0}, "vespo_lambda_neg", "above 0"),
        ({"kl_coef": -0.1}, "kl_coef", "0 or above"),
        ({"kl_coef": math.inf}, "kl_coef", "finite"),
        ({"entropy_coef": -0.1}, "entropy_coef", "0 or above"),
        ({"off_policy_threshold": 0.0}, "off_policy_threshold", "above 0"),
        (
            {"loss": "vespo", "mismatch": MismatchSettings("truncate", "sequence")},
            "mismatch.level",
            "set it to token",
        ),
    ],
)
def test_refused(settings: dict[str, Any], place: str, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        LossSettings(**settings)
    assert caught.value.place == f"update.{place}"
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    "settings",
    [
        {"loss": "grpo", "importance_level": "sequence", "clip_range": 3e-4, "clip_range_high": 4e-4},
        {"loss": "dapo", "importance_level": "token", "delta": 1.21},
        {"loss": "gspo", "importance_level": "sequence", "delta": 2.0, "kl_coef": 0.1, "kl_estimator": "k1"},
        {"loss": "cispo", "importance_level": "token", "ratio_cap": 1.0, "kl_importance_correction": True},
        # The cap is cispo's; what another loss would make of it is nothing.
        {"loss": "grpo", "importance_level": "token", "ratio_cap": 0.5},
    ],
)
def test_accepted(settings: dict[str, Any]) -> None:
    LossSettings(**settings)
