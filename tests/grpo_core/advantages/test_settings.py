"""What is refused, by the key of the configuration."""

import math
from typing import Any

import pytest

from grpo_core.advantages import AdvantageSettings, refuse_terms
from grpo_core.errors import InputError
from grpo_core.rewards.mix.terms import RewardTerm

GDPO = {"aggregation": "normalize_then_sum"}


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("eps", {"eps": -1e-9}),
        ("eps", {"eps": math.nan}),
        ("kl_coef", {"kl_coef": -0.1}),
        ("kl_coef", {"kl_coef": math.inf}),
        ("clip", {"clip": 0.0}),
        ("clip", {"clip": math.nan}),
        ("baseline", {**GDPO, "baseline": "leave_one_out"}),
        ("scale", {**GDPO, "scale": "none"}),
        ("scale", {**GDPO, "scale": "batch"}),
        ("kl_coef", {**GDPO, "kl_coef": 0.1}),
    ],
)
def test_refused(field: str, options: dict[str, Any]) -> None:
    with pytest.raises(InputError) as caught:
        AdvantageSettings(**options)
    assert caught.value.place == f"advantages.{field}"
    assert str(caught.value.value) == str(options[field])


def test_the_limits_themselves_are_allowed() -> None:
    settings = AdvantageSettings(eps=0.0, kl_coef=0.0, clip=1e-9, baseline="leave_one_out", scale="batch")
    assert settings.clip == 1e-9


@pytest.mark.parametrize("normalize", ["group", "running"])
def test_a_reward_is_not_normalised_twice(normalize: Any) -> None:
    terms = [RewardTerm(), RewardTerm(normalize=normalize)]
    refuse_terms(terms, AdvantageSettings())
    with pytest.raises(InputError) as caught:
        refuse_terms(terms, AdvantageSettings(**GDPO))
    assert (caught.value.place, caught.value.value) == ("rewards.1.normalize", normalize)


def test_a_fixed_range_is_no_second_normalisation() -> None:
    terms = [RewardTerm(normalize="range", range=(0.0, 10.0)), RewardTerm(role="gate")]
    refuse_terms(terms, AdvantageSettings(**GDPO))


@pytest.mark.parametrize("terms", [[], [RewardTerm(role="gate")], [RewardTerm(role="gate"), RewardTerm(0.0)]])
def test_a_mix_that_adds_nothing_is_refused(terms: list[RewardTerm]) -> None:
    with pytest.raises(InputError) as caught:
        refuse_terms(terms, AdvantageSettings())
    assert caught.value.place == "rewards"
