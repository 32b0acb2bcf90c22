"""Rewards of siblings -> one advantage per sample.

Shao et al., 2024, DeepSeekMath (arXiv:2402.03300), section 4.1.2, outcome supervision; `AdvantageSettings` names the
sources of the variants.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_core.advantages.compared import Moments, moments_of, objective_of
from grpo_core.advantages.settings import AdvantageSettings, refuse_terms
from grpo_core.errors import NonFiniteError
from grpo_core.losses.ratios import estimate_kl
from grpo_core.losses.settings import KlEstimator
from grpo_core.rewards.mix import CombinedRewards, RunningMoments, combine_rewards
from grpo_core.rewards.registry import RewardTerm


@dataclass(frozen=True)
class GroupAdvantages:
    """Advantages with the statistics that made them, one row per group, one column per sibling.

    Attributes:
        advantages: NaN where the sample is not trained: it has no reward, or its group is dropped.
        rewards: combined, less the KL in the reward, before normalisation; NaN where `present` is False.
        means: of `rewards` over the group; NaN for a group without any.
        stds: Bessel-corrected; zero for a constant group.
        constant: the group teaches nothing: its rewards, normalised if they are, do not differ.
        dropped: constant groups that are left out on request.
        present: whether the sample has any reward.
        imputed: null rewards that count and were filled with the group's mean.
        scaled: each reward after clamp and fixed range, of a gate its factor; imputed ones filled; NaN without a value.
        running: moments of the known scaled values of this call and all before.
    """

    advantages: Float[Tensor, "groups siblings"]
    rewards: Float[Tensor, "groups siblings"]
    means: Float[Tensor, " groups"]
    stds: Float[Tensor, " groups"]
    constant: Bool[Tensor, " groups"]
    dropped: Bool[Tensor, " groups"]
    present: Bool[Tensor, "groups siblings"]
    imputed: Bool[Tensor, "groups siblings rewards"]
    scaled: Float[Tensor, "groups siblings rewards"]
    running: RunningMoments


def compute_advantages(
    values: Float[Tensor, "groups siblings rewards"],
    terms: Sequence[RewardTerm],
    settings: AdvantageSettings,
    *,
    penalties: Float[Tensor, "groups siblings"] | None = None,
    applies: Bool[Tensor, "groups rewards"] | None = None,
    running: RunningMoments | None = None,
) -> GroupAdvantages:
    """Compute the advantage of each sample over its group.

    Args:
        values: NaN marks a null; a group with fewer samples than the others is filled up with NaN rows.
        terms: one per reward, in the order of the last axis.
        penalties: KL to the reference in nats, one per sample (`kl_penalty`); needed when `settings.kl_coef` > 0.
        applies: whether a reward is meant for a group; by default all are.
        running: moments of the calls before, with the same terms; None at the first.

    Raises:
        InputError: the mix and the settings do not fit together (`refuse_terms`).
        ValueError: the terms do not fit the values, or a KL in the reward without penalties.
        NonFiniteError: a reward, or the KL of a rewarded sample, is not finite; named `group/sibling`.
    """
    refuse_terms(terms, settings)
    combined = combine_rewards(values.double(), terms, applies=applies, missing=settings.missing)
    # Every scored value, also of samples without an advantage: each is one observation of the reward.
    here = RunningMoments.of(torch.where(combined.imputed, torch.nan, combined.scaled))
    running = here if running is None else running.merged(here)
    penalty = _penalty(combined, penalties, settings)
    rewards = combined.rewards - penalty
    sums, magnitudes = objective_of(combined, terms, settings, running)
    constant, raw = _normalised(sums - penalty, magnitudes + penalty.abs(), combined.present, settings)
    bounded = raw if settings.clip is None else raw.clamp(-settings.clip, settings.clip)
    advantages = torch.where(constant.unsqueeze(-1), 0.0, bounded)
    dropped = constant & (settings.constant_groups != "keep")
    trained = combined.present & ~dropped.unsqueeze(-1)
    groups = moments_of(rewards, combined.present)
    return GroupAdvantages(
        advantages=torch.where(trained, advantages, torch.nan).float(),
        rewards=rewards.to(values.dtype),
        means=torch.where(groups.counts > 0, groups.means, torch.nan).float(),
        stds=groups.stds.float(),
        constant=constant,
        dropped=dropped,
        present=combined.present,
        imputed=combined.imputed,
        scaled=combined.scaled.to(values.dtype),
        running=running,
    )


def _penalty(
    combined: CombinedRewards, penalties: Float[Tensor, "groups siblings"] | None, settings: AdvantageSettings
) -> Float[Tensor, "groups siblings"]:
    if settings.kl_coef == 0:
        return torch.zeros_like(combined.rewards)
    if penalties is None:
        raise ValueError(f"kl_coef is {settings.kl_coef} but penalties is None; pass kl_penalty's, or set it to 0")
    broken = (combined.present & ~penalties.isfinite()).nonzero().tolist()
    if broken:
        hint = "The log-probs that it was computed from are not finite; collect the rollouts again."
        raise NonFiniteError("KL in the reward", [f"{g}/{s}" for g, s in broken], hint)
    return settings.kl_coef * penalties.double()


def _normalised(
    sums: Float[Tensor, "groups siblings"],
    magnitudes: Float[Tensor, "groups siblings"],
    present: Bool[Tensor, "groups siblings"],
    settings: AdvantageSettings,
) -> tuple[Bool[Tensor, " groups"], Float[Tensor, "groups siblings"]]:
    """Return which groups are constant, and the advantages before the clip; those of constant groups are undefined."""
    groups = moments_of(sums, present, magnitudes=magnitudes)
    dropped = groups.constant & (settings.constant_groups != "keep")
    trained = present & ~dropped.unsqueeze(-1)
    if settings.aggregation == "normalize_then_sum":
        return groups.constant, _normalised_over_batch(sums, trained, settings)
    return groups.constant, _over_baseline(groups, settings) / _divisor(sums, trained, groups, settings)


def _over_baseline(groups: Moments, settings: AdvantageSettings) -> Float[Tensor, "groups siblings"]:
    """Subtract the baseline from each sum; n / (n - 1) turns the mean of all into the mean of the others."""
    if settings.baseline == "mean":
        return groups.centred
    return groups.centred * (groups.counts / (groups.counts - 1).clamp(min=1)).unsqueeze(-1)


def _divisor(
    sums: Float[Tensor, "groups siblings"],
    trained: Bool[Tensor, "groups siblings"],
    groups: Moments,
    settings: AdvantageSettings,
) -> Float[Tensor, "#groups 1"]:
    """Return std + eps of each group or of the batch; 1 without scaling, and where there is no spread."""
    if settings.scale == "none":
        return torch.ones_like(groups.stds[:, None])
    stds = groups.stds if settings.scale == "group" else moments_of(sums.reshape(1, -1), trained.reshape(1, -1)).stds
    return torch.where(stds > 0, stds + settings.eps, 1.0).unsqueeze(-1)


def _normalised_over_batch(
    sums: Float[Tensor, "groups siblings"], trained: Bool[Tensor, "groups siblings"], settings: AdvantageSettings
) -> Float[Tensor, "groups siblings"]:
    """Compute (S - mean S) / (std S + eps) over all trained samples."""
    batch = moments_of(sums.reshape(1, -1), trained.reshape(1, -1))
    return batch.centred.reshape_as(sums) / torch.where(batch.stds > 0, batch.stds + settings.eps, 1.0)


def kl_penalty(
    logprobs: Float[Tensor, "batch time"],
    ref_logprobs: Float[Tensor, "batch time"],
    loss_mask: Bool[Tensor, "batch time"],
    *,
    estimator: KlEstimator,
) -> Float[Tensor, " batch"]:
    """Sum of the estimator over the trained tokens of each row, in nats, fp64.

    With k1 that is log p(row) - log ref(row), whose mean over samples is the KL of whole sequences (Ouyang et al.,
    2022, arXiv:2203.02155, equation 2). It is summed, not averaged: a longer row has diverged more.
    """
    return estimate_kl(logprobs, ref_logprobs, loss_mask, estimator).detach().sum(-1, dtype=torch.float64)


def reward_metrics(result: GroupAdvantages) -> dict[str, float]:
    """Return mean and Bessel-corrected spread of the combined rewards, and how many were filled in or left out.

    Both are over all rewarded samples, dropped groups included; `reward` needs one of them, `reward_std` two.
    `frac_reward_zero_std` is the share of groups that teach nothing.
    """
    rewards = result.rewards[result.present].double()
    metrics = {
        "frac_reward_zero_std": float(result.constant.double().mean()),
        "groups_dropped": float(result.dropped.sum()),
        "groups_kept": float((~result.dropped).sum()),
        "samples_without_reward": float((~result.present).sum()),
        "rewards_imputed": float(result.imputed.sum()),
    }
    if len(rewards) > 0:
        metrics["reward"] = float(rewards.mean())
    if len(rewards) > 1:
        metrics["reward_std"] = float(rewards.std())
    return metrics
