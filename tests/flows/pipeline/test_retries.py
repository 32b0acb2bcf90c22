"""Faults that pass by themselves are waited out, with the same run at the end; all others end it at once."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from grpo_core.errors import InputError
from tasks.rollouts import collect as stage
from tests.flows.conftest import Runs, Start

Compare = Callable[[Runs, Start], None]
QUICK: dict[str, object] = {"placement__retries__delay": 0.05}


class Failing:
    """Collects as ever, but raises on the first so many calls."""

    def __init__(self, error: Exception, times: int) -> None:
        self.error, self.times, self.calls = error, times, 0
        self.collect = stage.collect_rollouts

    def __call__(self, *args: Any, **kwargs: Any) -> Iterator[Any]:
        self.calls += 1
        groups = self.collect(*args, **kwargs)
        yield next(groups)
        if self.calls <= self.times:
            raise self.error
        yield from groups


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception, int], Failing]:
    def install(error: Exception, times: int) -> Failing:
        failing = Failing(error, times)
        monkeypatch.setattr(stage, "collect_rollouts", failing)
        return failing

    return install


def test_a_connection_that_comes_back(
    empty: Runs, final: Compare, failing: Callable[[Exception, int], Failing]
) -> None:
    broken = failing(ConnectionResetError("the bucket hung up"), 2)
    final(empty, empty.start(**QUICK))
    # Two iterations, and the first of them three times.
    assert broken.calls == 4
    assert not [path for path in empty.path(".incoming").iterdir() if path.is_dir()]


def test_no_more_often_than_is_said(empty: Runs, failing: Callable[[Exception, int], Failing]) -> None:
    broken = failing(ConnectionResetError("the bucket hung up"), 99)
    with pytest.raises(ConnectionResetError, match="hung up"):
        empty.start(**QUICK, placement__retries__storage=1)
    assert broken.calls == 2
    broken.calls = 0
    with pytest.raises(ConnectionResetError, match="hung up"):
        empty.start(**QUICK, placement__retries__storage=0)
    assert broken.calls == 1


@pytest.mark.parametrize("error", [InputError("policy.model", "x", "hint"), ArithmeticError("NaN"), KeyError("a bug")])
def test_what_would_come_again_is_not_tried_again(
    empty: Runs, failing: Callable[[Exception, int], Failing], error: Exception
) -> None:
    broken = failing(error, 99)
    with pytest.raises(type(error)):
        empty.start(**QUICK)
    assert broken.calls == 1
