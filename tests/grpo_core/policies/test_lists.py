"""The pages list every type, family and class of pipeline as the code sees it."""

import pytest

from grpo_core.policies.causal_lm.model_types import TRIED as TYPES
from grpo_core.policies.diffusers.accepted_pipelines import TRIED as TRIED_CLASSES
from tests.grpo_core.policies.lists import (
    PAGES,
    describe,
    left_out,
    measure,
    outcome,
    read_table,
    refused_types,
    section,
)
from tests.grpo_core.policies.vision_lm.tiny_families import KINDS


@pytest.mark.parametrize("name", PAGES)
def test_the_pages_show_the_lists(name: str) -> None:
    assert section(name) in PAGES[name].read_text()


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted(TYPES))
def test_a_type_leaves_out_what_the_table_says(model_type: str) -> None:
    assert left_out(model_type) == read_table("types")["left_out"].get(model_type, [])


@pytest.mark.slow
def test_types_are_refused_as_the_table_says() -> None:
    assert refused_types() == read_table("types")["refused"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_family_is_what_the_table_says(kind: str) -> None:
    found, expected = describe(kind), read_table("families")[kind]
    assert found["difference"] < 1e-5
    assert {**found, "difference": 0, "other_image": 0} == {**expected, "difference": 0, "other_image": 0}


# One of each list, and one for each reason.
QUICK = (
    *("FluxPipeline", "PRXPipeline", "PixArtSigmaPipeline", "OmniGenPipeline", "StableDiffusionXLPipeline"),
    *("FluxImg2ImgPipeline", "FluxFillPipeline", "WanPipeline", "GlmImagePipeline", "HunyuanImagePipeline"),
    *("Kandinsky5T2IPipeline", "StableAudio3Pipeline"),
)


@pytest.mark.parametrize("name", QUICK)
def test_a_class_is_what_the_table_says(name: str) -> None:
    assert outcome(name) == read_table("classes")[name]


@pytest.mark.slow
def test_every_class_is_what_the_table_says() -> None:
    assert measure("classes") == read_table("classes")


def test_classes_that_are_called_tried() -> None:
    assert {name for name, each in read_table("classes").items() if each == "tried"} == set(TRIED_CLASSES)
