"""Combinations that mean nothing are refused with the key to change; the others are not."""

import math
from typing import Any

import pytest

from grpo_core.errors import InputError
from grpo_core.losses import LossSettings, MismatchSettings


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ({"loss": "cispo", "importance_level": "sequence"}, "importance_level"),
        ({"loss": "vespo", "importance_level": "sequence"}, "importance_level"),
        ({"loss": "gspo", "importance_level": "token"}, "importance_level"),
        ({"loss": "luspo", "importance_level": "token"}, "importance_level"),
        ({"loss": "gprpo"}, "loss"),
        ({"loss": "no_such_module:loss"}, "loss"),
        ({"loss": "math:pi"}, "loss"),
        ({"loss": "cispo", "delta": 4.0}, "delta"),
        ({"loss": "sapo", "delta": 4.0}, "delta"),
        ({"loss": "vespo", "delta": 4.0}, "delta"),
        ({"delta": 1.2}, "delta"),
        ({"delta": math.nan}, "delta"),
        ({"loss": "cispo", "ratio_cap": 0.28}, "ratio_cap"),
        ({"clip_range": 0.0}, "clip_range"),
        ({"clip_range": 1.0}, "clip_range"),
        ({"clip_range_high": -0.1}, "clip_range_high"),
        ({"clip_range_high": math.nan}, "clip_range_high"),
        ({"sapo_temperature_pos": 0.0}, "sapo_temperature_pos"),
        ({"sapo_temperature_neg": -1.0}, "sapo_temperature_neg"),
        ({"vespo_lambda_neg": 0.0}, "vespo_lambda_neg"),
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
