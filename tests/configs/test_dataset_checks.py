"""Prompt files that cannot be used together, and rewards that are meant for datasets that are not there."""

from typing import Any

import pytest

from configs.dataset_checks import dataset_contradictions
from configs.schema import RunConfig
from grpo_core.errors import InputError

JPEG: dict[str, Any] = {"reward": "jpeg", "settings": {"direction": "compressible"}}
TWO = ({"name": "a", "prompts": "a.txt"}, {"name": "b", "prompts": "b.txt"})


def config(**sections: Any) -> RunConfig:
    values: dict[str, Any] = {
        "run": {"name": "x", "iterations": 1},
        "policy": {"model": "somewhere"},
        "data": {"prompts": "prompts.txt"},
        "rollout": {},
        "rewards": (JPEG,),
    }
    return RunConfig.model_validate({**values, **sections})


def found(**sections: Any) -> list[InputError]:
    return list(dataset_contradictions(config(**sections)))


@pytest.mark.parametrize("data", [{"prompts": "p.txt", "limit": 3}, {"datasets": TWO}])
@pytest.mark.parametrize("evaluate", [{}, {"prompts": "q.txt"}, {"datasets": TWO}])
def test_nothing_is_wrong(data: dict[str, Any], evaluate: dict[str, Any]) -> None:
    assert found(data=data, evaluate=evaluate) == []


def test_no_prompts_at_all() -> None:
    (error,) = found(data={})
    assert (error.place, error.value) == ("data.prompts", None)


def test_one_file_beside_several() -> None:
    errors = found(
        data={"datasets": TWO, "prompts": "p.txt", "targets": "folder"}, evaluate={"datasets": TWO, "limit": 3}
    )
    assert [(error.place, error.value) for error in errors] == [
        ("data.prompts", "p.txt"),
        ("data.targets", "folder"),
        ("evaluate.limit", 3),
    ]


def test_two_datasets_of_one_name() -> None:
    (error,) = found(data={"datasets": (*TWO, TWO[0])})
    assert (error.place, error.value) == ("data.datasets", "a")


def test_rewards_name_datasets_that_are_there() -> None:
    (error,) = found(data={"datasets": TWO}, rewards=(JPEG, {**JPEG, "name": "other", "datasets": ("b", "c")}))
    assert (error.place, error.value) == ("rewards.1.datasets", "c")
    assert "there is a, b." in error.hint
    (error,) = found(rewards=(JPEG, {**JPEG, "name": "other", "datasets": ("b",)}))
    assert "there is default." in error.hint
    (error,) = found(rewards=(JPEG, {**JPEG, "name": "other", "datasets": ()}))
    assert error.place == "rewards.1.datasets"


def test_every_dataset_has_a_reward_with_a_weight() -> None:
    of_a = {**JPEG, "datasets": ("a",)}
    (error,) = found(data={"datasets": TWO}, rewards=(of_a,))
    assert (error.place, error.value) == ("data.datasets", "b")
    (error,) = found(data={"datasets": TWO[:1]}, evaluate={"prompts": "q.txt"}, rewards=(of_a,))
    assert (error.place, error.value) == ("evaluate.prompts", "default")
    of_b = {**JPEG, "name": "other", "datasets": ("b",), "weight": 0.0}
    assert [error.value for error in found(data={"datasets": TWO}, rewards=(of_a, of_b))] == ["b"]
    assert found(data={"datasets": TWO}, rewards=(of_a, {**of_b, "weight": -1.0})) == []
