"""The classic cases, curves worked out by hand, and simulated noise that must raise no alarm."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_core.rewards.registry import HackingRule
from tasks.runs.hacking import HackingSign, hacking_signs, noise_between
from tests.grpo_core.rewards.conftest import refusal

Series = Sequence[float | None]
RULE = HackingRule()
PLAIN = HackingRule(rise=0.25, fall=0.25, patience=2, noise=0.0)


def signs(rewards: Series, rule: HackingRule = RULE, **guardrails: Series) -> dict[str, HackingSign]:
    """At policies 0, 10, 20, ..."""
    versions = [10 * place for place in range(len(rewards))]
    return {sign.guardrail: sign for sign in hacking_signs(versions, rewards, guardrails, rule)}


def first_alarm(rewards: Series, guardrail: Series, rule: HackingRule = RULE) -> int | None:
    """After how many evaluations the sign first shows, as a run that goes on would see it."""
    seen = range(1, len(rewards) + 1)
    return next((count for count in seen if signs(rewards[:count], rule, guardrail=guardrail[:count])), None)


def rising(count: int, seed: int = 0, noise: float = 0.01) -> list[float]:
    curve = 0.4 + 0.4 * (1 - np.exp(-np.arange(count) / 8))
    return (curve + noise * np.random.default_rng(seed).standard_normal(count)).tolist()


def around(levels: Sequence[float], relative: float, seed: int) -> list[float]:
    return (np.array(levels) * (1 + relative * np.random.default_rng(seed).standard_normal(len(levels)))).tolist()


def test_by_hand() -> None:
    # Levels over two evaluations: the guardrail's best is (1.0 + 1.0) / 2, when the reward stood at (0.4 + 0.4) / 2.
    found = signs([0.4, 0.4, 0.6, 0.8, 0.8], PLAIN, guardrail=[1.0, 1.0, 0.875, 0.75, 0.5])
    assert found == {"guardrail": HackingSign("guardrail", 1.0, 0.625, -0.375, pytest.approx(0.4), 0.8, since=30)}


@pytest.mark.parametrize(
    ("rewards", "guardrail"),
    [
        ([0.4, 0.4, 0.4, 0.4, 0.4], [1.0, 1.0, 0.875, 0.75, 0.5]),  # the reward stays
        ([0.8, 0.8, 0.6, 0.4, 0.4], [1.0, 1.0, 0.875, 0.75, 0.5]),  # both fall
        ([0.4, 0.4, 0.6, 0.8, 0.8], [0.5, 0.5, 0.75, 0.875, 1.0]),  # both rise
        ([0.4, 0.4, 0.6, 0.8, 0.8], [1.0, 1.0, 0.875, 0.76, 0.5]),  # low at the last evaluation only
        ([0.4, 0.4, 0.6, 0.8, 0.8], [1.0, 1.0, 0.5, 0.5, 0.9]),  # no longer low
        ([0.4, 0.4, 0.42, 0.44, 0.46], [1.0, 1.0, 0.875, 0.75, 0.5]),  # the reward rose by less than a quarter
        ([0.4, 0.4, 0.6, 0.8, 0.8], [0.0, 0.0, 0.0, 0.0, 0.0]),  # nothing to fall from
        ([0.4, 0.8], [1.0, 0.5]),  # too few
        ([], []),
    ],
)
def test_no_sign_by_hand(rewards: Series, guardrail: Series) -> None:
    assert signs(rewards, PLAIN, guardrail=guardrail) == {}


def test_a_fall_after_a_rise_is_measured_from_the_top() -> None:
    # At the end the guardrail is above where it started.
    guardrail = [0.3, 0.4, 0.5, 0.6, 0.6, 0.6, 0.5, 0.4, 0.4, 0.4]
    sign = signs(np.linspace(0.2, 0.8, 10).tolist(), HackingRule(noise=0), guardrail=guardrail)["guardrail"]
    assert (sign.first, sign.last) == (pytest.approx(0.6), pytest.approx(0.4))
    assert sign.since == 60


def test_a_reward_around_or_below_zero_has_shares_too() -> None:
    guardrail = [1.0, 1.0, 0.875, 0.75, 0.5]
    for rewards in ([-0.8, -0.8, -0.7, -0.4, -0.4], [0.0, 0.0, 0.1, 0.4, 0.4]):
        assert signs(rewards, PLAIN, guardrail=guardrail)
    assert not signs([-0.4, -0.4, -0.5, -0.8, -0.8], PLAIN, guardrail=guardrail)


@pytest.mark.parametrize("seed", range(5))
def test_second_engine_reads_less_while_the_first_reads_more(seed: int) -> None:
    tesseract = around([0.3, 0.35, 0.4, 0.45, 0.5, 0.5, 0.45, 0.35, 0.25, 0.2, 0.15, 0.1], 0.04, seed)
    alarm = first_alarm(rising(12, seed), tesseract)
    assert alarm is not None
    # It starts to fall at the seventh; three in a row are the ninth.
    assert 9 <= alarm <= 11


@pytest.mark.parametrize("seed", range(5))
def test_diversity_collapses_at_once(seed: int) -> None:
    diversity = around([0.5] * 6 + [0.1] * 4, 0.02, seed)
    assert first_alarm(rising(10, seed), diversity) == 9
    sign = signs(rising(10, seed), diversity=diversity)["diversity"]
    assert sign.since == 60
    assert sign.change == pytest.approx(-0.8, abs=0.05)


@pytest.mark.parametrize("relative", [0.05, 0.1, 0.3])
def test_noise_alone_rarely_raises_an_alarm(relative: float) -> None:
    alarms = [first_alarm(rising(20, seed), around([0.5] * 20, relative, 1000 + seed)) for seed in range(60)]
    # 2 % were simulated; four of sixty have a chance below 4 %.
    assert sum(alarm is not None for alarm in alarms) <= 3
    # The same curves with shares alone: what the noise's part of the rule is for.
    if relative > 0.05:
        shares = HackingRule(noise=0)
        loose = [first_alarm(rising(20, seed), around([0.5] * 20, relative, 1000 + seed), shares) for seed in range(60)]
        assert sum(alarm is not None for alarm in loose) >= 20


def test_nothing_is_trained_and_nothing_is_seen() -> None:
    for seed in range(30):
        flat_reward, guardrail = around([0.4] * 20, 0.1, seed), around([0.5] * 20, 0.1, 500 + seed)
        assert first_alarm(flat_reward, guardrail) is None


@settings(max_examples=100, deadline=None)
@given(
    rewards=st.lists(st.floats(0, 1), min_size=12, max_size=12),
    guardrail=st.lists(st.floats(0.01, 1), min_size=12, max_size=12),
    rule=st.sampled_from([RULE, PLAIN, HackingRule(patience=1, noise=1)]),
)
def test_a_sign_says_what_is_so(rewards: list[float], guardrail: list[float], rule: HackingRule) -> None:
    versions = [10 * place for place in range(12)]
    for sign in signs(rewards, rule, guardrail=guardrail).values():
        assert sign.last <= sign.first * (1 - rule.fall) + 1e-12
        assert sign.reward_last >= sign.reward_first * (1 + rule.rise) - 1e-12
        start = versions.index(sign.since)
        assert start <= 12 - rule.patience
        assert all(level <= sign.first * (1 - rule.fall) + 1e-12 for level in guardrail[start:])
        # A larger fall or rise asked for never gives a sign where a smaller gave none.
        looser = HackingRule(rule.rise / 2, rule.fall / 2, rule.patience, rule.noise / 2)
        assert signs(rewards, looser, guardrail=guardrail)
    assert not signs(rewards, rule, guardrail=sorted(guardrail))


def test_gaps_count_neither_way() -> None:
    rewards: list[float | None] = [0.4, 0.4, 0.6, 0.8, 0.8]
    guardrail: list[float | None] = [1.0, 1.0, 0.875, 0.75, 0.5]
    expected = signs(rewards, PLAIN, guardrail=guardrail)["guardrail"]
    for gap in (None, math.nan, math.inf):
        found = signs([0.4, 0.4, 0.5, 0.6, 0.8, 0.8], PLAIN, guardrail=[1.0, 1.0, gap, 0.875, 0.75, 0.5])["guardrail"]
        assert (found.first, found.last, found.since) == (expected.first, expected.last, 40)
        assert signs([gap, *rewards], PLAIN, guardrail=[9.0, *guardrail])["guardrail"].first == 1.0
    assert signs([None] * 5, PLAIN, guardrail=guardrail) == {}


def test_signs_come_in_the_order_of_the_guardrails() -> None:
    fallen = [1.0, 1.0, 0.875, 0.75, 0.5]
    found = hacking_signs([1, 2, 3, 4, 5], [0.4, 0.4, 0.6, 0.8, 0.8], {"b": fallen, "x": [1.0] * 5, "a": fallen}, PLAIN)
    assert [sign.guardrail for sign in found] == ["b", "a"]
    assert json.loads(json.dumps(asdict(found[0]), allow_nan=False))["since"] == 4


def test_noise_by_hand() -> None:
    # Squares 1, 1, 4, the largest left out: (1 + 1) / 2 over max(3 - 2 ln 3, 3 / 2).
    assert noise_between([0.0, 1.0, 0.0, 2.0]) == pytest.approx(math.sqrt(1 / 1.5))
    assert noise_between([5.0] * 10) == 0.0
    assert noise_between([1.0, 2.0, 1.0]) is None
    # A single step is no noise.
    assert noise_between([1.0] * 5 + [0.2] * 5) == 0.0


@pytest.mark.parametrize("count", [10, 40, 200])
def test_noise_is_the_standard_deviation(count: int) -> None:
    rounds = np.random.default_rng(0).normal(3.0, 0.7, (300, count))
    drifting = rounds + np.linspace(0, 1, count)
    for values in (rounds, drifting):
        estimates = [noise_between(row.tolist()) or 0.0 for row in values]
        assert 0.65 <= np.mean(estimates) <= 0.9


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(("rise", value) for value in (0, "5%")),
        *(("fall", value) for value in (-0.1, 1.5, math.nan)),
        *(("patience", value) for value in (0, 2.0)),
        *(("noise", value) for value in (-1, False, math.inf)),
    ],
)
def test_wrong_rules_are_refused(setting: str, value: object) -> None:
    place, found = refusal(HackingRule, **{setting: value})
    assert (place, str(found)) == (f"guardrails.{setting}", str(value))
