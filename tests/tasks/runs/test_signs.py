"""Signs in hand-made histories: conditions on both sides of their thresholds, and causes without their effects."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest

from grpo_core.streams import Stream
from grpo_core.update.settings import PARITY_SHARE
from tasks.runs.signs import Sign, find_signs, new_signs

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
    ],
)
def test_both_sides_of_each_threshold(name: str, sick: dict[str, float], well: dict[str, float], count: int) -> None:
    # It shows after as many iterations in a row as it needs, and not again.
    assert found(history({}, sick, count=count + 5)) == [(name, count + 1)]
    assert found(history({}, well, count=count + 5)) == []
    if count == 3:
        assert found(history({}, sick, count=count - 1)) == []
        assert found(history(*([sick] * (count - 1) + [well]) * 3)) == []


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
def test_a_reward_of_a_mix_that_is_zero_nearly_everywhere(
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


def test_the_kl_of_denoising_steps_is_in_other_units() -> None:
    assert found(history({"kl": 5.0}), "denoising") == []


def test_one_step_an_iteration_clips_nothing_and_missing_metrics_say_nothing() -> None:
    assert found(history({"optimizer_steps": 1.0, "clip_ratio/region_mean": 0.0}, count=6)) == []
    assert found([Row(number, {"reward": 0.1}) for number in range(1, 9)]) == []
    # A hole in the metrics ends a row.
    sick = {"entropy": 0.0}
    holed = [*history(sick, count=2), Row(3, {}), *history(sick, count=2)]
    assert found(holed) == []


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
