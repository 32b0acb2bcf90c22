"""Every family passes its trial on a small copy; a model that looks at no image, or reads it wrongly, does not."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from grpo_core.errors import InputError
from grpo_core.policies.vision_lm.compatibility import (
    refuse_incompatible,
    refuse_incompatible_model,
    small_copy,
    trial_prompts,
    try_copy,
)
from tests.grpo_core.policies.causal_lm.model_types import change_inputs
from tests.grpo_core.policies.vision_lm.model_families import PAGE, TABLE, describe, page, released
from tests.grpo_core.policies.vision_lm.tiny_families import KINDS, build, make_model

EXPECTED = json.loads(TABLE.read_text())


# With deepstack, with a projector that is one parameter, with a layer that nothing reads, and with tiles.
QUICK = ("qwen3_vl", "gemma3", "llava", "internvl")


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in KINDS]
)
def test_a_family_passes_on_a_small_copy(kind: str) -> None:
    config, processor = build(kind)
    assert try_copy(config, *trial_prompts(config, processor)) == (True, None)


def test_the_page_lists_every_family_with_what_was_measured() -> None:
    """`python -m tests.grpo_core.policies.vision_lm.model_families` writes both."""
    assert EXPECTED.keys() == set(KINDS)
    assert PAGE.read_text() == page(EXPECTED)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_the_page_says_holds(kind: str) -> None:
    found, expected = describe(kind), EXPECTED[kind]
    assert found["difference"] < 1e-5
    assert {**found, "difference": 0, "other_image": 0} == {**expected, "difference": 0, "other_image": 0}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_of_a_released_model_is_small_and_passes(kind: str) -> None:
    config, processor = released(kind)
    placeholders, *prompts = trial_prompts(config, processor)
    assert try_copy(config, placeholders, *prompts) == (True, None)


def plain_positions(given: dict[str, Any]) -> None:
    if given.get("position_ids") is not None:
        counted = given["attention_mask"].cumsum(-1) - 1
        given["position_ids"] = counted[:, -given["input_ids"].shape[1] :].expand(3, -1, -1)


def no_images(given: dict[str, Any]) -> None:
    given.pop("mm_encoder_outputs", None)
    given.pop("pixel_values", None)


def no_types(given: dict[str, Any]) -> None:
    # A plain pass has no positions.
    if given.get("position_ids") is not None:
        given.pop("token_type_ids", None)


MISTAKES: dict[str, tuple[str, Callable[[dict[str, Any]], object], str]] = {
    "positions in one row": ("qwen3_vl", plain_positions, "differ"),
    "types of ids left out": ("paligemma", no_types, "differ"),
    "images left out on both sides": ("llava", no_images, "does not see"),
    "images left out on one side": ("llava", lambda given: given.pop("mm_encoder_outputs", None), "differ"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_wrong_log_probs_and_blind_models_are_refused(mistake: str) -> None:
    kind, change, named = MISTAKES[mistake]
    model, processor = make_model(kind)
    refuse_incompatible_model(kind, model, processor)
    change_inputs(model, change)
    with pytest.raises(InputError, match=named) as caught:
        refuse_incompatible_model(kind, model, processor)
    assert caught.value.place == "policy.model"


def test_a_model_whose_projector_is_zero_is_blind() -> None:
    """Parity alone would pass it: both sides see nothing."""
    model, processor = make_model("gemma3")
    with torch.no_grad():
        model.model.multi_modal_projector.mm_input_projection_weight.zero_()
    with pytest.raises(InputError, match="does not see its images"):
        refuse_incompatible_model("gemma3", model, processor)


def test_a_small_copy_keeps_the_ids_of_images_apart() -> None:
    config, processor = build("glm4v")
    placeholders, *_ = trial_prompts(config, processor)
    ids = {each: 32 + index for index, each in enumerate(placeholders.ids)}
    copy = small_copy(config, ids, 0)
    assert copy is not None
    assert copy.config.image_token_id == ids[config.image_token_id]
    assert copy.config.vision_config.out_hidden_size == copy.config.text_config.hidden_size < 64
    assert refuse_incompatible("some/model", config, processor)
