"""Values on the scale on which they are added or multiplied."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from grpo_core.rewards.mix.terms import RewardTerm


def scaled_values(
    values: Float[Tensor, "*samples rewards"], terms: Sequence[RewardTerm]
) -> Float[Tensor, "*samples rewards"]:
    """Clamp, then the fixed range; of a gate the factor, at least 0. NaN stays NaN."""
    assert values.shape[-1] == len(terms), f"one term a reward, got {len(terms)} for {values.shape[-1]}"
    return torch.stack([_scaled(values[..., index], term) for index, term in enumerate(terms)], -1)


def _scaled(values: Float[Tensor, "*samples"], term: RewardTerm) -> Float[Tensor, "*samples"]:
    if term.threshold is not None:
        # Scores are computed in fp32, where .7 may lie below .7 of fp64.
        passed = values.float() >= torch.tensor(term.threshold, dtype=torch.float32, device=values.device)
        return torch.where(values.isnan(), torch.nan, passed.to(values.dtype))
    if term.clamp is not None:
        values = values.clamp(*term.clamp)
    if term.range is not None:
        low, high = term.range
        values = (values - low) / (high - low)
    return values.clamp(min=0.0) if term.role == "gate" else values
