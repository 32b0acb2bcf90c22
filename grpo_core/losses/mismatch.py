"""Correction for a sampler that is not quite the policy: exp(old - rollout), truncated or masked.

The two differ by arithmetic (another engine, dtype or kernel) or because the rollouts are older than the policy.
Truncated: Yao et al., 2025, "Your efficient RL framework secretly brings you off-policy RL training" (TIS).
Masked: IcePop, in "Every step evolves", 2025 (arXiv:2510.18855).
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from jaxtyping import Bool, Float
from pydantic import Field
from torch import Tensor

from grpo_core.errors import InputError
from grpo_core.losses.ratios import ImportanceLevel
from grpo_core.settings import check_fields

MismatchMode = Literal["none", "truncate", "mask"]


@dataclass(frozen=True)
class MismatchSettings:
    """How the mismatch ratio becomes a weight.

    Attributes:
        mode: "none" applies no weight; "truncate" clamps the ratio to [floor, cap]; "mask" sets it to 0 outside.
        level: one ratio per token, or the product of a row's ratios for all of its tokens.
        cap: upper bound, at least 1.
        floor: lower bound, in [0, 1]; 0 is none.
    """

    mode: MismatchMode = "none"
    level: ImportanceLevel = "token"
    cap: Annotated[float, Field(ge=1)] = 3.0
    floor: Annotated[float, Field(ge=0, le=1)] = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "update.mismatch")
        if self.floor >= self.cap:
            hint = "A ratio of 1 is perfect agreement; give a number from 0 to 1, below the cap."
            raise InputError("update.mismatch.floor", self.floor, hint)


@torch.no_grad()
def mismatch_weights(
    old_logprobs: Float[Tensor, "batch time"],
    rollout_logprobs: Float[Tensor, "batch time"],
    loss_mask: Bool[Tensor, "batch time"],
    settings: MismatchSettings,
) -> Float[Tensor, "batch time"]:
    """Return the weights of the policy term, 1 where masked; at sequence level all tokens of a row have the row's.

    Args:
        old_logprobs: recomputed under the policy before the update.
        rollout_logprobs: as recorded while sampling.
        loss_mask: True for a trained token.
        settings: mode ("truncate" or "mask"), level and bounds.
    """
    log_ratio = torch.where(loss_mask, old_logprobs - rollout_logprobs, 0.0)
    if settings.level == "sequence":
        log_ratio = torch.where(loss_mask, log_ratio.sum(-1, keepdim=True), 0.0)
    ratio = log_ratio.exp()
    if settings.mode == "truncate":
        return ratio.clamp(settings.floor, settings.cap)
    return torch.where((ratio < settings.floor) | (ratio > settings.cap), 0.0, ratio)
