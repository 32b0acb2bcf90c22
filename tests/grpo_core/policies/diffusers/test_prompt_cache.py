"""Prompts are encoded once, and as the pipeline itself encodes them."""

import inspect
import logging
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils._pytree import tree_flatten

from grpo_core.policies.diffusers.prompt_cache import PromptCache, content_digest
from tests.grpo_core.policies.diffusers.tiny_pipelines import (
    MAKE,
    NEED_SOURCES,
    SavedFolder,
    SharedPolicy,
    filling,
    request,
    settings,
)

# Chroma's transformer imports it from where it was.
pytestmark = pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")


# Those that encode a list at one length, each prompt at its own, without a mask, and in multiples of 8 ids.
QUICK = ("sd3", "flux", "qwen_image", "z_image", "lumina", "nucleus_moe")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MAKE if name not in NEED_SOURCES],
)
@torch.no_grad()
def test_rows_of_a_prompt_are_encoded_as_by_the_pipeline(name: str) -> None:
    """Also where it returns no mask for prompts that fill a multiple of 8 ids, whichever comes first."""
    pipeline = MAKE[name]()
    for part in pipeline.components.values():
        if isinstance(part, nn.Module):
            part.eval()
    own = pipeline.encode_prompt
    parameters = inspect.signature(own).parameters
    given: dict[str, Any] = {each: None for each, found in parameters.items() if found.default is found.empty}
    if "max_sequence_length" in parameters and (length := settings(name).max_sequence_length) is not None:
        given["max_sequence_length"] = length
    if {"negative_prompt", "do_classifier_free_guidance"} <= parameters.keys():
        given["do_classifier_free_guidance"] = True
    full = filling(pipeline) if name == "nucleus_moe" else 1
    pairs = ((full, full + 1), (full + 1, full)) if name == "nucleus_moe" else ()
    for lengths in (*pairs, (full + 1, full + 8)):
        pipeline.encode_prompt = own
        cache = PromptCache(pipeline)
        prompts = ["x" * length for length in lengths]
        lists = [[prompts[0]], [prompts[0]] * 2, [prompts[1]] * 3, *([prompts] if cache.pads_to_one_length else [])]
        for rows in lists:
            blur = {"negative_prompt": ["blur"] * len(rows)} if "do_classifier_free_guidance" in given else {}
            found, expected = (encode(**{**given, **blur, "prompt": list(rows)}) for encode in (cache, own))
            (leaves, structure), (wanted, form) = tree_flatten(found), tree_flatten(expected)
            assert structure == form
            for one, other in zip(leaves, wanted, strict=True):
                torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


# All prompts padded to one length, and each to its own.
@pytest.mark.parametrize("name", ["sd3", "qwen_image"])
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


# --- the cache's key


class Encoder:
    """An `encode_prompt` that reads an image; it counts its runs."""

    runs = 0

    def encode_prompt(self, prompt: list[str], image: Any = None, instruction: list[str] | None = None) -> torch.Tensor:
        self.runs += 1
        level = 0.0 if image is None else float(np.asarray(image).sum())
        return torch.tensor([[len(each), level, len(instruction or [])] for each in prompt])


def test_images_and_tensors_are_told_apart_by_their_content() -> None:
    encoder = Encoder()
    PromptCache(encoder)

    def level(image: Any) -> float:
        return float(encoder.encode_prompt(prompt=["dot"], image=image)[0, 1])

    large = torch.zeros(40, 100)
    assert repr(large) == repr(
        torch.stack([*large[:20], large[20].index_fill(0, torch.tensor([50]), 1.0), *large[21:]])
    )
    for shade in (1, 2):
        tensor = large.clone()
        tensor[20, 50] = shade
        assert level(tensor) == shade
        # One object after another may have the same address.
        assert level(Image.new("L", (1, 1), shade)) == shade
    runs = encoder.runs
    assert level(Image.new("L", (1, 1), 2)) == 2
    assert encoder.runs == runs


def test_a_list_that_is_not_of_prompts_is_passed_on_whole() -> None:
    encoder = Encoder()
    PromptCache(encoder)
    for lines in (1, 2, 3):
        encoded = encoder.encode_prompt(prompt=["dot", "ring"], instruction=["a line"] * lines)
        assert encoded.tolist() == [[3, 0, lines], [4, 0, lines]]


def test_what_has_no_known_content_is_encoded_anew() -> None:
    encoder = Encoder()
    PromptCache(encoder)

    class Unknown:
        def __array__(self, *args: Any, **options: Any) -> np.ndarray:
            return np.ones(3)

    image = Unknown()
    assert content_digest({"image": image}) is None
    encoder.encode_prompt(prompt=["dot"], image=image)
    runs = encoder.runs
    assert encoder.encode_prompt(prompt=["dot"], image=image)[0, 1] == 3
    assert encoder.runs > runs
