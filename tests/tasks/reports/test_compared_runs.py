""""""

import numpy as np
import pytest

from tasks.reports.compared_runs import PairedDifference, Scores, interval, paired_difference


def paired(first: Scores, second: Scores) -> PairedDifference | None:
    return paired_difference(first, second, run="r", score="reward", same_seeds=True)


def test_prompts_are_paired_by_hand() -> None:
    first = {"a": {1: 0.2, 2: 0.4}, "b": {1: 0.5}, "only here": {1: 9.0}}
    second = {"a": {1: 0.4, 2: 0.8, 3: 9.0}, "b": {1: 0.4}, "only there": {1: 9.0}}
    found = paired(first, second)
    assert found is not None
    assert found.by_prompt == {"a": pytest.approx(0.3), "b": pytest.approx(-0.1)}
    assert (found.first, found.second, found.difference) == pytest.approx((0.4, 0.5, 0.1))
    # 12.7062 is Student's t of one degree of freedom, and 0.2828 / sqrt(2) = 0.2 the standard error.
    assert (found.low, found.high) == pytest.approx((0.1 - 2.54124, 0.1 + 2.54124), abs=1e-5)
    assert (found.prompts, found.samples, found.higher, found.lower) == (2, 3, 1, 1)


def test_three_prompts_by_hand() -> None:
    assert interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5), abs=1e-6)
    assert interval([0.5, 0.5]) == (0.5, 0.5)
    assert interval([0.5]) is None


def test_without_a_common_seed_means_are_compared() -> None:
    found = paired({"a": {1: 1.0, 2: 3.0}}, {"a": {7: 5.0}})
    assert found is not None
    assert (found.difference, found.samples, found.low, found.high) == (3.0, 3, None, None)
    assert paired({"a": {1: 1.0}}, {"b": {1: 1.0}}) is None
    assert paired({"a": {1: 1.0}}, {"a": {}}) is None


def test_intervals_cover_as_often_as_they_say_if_the_prompt_is_the_unit() -> None:
    """Samples of a prompt share its effect; an interval over single samples takes them for independent."""
    random = np.random.default_rng(0)
    trials, prompts, samples, true = 1000, 12, 4, 0.3
    by_prompt, by_sample = 0, 0
    for _ in range(trials):
        differences = true + random.normal(0, 1, (prompts, 1)) + random.normal(0, 0.5, (prompts, samples))
        levels = random.normal(0, 5, (prompts, samples))
        first = {str(row): dict(enumerate(levels[row])) for row in range(prompts)}
        second = {str(row): dict(enumerate(levels[row] + differences[row])) for row in range(prompts)}
        found = paired(first, second)
        assert found is not None
        assert found.low is not None
        assert found.high is not None
        by_prompt += found.low <= true <= found.high
        ends = interval(differences.ravel())
        assert ends is not None
        by_sample += ends[0] <= true <= ends[1]
    assert 0.93 <= by_prompt / trials <= 0.97
    assert by_sample / trials < 0.8
