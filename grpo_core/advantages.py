"""Group-relative advantages: a sample is judged against its siblings, not against the batch.

Shao et al., 2024, DeepSeekMath (arXiv:2402.03300), section 4.1.2, outcome supervision.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from grpo_core.errors import NonFiniteError


@dataclass(frozen=True)
class GroupAdvantages:
    """Advantages with the statistics that made them, one row a group, one column a sibling.

    Attributes:
        advantages: (reward - mean) / (std + eps); NaN where the sample has no reward.
        means: mean reward of each group over its rewarded samples.
        stds: Bessel-corrected standard deviation; zero for a group with fewer than two rewarded samples.
        constant: True for a group whose rewards do not differ: it teaches nothing.
    """

    advantages: Float[Tensor, "groups siblings"]
    means: Float[Tensor, " groups"]
    stds: Float[Tensor, " groups"]
    constant: Bool[Tensor, " groups"]


def compute_advantages(
    rewards: Float[Tensor, "groups siblings"],
    *,
    normalize_std: bool = True,
    eps: float = 1e-4,
) -> GroupAdvantages:
    """Advantage of each sample over its group.

    Args:
        rewards: one row a group; NaN marks a sample without a reward, which counts in no statistic.
        normalize_std: divide by std + eps; without it the advantage is (reward - mean), as in Dr. GRPO.
        eps: added to the standard deviation.

    Raises:
        NonFiniteError: a reward is infinite; the sample is named `group/sibling`.
    """
    infinite = torch.isinf(rewards).nonzero().tolist()
    if infinite:
        raise NonFiniteError("reward", [f"{g}/{s}" for g, s in infinite], "Clamp the reward that produced it.")
    present = ~torch.isnan(rewards)
    count = present.sum(-1)
    values = torch.where(present, rewards, 0.0).double()
    means = values.sum(-1) / count.clamp(min=1)
    centred = torch.where(present, values - means.unsqueeze(-1), 0.0)
    stds = (centred.square().sum(-1) / (count - 1).clamp(min=1)).sqrt()
    highest = rewards.nan_to_num(nan=-torch.inf).amax(-1)
    lowest = rewards.nan_to_num(nan=torch.inf).amin(-1)
    # Compared, not subtracted: the mean of equal numbers can differ from them in the last bit.
    constant = (count < 2) | (highest == lowest)
    stds = torch.where(constant, 0.0, stds)
    scaled = centred / (stds + eps).unsqueeze(-1) if normalize_std else centred
    scaled = torch.where(constant.unsqueeze(-1), 0.0, scaled)
    advantages = torch.where(present, scaled, torch.nan).float()
    means = torch.where(count > 0, means, torch.nan)
    return GroupAdvantages(advantages, means.float(), stds.float(), constant)
