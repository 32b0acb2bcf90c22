"""Rewards of siblings -> one advantage a sample.

Shao et al., 2024, DeepSeekMath (arXiv:2402.03300), section 4.1.2, outcome supervision; `AdvantageSettings` names the
sources of the variants.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_core.advantages.moments import Moments, moments_of
from grpo_core.advantages.settings import AdvantageSettings
from grpo_core.errors import NonFiniteError
from grpo_core.rewards.mix.combine import CombinedRewards, combine_rewards


@dataclass(frozen=True)
class GroupAdvantages:
    """Advantages with the statistics that made them, one row a group, one column a sibling.

    Attributes:
        advantages: NaN where the sample is not trained: it has no reward, or its group is dropped.
        rewards: combined, less the KL in the reward, before normalisation; NaN where `present` is False.
        means: mean of `rewards` over the group; NaN for a group without any.
        stds: their Bessel-corrected standard deviation; zero for a constant group.
        constant: the group teaches nothing: its rewards (with normalize_then_sum, their normalised sums) do not differ.
        dropped: constant groups that are left out on request.
        present: whether the sample has a reward at all.
        imputed: rewards that were null and have been filled with the group's mean.
    """

    advantages: Float[Tensor, "groups siblings"]
    rewards: Float[Tensor, "groups siblings"]
    means: Float[Tensor, " groups"]
    stds: Float[Tensor, " groups"]
    constant: Bool[Tensor, " groups"]
    dropped: Bool[Tensor, " groups"]
    present: Bool[Tensor, "groups siblings"]
    imputed: Bool[Tensor, "groups siblings rewards"]


def compute_advantages(
    values: Float[Tensor, "groups siblings rewards"],
    weights: Sequence[float],
    settings: AdvantageSettings,
    *,
    penalties: Float[Tensor, "groups siblings"] | None = None,
    applies: Bool[Tensor, "groups rewards"] | None = None,
) -> GroupAdvantages:
    """Advantage of each sample over its group.

    Args:
        values: NaN marks a null; a group with fewer samples than the others is filled up with NaN rows.
        weights: one a reward, in the order of the last axis.
        settings: baseline, scale, aggregation and the rest.
        penalties: KL to the reference in nats, one a sample (`kl_penalty`); needed when `settings.kl_coef` > 0.
        applies: whether a reward is meant for a group; by default all are.

    Raises:
        ValueError: the weights do not fit (`combine_rewards`), or a KL in the reward without penalties.
        NonFiniteError: a reward is infinite, or the KL of a rewarded sample is not finite; named `group/sibling`.
    """
    combined = combine_rewards(values.double(), weights, applies=applies, missing=settings.missing)
    rewards = _penalised(combined, penalties, settings)
    groups = moments_of(rewards, combined.present)
    if settings.aggregation == "normalize_then_sum":
        sums = _normalised_sums(values, combined, settings)
        constant = moments_of(sums, combined.present).constant
        dropped = constant & settings.drop_constant_groups
        raw = _normalised_over_batch(sums, combined.present & ~dropped.unsqueeze(-1), settings)
    else:
        constant = groups.constant
        dropped = constant & settings.drop_constant_groups
        raw = _over_baseline(groups, settings)
        raw = raw / _divisor(rewards, combined.present & ~dropped.unsqueeze(-1), groups, settings)
    bounded = raw if settings.clip is None else raw.clamp(-settings.clip, settings.clip)
    advantages = torch.where(constant.unsqueeze(-1), 0.0, bounded)
    trained = combined.present & ~dropped.unsqueeze(-1)
    return GroupAdvantages(
        advantages=torch.where(trained, advantages, torch.nan).float(),
        rewards=rewards.to(values.dtype),
        means=torch.where(groups.counts > 0, groups.means, torch.nan).float(),
        stds=groups.stds.float(),
        constant=constant,
        dropped=dropped,
        present=combined.present,
        imputed=combined.imputed,
    )


def _penalised(
    combined: CombinedRewards, penalties: Float[Tensor, "groups siblings"] | None, settings: AdvantageSettings
) -> Float[Tensor, "groups siblings"]:
    """R - kl_coef KL."""
    if settings.kl_coef == 0:
        return combined.rewards
    if penalties is None:
        raise ValueError(f"kl_coef is {settings.kl_coef} but there are no penalties; give kl_penalty's, or set it to 0")
    broken = (combined.present & ~penalties.isfinite()).nonzero().tolist()
    if broken:
        mend = "The log-probs that it was computed from are not finite; collect the rollouts anew."
        raise NonFiniteError("KL in the reward", [f"{g}/{s}" for g, s in broken], mend)
    return combined.rewards - settings.kl_coef * penalties.double()


def _over_baseline(groups: Moments, settings: AdvantageSettings) -> Float[Tensor, "groups siblings"]:
    """Each reward less its baseline; n / (n - 1) turns the mean of all into the mean of the others."""
    if settings.baseline == "mean":
        return groups.centred
    return groups.centred * (groups.counts / (groups.counts - 1).clamp(min=1)).unsqueeze(-1)


def _divisor(
    rewards: Float[Tensor, "groups siblings"],
    trained: Bool[Tensor, "groups siblings"],
    groups: Moments,
    settings: AdvantageSettings,
) -> Float[Tensor, "#groups 1"]:
    """Std + eps of each group or of the batch; 1 without scaling, and where there is no spread to divide."""
    if settings.scale == "none":
        return torch.ones_like(groups.stds[:, None])
    stds = groups.stds if settings.scale == "group" else moments_of(rewards.reshape(1, -1), trained.reshape(1, -1)).stds
    return torch.where(stds > 0, stds + settings.eps, 1.0).unsqueeze(-1)


def _normalised_sums(
    values: Float[Tensor, "groups siblings rewards"], combined: CombinedRewards, settings: AdvantageSettings
) -> Float[Tensor, "groups siblings"]:
    """S = sum over k of w_k z_k, each reward normalised over the group's known values; a null counts as their mean."""
    each = moments_of(values.transpose(1, 2).flatten(0, 1), combined.known.transpose(1, 2).flatten(0, 1))
    stds = torch.where(each.stds > 0, each.stds + settings.eps, 1.0)
    rows = each.centred / stds.unsqueeze(-1)
    normalised = rows.reshape(values.shape[0], values.shape[2], values.shape[1]).transpose(1, 2)
    return (combined.weights * normalised).sum(-1)


def _normalised_over_batch(
    sums: Float[Tensor, "groups siblings"], trained: Bool[Tensor, "groups siblings"], settings: AdvantageSettings
) -> Float[Tensor, "groups siblings"]:
    """(S - mean S) / (std S + eps) over all trained samples."""
    batch = moments_of(sums.reshape(1, -1), trained.reshape(1, -1))
    return batch.centred.reshape_as(sums) / torch.where(batch.stds > 0, batch.stds + settings.eps, 1.0)
