"""Prompts are encoded once, and as the pipeline itself encodes them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from torch.utils._pytree import tree_leaves

from grpo_core.policies.diffusers.policy import DiffusersPolicy
from grpo_core.policies.diffusers.prompt_cache import PromptCache
from tests.grpo_core.policies.diffusers.tiny_pipelines import LENGTHS, MAKE, request, settings

SavedFolder = Callable[[str], Path]
SharedPolicy = Callable[[str], DiffusersPolicy]


def encoded(pipeline: Any, name: str, rows: int, prompt: str = "a red dot") -> Any:
    options: dict[str, Any] = {"max_sequence_length": LENGTHS[name]}
    if name == "sd3":
        options |= {"prompt_2": None, "prompt_3": None}
    if name in ("sd3", "z_image"):
        options |= {"do_classifier_free_guidance": True, "negative_prompt": ["blur"] * rows}
    return pipeline.encode_prompt(prompt=[prompt] * rows, **options)


@pytest.mark.parametrize("name", MAKE)
def test_rows_are_what_the_pipeline_encodes(saved_folder: SavedFolder, name: str) -> None:
    pipeline = diffusers.DiffusionPipeline.from_pretrained(str(saved_folder(name)))
    expected = [encoded(pipeline, name, rows) for rows in (1, 3)]
    PromptCache(pipeline)
    for rows, own in zip((1, 3), expected, strict=True):
        for _ in range(2):
            for got, wanted in zip(tree_leaves(encoded(pipeline, name, rows)), tree_leaves(own), strict=True):
                torch.testing.assert_close(got, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", MAKE)
def test_text_encoders_run_once_for_a_prompt(shared_policy: SharedPolicy, name: str) -> None:
    policy = shared_policy(name)
    policy.sample_with(settings(name, decode_batch_size=2))
    runs = []
    hook = policy.denoising.pipeline.text_encoder.register_forward_hook(lambda *_: runs.append(1))
    list(policy.sample([request("one prompt")]))
    first = len(runs)
    assert first > 0
    (group,) = policy.sample([request("one prompt", seed=5, samples=4)])
    policy.denoising.logprobs(group.streams["denoising"].actions)
    assert len(runs) == first
    list(policy.sample([request("another")]))
    assert first < len(runs) <= 2 * first
    hook.remove()


def test_other_settings_are_other_results(saved_folder: SavedFolder) -> None:
    pipeline = diffusers.DiffusionPipeline.from_pretrained(str(saved_folder("flux")))
    PromptCache(pipeline)
    short = pipeline.encode_prompt(prompt=["dot"], max_sequence_length=8)[0]
    assert pipeline.encode_prompt(prompt=["dot"], max_sequence_length=9)[0].shape[1] == short.shape[1] + 1
    assert not pipeline.encode_prompt(prompt=["ring"], max_sequence_length=8)[0].equal(short)


def test_several_prompts_have_the_embeddings_of_each_alone(saved_folder: SavedFolder) -> None:
    pipeline = diffusers.DiffusionPipeline.from_pretrained(str(saved_folder("flux")))
    cache = PromptCache(pipeline)
    assert cache.pads_to_one_length
    together = pipeline.encode_prompt(prompt=["dot", "ring", "dot"])
    for row, prompt in enumerate(["dot", "ring", "dot"]):
        for both, alone in zip(together[:2], pipeline.encode_prompt(prompt=[prompt])[:2], strict=True):
            assert torch.equal(both[row], alone[0])


def test_prompts_of_several_lengths_are_refused_in_one_call(saved_folder: SavedFolder) -> None:
    pipeline = diffusers.DiffusionPipeline.from_pretrained(str(saved_folder("qwen_image")))
    cache = PromptCache(pipeline)
    assert not cache.pads_to_one_length
    with pytest.raises(ValueError, match="one length"):
        pipeline.encode_prompt(prompt=["dot", "a much longer prompt"])


def test_the_oldest_results_are_dropped(saved_folder: SavedFolder) -> None:
    pipeline = diffusers.DiffusionPipeline.from_pretrained(str(saved_folder("flux")))
    runs = []
    pipeline.text_encoder.register_forward_hook(lambda *_: runs.append(1))
    one = sum(each.nbytes for each in pipeline.encode_prompt(prompt=["dot"], max_sequence_length=8))
    PromptCache(pipeline, max_bytes=2 * one)
    for prompt in ("dot", "ring", "dot", "bar"):
        pipeline.encode_prompt(prompt=[prompt], max_sequence_length=8)
    runs.clear()
    pipeline.encode_prompt(prompt=["dot"], max_sequence_length=8)
    assert not runs
    pipeline.encode_prompt(prompt=["ring"], max_sequence_length=8)
    assert len(runs) == 1
