"""The numbers of a reward curve, under the names that dashboards know."""

from grpo_core.advantages.compute import GroupAdvantages


def reward_metrics(result: GroupAdvantages) -> dict[str, float]:
    """Return mean and spread of the combined rewards, and how many were filled in or left out.

    `reward` and `reward_std` (Bessel-corrected) are over all rewarded samples, dropped groups included;
    `frac_reward_zero_std` is the share of groups that teach nothing. `reward` is absent without any rewarded sample,
    `reward_std` with fewer than two.
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
