"""Combinations that cannot be, each with the field to change."""

from typing import Any

import pytest

from configs.checks import contradictions
from configs.schema import RUN_CONFIGS
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
    values |= sections
    kind = values["policy"].get("kind", "glm_image")
    return contradictions(RUN_CONFIGS[kind].model_validate(values))


def places(**sections: Any) -> list[str]:
    return [error.place for error in found(**sections)]


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
    assert [error.hint.split("set ")[1][:9] for error in found(rewards=({"reward": "ssim"},), **both)] == [
        "data.targ",
        "evaluate.",
    ]
    both["data"] |= targets
    (error,) = found(rewards=({"reward": "ssim"},), **both)
    assert "evaluate.targets" in error.hint
    both["evaluate"] |= targets
    assert found(rewards=({"reward": "ssim"},), **both) == []


def test_minibatch_larger_than_an_iteration() -> None:
    assert found(update={"minibatch_size": 8}) == []
    (error,) = found(update={"minibatch_size": 9})
    assert "has 8 rows" in error.hint


def test_warm_up_needs_its_schedule() -> None:
    (error,) = found(update={"warmup_steps": 5})
    assert error.place == "update.warmup_steps"
    assert found(update={"warmup_steps": 5, "lr_scheduler": "constant_with_warmup"}) == []


def test_every_contradiction_is_told() -> None:
    wrong = found(rewards=({"reward": "ssim", "weight": 0.0},), update={"minibatch_size": 9, "warmup_steps": 5})
    assert len(wrong) == 4


KL_WITHOUT_A_REFERENCE = {"kl_coef": 0.1, "reference": {"placement": "none"}}
SCHEDULED = {"lr_scheduler": "linear", "warmup_steps": 5}


@pytest.mark.parametrize(
    ("sections", "place"),
    [
        ({"update": KL_WITHOUT_A_REFERENCE}, "update.kl_coef"),
        (
            {"advantages": {"kl_coef": 0.1}, "update": {"reference": {"placement": "none"}}},
            "advantages.kl_coef",
        ),
        ({"update": {"loss": "cispo", "importance_level": "sequence"}}, "update.importance_level"),
        ({"update": {"loss": "gspo", "importance_level": "token"}}, "update.importance_level"),
        ({"update": {"loss": "sapo", "delta": 3.0}}, "update.delta"),
        ({"update": {"delta": 1.1}}, "update.delta"),
        ({"update": {"loss": "cispo", "ratio_cap": 0.5}}, "update.ratio_cap"),
        ({"update": {"reference": {"refresh_every": 2}}}, "update.reference.refresh_every"),
        ({"update": {"kl_coef": 0.1, "reference": {"placement": "cpu"}}}, "update.reference.placement"),
        ({"update": {"mask_truncated": True}}, "update.mask_truncated"),
        ({"update": {"total_steps": 9}}, "update.total_steps"),
        ({"update": {**SCHEDULED, "total_steps": 5}}, "update.warmup_steps"),
        ({"update": SCHEDULED, "run": {"name": "x", "iterations": 5}}, "update.warmup_steps"),
        ({"advantages": {"aggregation": "normalize_then_sum", "baseline": "leave_one_out"}}, "advantages.baseline"),
        ({"advantages": {"aggregation": "normalize_then_sum", "scale": "none"}}, "advantages.scale"),
        ({"policy": {"model": "m", "lora": None}}, "policy.dtype"),
        ({"policy": {"model": "m", "frozen": ".*embed.*"}}, "policy.frozen"),
        ({"policy": {"model": "m", "autocast": "bfloat16"}}, "policy.autocast"),
        ({"rewards": ({"reward": "answer"},)}, "rewards.0.reward"),
        (
            {
                "policy": {"kind": "causal_lm", "model": "m"},
                "rollout": {"max_completion_length": 8},
            },
            "rewards.0.reward",
        ),
    ],
)
def test_what_cannot_be_names_the_field_to_change(sections: dict[str, Any], place: str) -> None:
    assert places(**sections) == [place]


@pytest.mark.parametrize(
    "sections",
    [
        {"update": {"kl_coef": 0.1, "reference": {"refresh_every": 2, "mix": 0.5}}},
        {"update": {"loss": "gspo"}},
        {"update": {"loss": "cispo", "ratio_cap": 3.0}},
        {"update": {"delta": 1.5}},
        {"update": {**SCHEDULED, "total_steps": 6}},
        {"update": SCHEDULED, "run": {"name": "x", "iterations": 6}},
        {"advantages": {"kl_coef": 0.1}},
        {"advantages": {"aggregation": "normalize_then_sum"}},
        {"policy": {"model": "m", "dtype": "float32", "lora": None, "frozen": "x"}},
        {"policy": {"model": "m", "dtype": "float32", "autocast": "bfloat16"}},
        {
            "policy": {"kind": "causal_lm", "model": "m"},
            "rollout": {"max_completion_length": 8},
            "rewards": ({"reward": "answer"},),
            "update": {"mask_truncated": True},
        },
    ],
)
def test_neighbours_of_these_are_fine(sections: dict[str, Any]) -> None:
    assert found(**sections) == []


def test_a_name_that_a_stored_tables_manifest_would_have() -> None:
    (error,) = found(rewards=({**JPEG, "name": "x.manifest.json"},))
    assert "The manifests of stored tables end with" in error.hint


def test_each_field_of_a_term_is_told_where_it_stands() -> None:
    wrong = found(rewards=(JPEG, {**JPEG, "name": "gate", "role": "gate", "weight": 2.0}))
    assert [(error.place, error.value) for error in wrong] == [("rewards.1.weight", 2.0)]
    assert places(rewards=({**JPEG, "threshold": 0.5},)) == ["rewards.0.threshold"]
    assert places(rewards=({**JPEG, "normalize": "range"},)) == ["rewards.0.range"]
    assert places(rewards=({**JPEG, "clamp": (1.0, 0.0)},)) == ["rewards.0.clamp"]
    assert places(rewards=({**JPEG, "role": "gate"},)) == ["rewards"]
    twice = found(rewards=({**JPEG, "normalize": "group"},), advantages={"aggregation": "normalize_then_sum"})
    assert [error.place for error in twice] == ["rewards.0.normalize"]


def test_a_image_that_is_too_small_or_too_long_for_a_reward() -> None:
    targets = {"data": {"prompts": "p.txt", "targets": "t"}}
    small = {"height": 8, "width": 64, "prompts_per_iteration": 2, "group_size": 4}
    (error,) = found(rewards=({"reward": "ssim"},), rollout=small, **targets)
    assert (error.value, "at least 11 pixels a side" in error.hint) == ("ssim of 64x8 pixels", True)
    long = {**small, "height": 32, "width": 288}
    (error,) = found(rewards=({"reward": "text_accuracy"},), rollout=long)
    assert "at most 8 times the short one" in error.hint
    assert found(rewards=({"reward": "text_accuracy"},), rollout={**long, "width": 256}) == []
