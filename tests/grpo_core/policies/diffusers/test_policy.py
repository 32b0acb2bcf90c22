"""Prompts are encoded once, and as the pipeline itself encodes them."""

import itertools
import logging
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils._pytree import tree_leaves

from grpo_core.actions import DenoisingBatch
from grpo_core.collect import collect_rollouts, join_groups
from grpo_core.errors import InputError
from grpo_core.policies.diffusers.policy import DiffusersPolicy
from grpo_core.policies.diffusers.prompt_cache import PromptCache
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from grpo_core.records import ActionLogprobs, RolloutGroup
from grpo_core.seeds import make_generator
from grpo_core.streams import ImageSize
from grpo_core.update.optimizer import PolicyOptimizer
from grpo_core.update.policy_update import update_policy
from grpo_core.update.settings import OptimizerSettings, UpdateSettings
from tests.grpo_core.policies.denoising.tiny_pipelines import GUIDANCE
from tests.grpo_core.policies.diffusers.tiny_pipelines import (
    LENGTHS,
    MAKE,
    SavedFolder,
    SharedPolicy,
    load,
    request,
    settings,
)


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


# The others pad as one of these does: all prompts to one length, or each to its own.
BY_PADDING = [pytest.param(name, marks=() if name in ("sd3", "qwen_image") else pytest.mark.slow) for name in MAKE]


@pytest.mark.parametrize("name", BY_PADDING)
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


def test_only_prompts_of_the_user_are_warned_of(saved_folder: SavedFolder) -> None:
    pipeline = diffusers.DiffusionPipeline.from_pretrained(str(saved_folder("sd3")))
    warned: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.name)  # type: ignore[method-assign]
    libraries = [logging.getLogger(name) for name in ("diffusers", "transformers")]
    for library in libraries:
        library.addHandler(handler)
    cache = PromptCache(pipeline)
    assert cache.pads_to_one_length
    assert warned == []
    pipeline.encode_prompt(prompt=["dot " * 200], prompt_2=None, prompt_3=None)
    assert warned
    for library in libraries:
        library.removeHandler(handler)


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


TINY_SD3 = Path(__file__).parents[4] / "data" / "models" / "tiny-sd3"


def pixels(image: Any) -> np.ndarray:
    assert isinstance(image, Image.Image)
    return np.asarray(image).astype(int)


def sampled(policy: DiffusersPolicy, *requests: Any) -> list[RolloutGroup]:
    return list(collect_rollouts(policy, requests, prompts_per_batch=2))


def scored(policy: DiffusersPolicy, group: RolloutGroup, rows: Any = slice(None), **options: Any) -> ActionLogprobs:
    actions = group.streams["denoising"].actions
    assert isinstance(actions, DenoisingBatch)
    return policy.denoising.logprobs(actions.select(range(len(actions))[rows]), **options)


# A cached prompt is read in the dtype it was encoded in, so a policy has one precision for good.
PRECISIONS: dict[str, tuple[dict[str, Any], float]] = {
    "fp32": ({}, 1e-6),
    "16 bits": ({"dtype": torch.bfloat16}, 1e-5),
    "autocast": ({"autocast": torch.bfloat16}, 1e-5),
}


QUICK = {*((name, "fp32") for name in MAKE), ("sd3", "16 bits")}


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning")
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        pytest.param(name, precision, marks=() if (name, precision) in QUICK else pytest.mark.slow)
        for name, precision in itertools.product(MAKE, PRECISIONS)
    ],
)
def test_unchanged_weights_give_a_ratio_of_one(
    saved_folder: SavedFolder, shared_policy: SharedPolicy, name: str, precision: str
) -> None:
    options, tolerance = PRECISIONS[precision]
    policy = load(saved_folder(name), settings(name), **options) if options else shared_policy(name)
    for window_start in (0, 2) if precision == "fp32" else (1,):
        for group in sampled(policy, request(window_start=window_start), request("blue", window_start=window_start)):
            stored = group.streams["denoising"].rollout_logprobs
            assert stored.std() > 1e-3
            torch.testing.assert_close(scored(policy, group).logprobs, stored, atol=tolerance, rtol=0)


def test_guidance_is_part_of_what_is_scored(shared_policy: SharedPolicy) -> None:
    for name in MAKE:
        policy = shared_policy(name)
        (group,) = sampled(policy, request(samples=1))
        before = scored(policy, group).logprobs
        policy.sample_with(settings(name, guidance_scale=GUIDANCE[name] + 1))
        assert (scored(policy, group).logprobs - before).abs().max() > 1e-5, name


@pytest.mark.parametrize("name", BY_PADDING)
def test_a_sample_does_not_depend_on_other_rows(shared_policy: SharedPolicy, name: str) -> None:
    policy = shared_policy(name)
    (together,) = sampled(policy, request())
    _, second = sampled(policy, request("green ring", seed=9), request())
    policy.sample_with(settings(name, decode_batch_size=1))
    (apart,) = sampled(policy, request())
    # Matrix products of another shape round differently: by up to 2e-6 of the log-prob here.
    torch.testing.assert_close(
        together.streams["denoising"].rollout_logprobs,
        apart.streams["denoising"].rollout_logprobs,
        atol=1e-5,
        rtol=0,
    )
    for image, other in zip(together.outputs, apart.outputs, strict=True):
        assert abs(pixels(image) - pixels(other)).max() <= 1
    for image, other in zip(together.outputs, second.outputs, strict=True):
        assert abs(pixels(image) - pixels(other)).max() <= 1


@pytest.mark.parametrize("name", MAKE)
def test_without_a_window_images_are_the_pipeline_s_own(saved_folder: SavedFolder, name: str) -> None:
    chosen = settings(name, guidance_scale=GUIDANCE[name])
    policy = DiffusersPolicy.load(str(saved_folder(name)), chosen, {"denoising": TrainingChoice(LoraSettings(rank=2))})
    (group,) = sampled(policy, request(window_start=None))
    assert group.streams == {}
    own = diffusers.DiffusionPipeline.from_pretrained(str(saved_folder(name)))
    own.set_progress_bar_config(disable=True)
    # On some CPUs torch rounds otherwise where weights could have gradients, even while none are recorded.
    for part in own.components.values():
        if isinstance(part, nn.Module):
            part.requires_grad_(False)
    guidance = {"true_cfg_scale": 4.0, "negative_prompt": " "} if name == "qwen_image" else {}
    images = own(
        "a red dot",
        height=32,
        width=32,
        num_inference_steps=5,
        num_images_per_prompt=3,
        max_sequence_length=LENGTHS[name],
        generator=[make_generator(seed) for seed in range(3)],
        **(guidance or {"guidance_scale": GUIDANCE[name]}),
    ).images
    for image, expected in zip(group.outputs, images, strict=True):
        assert (pixels(image) == pixels(expected)).all()


def test_the_size_of_a_request_counts(shared_policy: SharedPolicy) -> None:
    policy = shared_policy("qwen_image")
    (group,) = sampled(policy, request(size=ImageSize(48, 16), samples=2))
    assert [image.size for image in group.outputs if isinstance(image, Image.Image)] == [(48, 16)] * 2
    torch.testing.assert_close(
        scored(policy, group).logprobs, group.streams["denoising"].rollout_logprobs, atol=1e-6, rtol=0
    )


def test_a_size_that_the_pipeline_rounds_is_refused(shared_policy: SharedPolicy) -> None:
    policy = shared_policy("flux")
    with pytest.raises(InputError, match="32x32") as sampling:
        sampled(policy, request(size=ImageSize(34, 34)))
    with pytest.raises(InputError, match="32x32") as choosing:
        policy.sample_with(settings("flux", height=34, width=34))
    for refused in (sampling.value, choosing.value):
        assert (refused.place, refused.value) == ("rollout.width and height", "34x34")


def test_the_shipped_model_learns_to_draw_brighter() -> None:
    chosen = settings(
        height=64, width=64, num_inference_steps=6, guidance_scale=1.0, max_sequence_length=14, noise_level=0.7
    )
    policy = load(TINY_SD3, chosen, disturbed=False)
    optimizer = PolicyOptimizer(policy.denoising.trainable_parameters(), OptimizerSettings(learning_rate=2e-3))

    def brightness(group: RolloutGroup) -> torch.Tensor:
        return torch.tensor([[pixels(image).mean() / 255 for image in group.outputs]], dtype=torch.float32)

    heldout = request("a red circle", 8, window_start=None, seed=1000)
    before = brightness(sampled(policy, heldout)[0]).mean()
    for step in range(4):
        policy.denoising.prepare_for_sampling()
        (group,) = sampled(policy, request("a red circle", 8, window_start=step % 3, seed=100 * step))
        stored = group.streams["denoising"].rollout_logprobs
        torch.testing.assert_close(scored(policy, group).logprobs, stored, atol=1e-6, rtol=0)
        rewards = brightness(group)
        advantages = (rewards - rewards.mean()) / rewards.std()
        rows = join_groups([group], advantages, "denoising")
        update_policy(
            policy.denoising, optimizer, rows, UpdateSettings(loss="grpo", clip_range=1e-4, micro_batch_size=8), seed=0
        )
    policy.denoising.prepare_for_sampling()
    assert brightness(sampled(policy, heldout)[0]).mean() > before + 0.02
