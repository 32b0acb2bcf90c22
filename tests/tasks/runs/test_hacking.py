"""Signs of hacked rewards and of trainings that go wrong, in curves worked out by hand and in plain noise."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_core.rewards.registry import HackingRule
from grpo_core.rollouts.streams import Stream
from grpo_core.update.settings import PARITY_SHARE
from tasks.metrics import RANK_CORRELATION, RANK_CORRELATION_MIN
from tasks.runs.hacking import HackingSign, hacking_signs, noise_between
from tasks.runs.signs import Sign, find_signs, new_signs
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
    fallen = [1.0, 1.0, 0.875, 0.75, 0.5]
    found = hacking_signs([1, 2, 3, 4, 5], [0.4, 0.4, 0.6, 0.8, 0.8], {"b": fallen, "x": [1.0] * 5, "a": fallen}, PLAIN)
    assert [sign.guardrail for sign in found] == ["b", "a"]
    assert json.loads(json.dumps(asdict(found[0]), allow_nan=False))["since"] == 4


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
    guardrail = [1.0, 1.0, 0.875, 0.75, 0.5]
    for rewards in ([-0.8, -0.8, -0.7, -0.4, -0.4], [0.0, 0.0, 0.1, 0.4, 0.4]):
        assert signs(rewards, PLAIN, guardrail=guardrail)
    assert not signs([-0.4, -0.4, -0.5, -0.8, -0.8], PLAIN, guardrail=guardrail)


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


def test_noise_by_hand() -> None:
    # Squares 1, 1, 4, the largest left out: (1 + 1) / 2 over max(3 - 2 ln 3, 3 / 2).
    assert noise_between([0.0, 1.0, 0.0, 2.0]) == pytest.approx(math.sqrt(1 / 1.5))
    assert noise_between([5.0] * 10) == 0.0
    assert noise_between([1.0, 2.0, 1.0]) is None
    # A single step is no noise.
    assert noise_between([1.0] * 5 + [0.2] * 5) == 0.0


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


HEALTHY = {
    "reward": 0.5,
    "reward_std": 0.2,
    "frac_reward_zero_std": 0.1,
    "groups_kept": 16.0,
    "groups_dropped": 0.0,
    "entropy": 1.0,
    "kl": 0.1,
    "loss": 0.001,
    "policy_loss": 0.0,
    "learning_rate": 1e-5,
    "clip_ratio/region_mean": 0.1,
    "optimizer_steps": 2.0,
    PARITY_SHARE: 0.1,
}


@dataclass(frozen=True)
class Row:
    iteration: int
    metrics: Mapping[str, float]


def history(*changes: Mapping[str, float], count: int = 1) -> list[Row]:
    """A row for each change of the healthy metrics; the last one `count` times in all."""
    rows = [*changes, *[changes[-1]] * (count - 1)]
    return [Row(number, {**HEALTHY, **change}) for number, change in enumerate(rows, start=1)]


def found(rows: Sequence[Row], stream: Stream = "tokens") -> list[tuple[str, int]]:
    return [(sign.name, sign.iteration) for sign in find_signs(rows, stream)]


@pytest.mark.parametrize(
    ("name", "sick", "well", "count"),
    [
        ("entropy", {"entropy": 0.02}, {"entropy": 0.0201}, 3),
        ("groups-without-spread", {"frac_reward_zero_std": 0.9}, {"frac_reward_zero_std": 0.89}, 3),
        ("kl", {"kl": 1.0}, {"kl": 0.999}, 1),
        ("kl-penalty", {"loss": 0.05}, {"loss": 0.0499}, 5),
        # Of two steps the second one alone can clip.
        ("clipped", {"clip_ratio/region_mean": 0.276}, {"clip_ratio/region_mean": 0.274}, 5),
        ("parity", {PARITY_SHARE: 0.8}, {PARITY_SHARE: 0.799}, 1),
        (
            "previews",
            {RANK_CORRELATION_MIN: 0.59, RANK_CORRELATION: 0.7},
            {RANK_CORRELATION_MIN: 0.6, RANK_CORRELATION: 0.7},
            3,
        ),
        (
            "previews",
            {RANK_CORRELATION_MIN: 0.5, RANK_CORRELATION: 0.74},
            {RANK_CORRELATION_MIN: 0.5, RANK_CORRELATION: 0.75},
            3,
        ),
    ],
)
def test_both_sides_of_each_threshold(name: str, sick: dict[str, float], well: dict[str, float], count: int) -> None:
    # It shows after as many iterations in a row as it needs, and not again.
    assert found(history({}, sick, count=count + 5)) == [(name, count + 1)]
    assert found(history({}, well, count=count + 5)) == []
    if count == 3:
        assert found(history({}, sick, count=count - 1)) == []
        assert found(history(*([sick] * (count - 1) + [well]) * 3)) == []


@pytest.mark.parametrize("name", ["velocity/error", "nft/positive_error"])
def test_matched_velocities_without_a_pull_are_named_and_their_pull_is_no_penalty(name: str) -> None:
    free = {**{key: value for key, value in HEALTHY.items() if key != "kl"}, name: 0.3}
    rows = [Row(number, free) for number in range(1, 8)]
    assert found(rows, "denoising") == [("no-pull", 3)]
    assert found(rows[:2], "denoising") == []
    pulled = [Row(row.iteration, {**row.metrics, "kl": 0.2, "loss": 0.08}) for row in rows]
    assert found(pulled, "denoising") == []


def test_a_velocity_that_has_grown_beyond_the_reference_is_named() -> None:
    norms = (1.06, 1.04, 1.05, 1.06, 1.07)
    rows = [Row(number, {**HEALTHY, "velocity/norm_ratio": norm}) for number, norm in enumerate(norms, start=1)]
    (sign,) = find_signs(rows, "denoising")
    assert (sign.name, sign.iteration) == ("velocity-norm", 5)
    assert "7% above" in sign.message
    assert found(rows[:4], "denoising") == []


def test_a_reward_at_its_bound_has_risen_by_half_of_its_first_spread() -> None:
    flat = {"frac_reward_zero_std": 1.0, "reward_std": 0.0}
    assert found(history({}, {**flat, "reward": 0.601}, count=3)) == [("reward-at-bound", 4)]
    assert found(history({}, {**flat, "reward": 0.599}, count=3)) == [("groups-without-spread", 4)]
    # All samples have nearly the same reward, not only those of a prompt.
    for std, name in ((0.06, "reward-at-bound"), (0.061, "groups-without-spread")):
        assert found(history({}, {**flat, "reward": 0.9, "reward_std": std}, count=3)) == [(name, 4)]
    # A reward that had no spread at first has no bound that it could have reached.
    for share, name in ((0.49, "reward-at-bound"), (0.5, "groups-without-spread")):
        rows = history({"frac_reward_zero_std": share}, {**flat, "reward": 0.9}, count=3)
        assert found(rows) == [(name, 4)]


SPARSE = [0.5, 0.25, 0.0, 0.0, 0.25, 0.0, 0.25, 0.75, 1.0, 1.0, 1.0]
"""Groups without spread of a language model that learns sums with a reward of 0 and 1, and its rewards."""
SOLVING = [0.125, 0.25, 0.41, 0.53, 0.78, 0.81, 0.91, 0.97, 1.0, 1.0, 1.0]


def test_a_solved_task_of_zeros_and_ones_has_reached_its_bound() -> None:
    def row(share: float, reward: float) -> dict[str, float]:
        return {"frac_reward_zero_std": share, "reward": reward, "reward_std": (reward * (1 - reward)) ** 0.5}

    solved = [row(*each) for each in zip(SPARSE, SOLVING, strict=True)]
    assert found(history(*solved)) == [("reward-at-bound", 11)]
    # At first no sample of any prompt was right.
    assert found(history(row(1.0, 0.0), row(1.0, 0.0), *solved)) == [("reward-at-bound", 13)]
    # It never had a spread in half of the groups.
    always = [row(max(share, 0.5), reward) for share, reward in zip(SPARSE, SOLVING, strict=True)]
    assert found(history(*always)) == [("groups-without-spread", 11)]


def test_a_policy_that_has_lost_its_spread_is_told_from_a_reward_that_never_had_any() -> None:
    flat = {"frac_reward_zero_std": 1.0, "reward": 0.0, "reward_std": 0.0}
    # A tenth of the first samples was right: too few to say that the reward has fallen.
    learned = {"reward": 0.1, "reward_std": 0.3, "groups_kept": 4.0, "frac_reward_zero_std": 0.4, "learning_rate": 0.1}
    for first, named in ((learned, True), ({**learned, "frac_reward_zero_std": 0.6}, False)):
        (sign,) = find_signs(history(first, {**flat, "groups_kept": 4.0, "learning_rate": 0.1}, count=3), "tokens")
        assert sign.name == "groups-without-spread"
        assert ("update.learning_rate (now 0.1)" in sign.message) is named
        assert ("check the reward" in sign.message) is not named


R2, TEXT = "rewards/r2/frac_all_zero", "rewards/text/frac_all_zero"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([{R2: 0.9, TEXT: 0.1}] * 5, [("reward-zero", "r2", 5)]),
        ([{R2: 0.9, TEXT: 0.8}] * 9, [("reward-zero", "r2", 5), ("reward-zero", "text", 5)]),
        ([{R2: 0.9, TEXT: 0.1}] * 4, []),
        ([{R2: 0.79, TEXT: 0.1}] * 9, []),
        # Of a penalty 0 is the best value.
        ([{R2: 0.9, "rewards/r2/mean": -0.01}, *[{R2: 1.0, "rewards/r2/mean": 0.0}] * 9], []),
        # It was earned before.
        ([{R2: 0.4, TEXT: 0.1}, *[{R2: 1.0, TEXT: 0.1}] * 9], []),
        # The cause is that no reward has any.
        ([{R2: 1.0, TEXT: 1.0, "frac_reward_zero_std": 1.0}] * 9, [("groups-without-spread", "", 3)]),
    ],
)
def test_a_reward_that_is_zero_nearly_everywhere(
    changes: list[dict[str, float]], expected: list[tuple[str, str, int]]
) -> None:
    signs = find_signs(history(*changes), "tokens")
    assert [(sign.name, sign.subject, sign.iteration) for sign in signs] == expected
    both = [
        Row(each.iteration, {**HEALTHY, **{f"denoising/{name}": v for name, v in each.metrics.items()}})
        for each in history(*changes)
    ]
    subjects = [f"denoising/{subject}".rstrip("/") for _, subject, _ in expected]
    assert [sign.subject for sign in find_signs(both, "tokens")] == subjects


def test_the_reward_has_fallen_beyond_its_noise() -> None:
    # 9 iterations with 16 groups each and a deviation of .2: the standard error of three iterations is .2 / sqrt(48),
    # that of the difference of two such means .0408, and the limit .2041.
    for fall, expected in ((0.206, [("reward-fell", 8)]), (0.203, [])):
        changes = [{}] * 5 + [{"reward": 0.5 - fall}] * 3
        assert found(history(*changes)) == expected
    # The level is the best of all earlier ones, one iteration at the start: .2 (1/16 + 1/48)^.5 x 5 = .2887.
    for first, expected in ((0.79, [("reward-fell", 4)]), (0.788, [])):
        assert found(history({"reward": first}, {}, count=3)) == expected
    assert found(history({"groups_dropped": 48.0, "reward": 0.65}, {"groups_dropped": 48.0}, count=3)) == [
        ("reward-fell", 4)
    ]


def test_a_cause_shows_without_its_effects() -> None:
    flat = {"frac_reward_zero_std": 1.0}
    assert found(history({**flat, "entropy": 0.001}, count=4)) == [("entropy", 3)]
    assert found(history({}, {**flat, "entropy": 0.001, "reward": 0.9, "reward_std": 0.0}, count=4)) == [
        ("reward-at-bound", 4)
    ]
    far = {"kl": 3.0, "loss": 0.3, "clip_ratio/region_mean": 0.4}
    assert found(history(far, count=8)) == [("kl", 1)]


def test_one_step_an_iteration_clips_nothing_and_missing_metrics_say_nothing() -> None:
    assert found(history({"optimizer_steps": 1.0, "clip_ratio/region_mean": 0.0}, count=6)) == []
    assert found([Row(number, {"reward": 0.1}) for number in range(1, 9)]) == []
    # A hole in the metrics ends a row.
    sick = {"entropy": 0.0}
    holed = [*history(sick, count=2), Row(3, {}), *history(sick, count=2)]
    assert found(holed) == []
    # The KL of denoising steps is in other units.
    assert found(history({"kl": 5.0}), "denoising") == []


def test_streams_have_signs_of_their_own_and_places_of_their_own() -> None:
    tokens = {**HEALTHY, "kl": 2.0}
    both = {**tokens, **{f"denoising/{name}": value for name, value in HEALTHY.items()}}
    both["denoising/frac_reward_zero_std"] = 1.0
    signs = find_signs([Row(number, both) for number in (1, 2, 3)], "tokens")
    assert [(sign.name, sign.subject, sign.iteration) for sign in signs] == [
        ("kl", "tokens", 1),
        ("groups-without-spread", "denoising", 3),
    ]
    assert "update.tokens.kl_coef" in signs[0].message
    assert "update.kl_coef" in find_signs([Row(1, tokens)], "tokens")[0].message


def test_a_history_gives_the_same_signs_at_once_and_iteration_by_iteration() -> None:
    rows = history(*[{}] * 6, *[{"reward": 0.1, "kl": 1.5}] * 4, *[{"entropy": 0.0}] * 4)
    known: list[Sign] = []
    for end in range(1, len(rows) + 1):
        known += new_signs(rows[:end], "tokens", known)
    assert tuple(known) == find_signs(rows, "tokens")
    assert [sign.name for sign in known] == ["kl", "reward-fell", "entropy"]
