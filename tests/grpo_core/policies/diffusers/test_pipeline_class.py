"""What is known of diffusers' classes of pipelines, from the table and from the classes."""

import inspect
import re

import diffusers
import pytest

from grpo_core.policies.diffusers.pipeline_class import TRIED, describe_class, find_pipeline_class


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("FluxImg2ImgPipeline", "takes an image"),
        ("FluxFillPipeline", "takes mask_image"),
        ("FluxControlPipeline", "takes control_image"),
        ("WanPipeline", "takes num_frames"),
        ("GlmImagePipeline", "takes prior_token_ids"),
        ("HunyuanImagePipeline", "guidance is not an argument"),
        ("Kandinsky5T2IPipeline", "does not return images"),
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


@pytest.mark.parametrize("name", ["NoSuchPipeline", "FluxTransformer2DModel"])
def test_what_is_no_pipeline_of_diffusers_is_not_found(name: str) -> None:
    assert find_pipeline_class(name) is None


@pytest.mark.parametrize("name", TRIED)
def test_the_table_says_what_the_imported_class_shows(name: str) -> None:
    tried, pipeline = TRIED[name], getattr(diffusers, name)
    shown = describe_class(pipeline)
    given = ("guidance_scale", "true_cfg_scale", "negative_prompt", "max_sequence_length")
    assert tried.call == {argument: shown.call[argument] for argument in given if argument in shown.call}
    assert (tried.packs, tried.no_guidance, tried.problem) == (shown.packs, shown.no_guidance, shown.problem)
    checks = inspect.getsource(pipeline.check_inputs) if hasattr(pipeline, "check_inputs") else ""
    bound = re.search(r"max_sequence_length > (\d+)", checks)
    assert tried.longest_prompt == (None if bound is None else int(bound[1]))
