"""The pages list every type, family and class of pipeline as the code sees it."""

import json
from typing import Any

import pytest

from grpo_core.policies.causal_lm.model_types import TRIED as TYPES
from grpo_core.policies.diffusers.pipeline_class import TRIED as CLASSES
from tests.grpo_core.policies.causal_lm import model_types
from tests.grpo_core.policies.diffusers import pipeline_classes
from tests.grpo_core.policies.vision_lm import model_families
from tests.grpo_core.policies.vision_lm.tiny_families import KINDS


def table(lists: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(lists.TABLE.read_text())
    return found


def test_the_pages_show_the_lists() -> None:
    """`python -m` a module writes its own."""
    assert model_types.section() in model_types.PAGE.read_text()
    for lists in (model_families, pipeline_classes):
        assert lists.section(table(lists)) in lists.PAGE.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(TYPES))
def test_a_type_leaves_out_what_the_table_says(model_type: str) -> None:
    assert model_types.left_out(model_type) == table(model_types).get(model_type, [])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_family_is_what_the_table_says(kind: str) -> None:
    found, expected = model_families.describe(kind), table(model_families)[kind]
    assert found["difference"] < 1e-5
    assert {**found, "difference": 0, "other_image": 0} == {**expected, "difference": 0, "other_image": 0}


# One of each list, and one for each reason that is not read off the arguments.
QUICK = ("FluxPipeline", "PRXPipeline", "PixArtSigmaPipeline", "OmniGenPipeline", "StableDiffusionXLPipeline")


@pytest.mark.parametrize("name", QUICK)
def test_a_class_is_what_the_table_says(name: str) -> None:
    assert pipeline_classes.outcome(name) == table(pipeline_classes)[name]


@pytest.mark.slow
def test_every_class_is_what_the_table_says() -> None:
    found = {name: pipeline_classes.outcome(name) for name in pipeline_classes.CLASSES}
    assert {name: each for name, each in found.items() if each is not None} == table(pipeline_classes)


def test_classes_that_are_called_tried() -> None:
    assert {name for name, each in table(pipeline_classes).items() if each == "tried"} == set(CLASSES)
