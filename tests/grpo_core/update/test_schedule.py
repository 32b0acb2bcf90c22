"""Each schedule against transformers' own, stepped without a break; values by hand; what cannot be computed."""

from collections.abc import Mapping
from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_scheduler

from grpo_core.errors import InputError
from grpo_core.update.settings import LearningRateSchedule, OptimizerSettings, Schedule, ScheduleValue

WARMUP, TOTAL, RATE = 3, 12, 1e-2
KWARGS: dict[str, dict[str, ScheduleValue]] = {
    "cosine": {"num_cycles": 0.7},
    "cosine_with_restarts": {"num_cycles": 2},
    "polynomial": {"lr_end": 1e-4, "power": 2.0},
    "inverse_sqrt": {"timescale": 5},
    "cosine_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 4, "decay_type": "1-sqrt", "min_lr_ratio": 0.05},
}
CASES = [(name, kwargs) for name in get_args(Schedule) for kwargs in ({}, KWARGS.get(name, {}))]
# These two cannot do without theirs.
CASES = [case for case in CASES if case[1] or case[0] not in ("cosine_with_min_lr", "warmup_stable_decay")]


def unbroken(name: str, kwargs: Mapping[str, ScheduleValue], steps: int) -> list[float]:
    """What transformers' scheduler gives, stepped as in its documentation."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=RATE)
    scheduler = get_scheduler(name, optimizer, WARMUP, TOTAL, scheduler_specific_kwargs=dict(kwargs))
    rates = []
    for _ in range(steps):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        weight.grad = torch.zeros(1)
        optimizer.step()
        scheduler.step()
    return rates


def schedule(name: str, **changes: object) -> LearningRateSchedule:
    values = {"warmup_steps": WARMUP, "total_steps": TOTAL, "lr_scheduler_kwargs": KWARGS.get(name, {}), **changes}
    return OptimizerSettings(RATE, lr_scheduler=name, **values).schedule()  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "kwargs"), CASES)
def test_rates_are_those_of_an_unbroken_scheduler(name: Schedule, kwargs: dict[str, ScheduleValue]) -> None:
    """Asked for the last step first: a rate depends on no earlier call."""
    ours = schedule(name, lr_scheduler_kwargs=kwargs)
    expected = unbroken(name, kwargs, TOTAL + 1)
    assert [ours(step) for step in reversed(range(TOTAL + 1))] == expected[::-1]


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("linear", 0.0),
        ("cosine_with_restarts", 0.0),
        ("polynomial", 1e-4),
        ("cosine_with_min_lr", 1e-3),
        ("warmup_stable_decay", 5e-4),
    ],
)
def test_beyond_its_length_a_schedule_holds_its_last_rate(name: Schedule, last: float) -> None:
    ours = schedule(name, lr_scheduler_kwargs={} if name == "linear" else KWARGS[name])
    assert [ours(step) for step in (TOTAL, TOTAL + 1, 2 * TOTAL, 50 * TOTAL)] == pytest.approx([last] * 4)


def test_a_cosine_does_not_rise_again() -> None:
    """transformers' own does, from its lowest point at the end; without this the test above would be of no use."""
    assert unbroken("cosine", {}, 2 * TOTAL)[-1] > 5e-3
    assert schedule("cosine", lr_scheduler_kwargs={})(2 * TOTAL - 1) == pytest.approx(0.0, abs=1e-12)


@given(
    name=st.sampled_from([name for name in get_args(Schedule) if name != "constant"]),
    warmup=st.integers(0, 8),
    step=st.integers(0, 40),
)
def test_no_rate_is_negative_or_above_the_learning_rate(name: Schedule, warmup: int, step: int) -> None:
    assert 0 <= schedule(name, warmup_steps=warmup)(step) <= RATE * (1 + 1e-12)


@pytest.mark.parametrize("name", ["linear", "cosine", "polynomial", "warmup_stable_decay", "cosine_with_min_lr"])
def test_a_missing_length_is_refused(name: Schedule) -> None:
    with pytest.raises(InputError) as caught:
        OptimizerSettings(RATE, lr_scheduler=name, warmup_steps=WARMUP)
    assert (caught.value.place, caught.value.value) == ("update.lr_scheduler", name)


@pytest.mark.parametrize("warmup", [12, 13])
def test_a_warm_up_as_long_as_the_run_is_refused(warmup: int) -> None:
    with pytest.raises(InputError) as caught:
        schedule("polynomial", warmup_steps=warmup)
    assert (caught.value.place, caught.value.value) == ("update.warmup_steps", warmup)


@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("cosine", {"cycles": 2}),
        ("cosine", {"num_cycles": "many"}),
        ("constant", {"num_cycles": 1}),
        ("cosine_with_min_lr", {}),
        ("polynomial", {"lr_end": 0.1}),
        ("polynomial", {"lr_end": -0.1}),
        ("warmup_stable_decay", {}),
        ("warmup_stable_decay", {"num_decay_steps": 10}),
        ("warmup_stable_decay", {"num_decay_steps": 2, "num_stable_steps": 3}),
        ("warmup_stable_decay", {"num_decay_steps": 2, "decay_type": "steep"}),
        ("warmup_stable_decay", {"num_decay_steps": 2, "min_lr_ratio": -1}),
    ],
)
def test_values_that_give_no_schedule_are_refused(name: Schedule, kwargs: dict[str, ScheduleValue]) -> None:
    with pytest.raises(InputError) as caught:
        schedule(name, lr_scheduler_kwargs=kwargs)
    assert (caught.value.place, caught.value.value) == ("update.lr_scheduler_kwargs", kwargs)
