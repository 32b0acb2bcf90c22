import pytest

from grpo_core.rewards.registry import REWARDS
from tests.attacks.attack import Attack
from tests.attacks.listing import NOT_ATTACKED, all_attacks

ATTACKS = all_attacks()


@pytest.mark.parametrize("attack", ATTACKS, ids=[f"{attack.scored_by}: {attack.what}" for attack in ATTACKS])
def test_an_attack_reaches_no_more_than_it_may(attack: Attack) -> None:
    if missing := attack.missing():
        pytest.skip(missing)
    value = attack.score()
    assert not attack.succeeds(value), f"{value} of at most {attack.at_most}"


def test_every_reward_is_attacked_or_says_why_not() -> None:
    attacked = {attack.reward for attack in ATTACKS}
    assert attacked.isdisjoint(NOT_ATTACKED)
    assert attacked | NOT_ATTACKED.keys() == REWARDS.keys()
