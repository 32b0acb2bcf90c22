"""What the source of diffusers says about its classes of pipelines."""

import importlib
import inspect

import pytest

from grpo_core.policies.diffusers.pipeline_class import find_pipeline_class


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("FluxImg2ImgPipeline", "takes an image"),
        ("FluxFillPipeline", "takes mask_image"),
        ("FluxControlPipeline", "takes control_image"),
        ("WanPipeline", "takes num_frames"),
        ("GlmImagePipeline", "takes prior_token_ids"),
        ("HunyuanImagePipeline", "guidance is not an argument"),
        ("Kandinsky5T2IPipeline", "from the steps of one scheduler to images"),
        ("StableDiffusionXLPipeline", "no transformer"),
        ("OmniGenPipeline", "encode_prompt"),
        ("StableAudio3Pipeline", "takes no height, width"),
    ],
)
def test_other_classes_have_a_reason(name: str, problem: str) -> None:
    described = find_pipeline_class(name)
    assert described is not None
    assert described.problem is not None
    assert problem in described.problem


def test_a_class_that_does_not_exist_is_not_found() -> None:
    assert find_pipeline_class("NoSuchPipeline") is None


@pytest.mark.parametrize("name", ["StableDiffusion3Pipeline", "FluxPipeline", "QwenImagePipeline", "ZImagePipeline"])
def test_defaults_are_those_of_the_imported_class(name: str) -> None:
    described = find_pipeline_class(name)
    assert described is not None
    arguments = inspect.signature(getattr(importlib.import_module("diffusers"), name).__call__).parameters
    assert list(described.call) == list(arguments)[1:]
    for argument, default in described.call.items():
        if argument not in ("callback_on_step_end_tensor_inputs",):
            assert default == arguments[argument].default
