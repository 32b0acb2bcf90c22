from collections.abc import Iterator

import pytest

from grpo_core.rewards.registry import REWARDS
from tests.attacks.attacks import NOT_ATTACKED, Attack, all_attacks

ATTACKS = all_attacks()
TILES = ("faint", "turned a quarter to the left", "written again", "upside down", "punctuation")
VARIANTS = {f"the text, and twelve times {tile}" for tile in TILES} | {"the text, and twelve scribbles"}
"""Writing that is read, or passed over, like that of another attack."""


def to_try() -> Iterator[object]:
    """Yield the attacks that may fail, which one that may reach everything cannot."""
    for attack in ATTACKS:
        if attack.at_most != 1.0:
            marks = [pytest.mark.slow] if attack.what in VARIANTS and not attack.settings else []
            yield pytest.param(attack, id=f"{attack.scored_by}: {attack.what}", marks=marks)


@pytest.mark.parametrize("attack", list(to_try()))
def test_an_attack_reaches_no_more_than_it_may(attack: Attack) -> None:
    if missing := attack.missing():
        pytest.skip(missing)
    value = attack.score()
    assert not attack.succeeds(value), f"{value} of at most {attack.at_most}"


def test_every_reward_is_attacked_or_says_why_not() -> None:
    attacked = {attack.reward for attack in ATTACKS}
    assert attacked.isdisjoint(NOT_ATTACKED)
    assert attacked | NOT_ATTACKED.keys() == REWARDS.keys()
