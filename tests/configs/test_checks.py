"""Combinations that cannot be, each with the field to change."""

from typing import Any

import pytest

from configs.checks import contradictions
from configs.schema import RunConfig
from grpo_core.errors import InputError

JPEG = {"reward": "jpeg", "settings": {"direction": "compressible"}}


def found(**sections: Any) -> list[InputError]:
    values: dict[str, Any] = {
        "run": {"name": "x", "iterations": 1},
        "policy": {"model": "somewhere"},
        "data": {"prompts": "prompts.txt"},
        "rollout": {"height": 64, "width": 64, "prompts_per_iteration": 2, "group_size": 4},
        "rewards": (JPEG,),
    }
    return contradictions(RunConfig.model_validate({**values, **sections}))


def test_nothing_is_wrong_with_a_plain_configuration() -> None:
    assert found() == []


def test_two_rewards_of_one_name() -> None:
    (error,) = found(rewards=(JPEG, JPEG))
    assert (error.place, error.value) == ("rewards", "jpeg")
    assert found(rewards=(JPEG, {**JPEG, "name": "again"})) == []


def test_only_zero_weights() -> None:
    (error,) = found(rewards=({**JPEG, "weight": 0.0},))
    assert error.value == [0.0]
    assert found(rewards=({**JPEG, "weight": -1.0},)) == []


def test_reward_settings_are_checked_where_they_stand() -> None:
    (error,) = found(rewards=(JPEG, {"reward": "psnr", "name": "p", "settings": {"scale": 1}}))
    assert error.place.startswith("rewards.1")
    assert error.value == "scale"


@pytest.mark.parametrize("targets", [{"targets": "folder"}, {"target_column": "target"}])
def test_reward_that_compares_needs_targets_in_both_sections(targets: dict[str, str]) -> None:
    both = {"data": {"prompts": "p.txt"}, "evaluate": {"prompts": "q.txt"}}
    assert [error.mend.split("set ")[1][:9] for error in found(rewards=({"reward": "ssim"},), **both)] == [
        "data.targ",
        "evaluate.",
    ]
    both["data"] |= targets
    (error,) = found(rewards=({"reward": "ssim"},), **both)
    assert "evaluate.targets" in error.mend
    both["evaluate"] |= targets
    assert found(rewards=({"reward": "ssim"},), **both) == []


def test_minibatch_larger_than_an_iteration() -> None:
    assert found(update={"minibatch_size": 8}) == []
    (error,) = found(update={"minibatch_size": 9})
    assert "has 8 rows" in error.mend


def test_warm_up_needs_its_schedule() -> None:
    (error,) = found(update={"warmup_steps": 5})
    assert error.place == "update.warmup_steps"
    assert found(update={"warmup_steps": 5, "lr_scheduler": "constant_with_warmup"}) == []


def test_every_contradiction_is_told() -> None:
    wrong = found(rewards=({"reward": "ssim", "weight": 0.0},), update={"minibatch_size": 9, "warmup_steps": 5})
    assert len(wrong) == 4
