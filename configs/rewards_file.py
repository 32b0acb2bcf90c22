"""A file of rewards by themselves: for stored rollouts that are scored again, and for a server that scores."""

from pathlib import Path

from pydantic import Field

from configs.loader import read_mapping, validated
from configs.reward_sections import RewardSection
from configs.schema import AdvantagesSection
from configs.section import Section
from grpo_core.errors import InputError, InputErrors


class RewardsFile(Section):
    """Rewards, and how they become advantages."""

    rewards: tuple[RewardSection, ...] = Field(min_length=1)
    advantages: AdvantagesSection | None = Field(None, description="null: as the rollouts were trained with")


def read_rewards_file(path: str | Path, place: str) -> RewardsFile:
    """Read a file of rewards; whether they can be built and suit some rollouts is told elsewhere.

    Args:
        path: a YAML file.
        place: how the person names it: an argument or option.

    Raises:
        InputErrors: everything that is wrong with its form.
    """
    try:
        values = read_mapping(path, place, example="configs/rewards/mix.yaml", keys="rewards")
    except InputError as error:
        raise InputErrors([error]) from error
    return validated(RewardsFile, values)
