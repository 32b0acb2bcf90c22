"""Classes of pipelines that need more than a prompt and a size are sampled, scored and trained like any other."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image

from grpo_core.collect import collect_rollouts, join_groups
from grpo_core.policies.diffusers.policy import DiffusersPolicy
from grpo_core.policies.diffusers.prompt_cache import PromptCache, content_digest
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from grpo_core.records import RolloutGroup
from grpo_core.seeds import make_generator
from grpo_core.update.nft_update import update_by_nft
from grpo_core.update.optimizer import PolicyOptimizer
from grpo_core.update.policy_update import update_policy
from grpo_core.update.settings import NftSettings, OptimizerSettings, UpdateSettings
from tests.grpo_core.policies.diffusers.tiny_classes import MAKE_CLASS, NEED_SOURCES, settings_of
from tests.grpo_core.policies.diffusers.tiny_pipelines import SavedFolder, load, request, save
from tests.grpo_core.policies.diffusers.tiny_text_classes import MAKE_TEXT_CLASS, MAKE_TRIED

pytestmark = [
    # Ernie's pipeline gives its scheduler a tensor of sigmas.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    # Chroma's transformer imports it from where it was.
    pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning"),
]

# Lumina pads to multiples of 8 ids, and CogView4 to multiples of 16.
SLOW = ("flux2", "z_image_omni", "flux2_klein", "flux_kontext", "sana", "cogview4", *MAKE_TEXT_CLASS)
PROMPTS = ("a red dot", "a blue ring next to a much larger green square")


@pytest.fixture(scope="module")
def saved_class(tmp_path_factory: pytest.TempPathFactory) -> SavedFolder:
    """The folder of a tiny pipeline by its name; never changed."""
    folders: dict[str, Path] = {}

    def find(name: str) -> Path:
        if name not in folders:
            folders[name] = save(name, tmp_path_factory.mktemp(name) / "pipeline", MAKE_TRIED)
        return folders[name]

    return find


def sampled(policy: DiffusersPolicy, window_start: int | None, samples: int = 2) -> list[RolloutGroup]:
    requests = [request(prompt, samples, window_start=window_start) for prompt in PROMPTS]
    return list(collect_rollouts(policy, requests, prompts_per_batch=2))


def levels(image: Image.Image) -> np.ndarray:
    return np.asarray(image).astype(int)


def classes() -> Iterator[object]:
    """Yield those that make images of text alone; some take longer than others that are like them.

    Two more are sampled, scored and trained with source images in test_edits.
    """
    for name in (*MAKE_CLASS, *MAKE_TEXT_CLASS):
        if name not in NEED_SOURCES:
            yield pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else [])


@pytest.mark.parametrize("name", list(classes()))
def test_a_class_is_sampled_scored_and_trained(saved_class: SavedFolder, name: str) -> None:
    chosen = settings_of(name)
    policy = load(saved_class(name), chosen)
    for window_start in (1, 0):
        groups = sampled(policy, window_start)
        for group in groups:
            assert [image.size for image in group.outputs if isinstance(image, Image.Image)] == [chosen.size] * 2
            steps = group.streams["denoising"]
            scored = policy.denoising.logprobs(steps.actions).logprobs
            torch.testing.assert_close(scored.detach(), steps.rollout_logprobs, atol=1e-6, rtol=0)
    before = policy.denoising.logprobs(groups[1].streams["denoising"].actions).logprobs.detach()
    optimizer = PolicyOptimizer(policy.denoising.trainable_parameters(), OptimizerSettings(learning_rate=1e-3))
    rows = join_groups(groups, torch.tensor([[1.0, -1.0]] * 2), "denoising")
    update_policy(policy.denoising, optimizer, rows, UpdateSettings(loss="grpo", micro_batch_size=2), seed=0)
    after = policy.denoising.logprobs(groups[1].streams["denoising"].actions).logprobs.detach()
    assert (after - before).abs().max() > 1e-6


def test_latents_of_flux2_are_the_pipeline_s_own(saved_class: SavedFolder) -> None:
    """Height and width differ, so that a swap of them would show."""
    name = "flux2_klein"
    policy = load(saved_class(name), settings_of(name, height=32, width=16), disturbed=False)
    images = [each.outputs[0] for each in sampled(policy, None, 1)]
    policy.sample_with(settings_of(name, height=32, width=16, noise_level=1e-6))
    almost_ode = [each.outputs[0] for each in sampled(policy, 0, 1)]
    for image, other in zip(images, almost_ode, strict=True):
        assert isinstance(image, Image.Image)
        assert isinstance(other, Image.Image)
        assert image.size == (16, 32)
        assert abs(levels(image) - levels(other)).max() <= 1


def test_a_prompt_is_not_rewritten_inside_the_pipeline(saved_class: SavedFolder) -> None:
    """An unseeded language model would write another prompt for the images than the one that is trained (NFT)."""
    chosen = settings_of("ernie_image", sde_window_size=0, num_inference_steps=2)

    def trained(seed: int) -> torch.Tensor:
        policy = load(saved_class("ernie_image"), chosen)
        torch.manual_seed(seed)
        rewritten: list[Any] = []
        policy.denoising.pipeline.pe.register_forward_hook(lambda *_: rewritten.append(1))
        groups = sampled(policy, chosen.num_inference_steps)
        rows = join_groups(groups, torch.tensor([[1.0, -1.0]] * 2), "denoising")
        optimizer = PolicyOptimizer(policy.denoising.trainable_parameters(), OptimizerSettings(learning_rate=1e-3))
        update_by_nft(policy.denoising, optimizer, rows, NftSettings(micro_batch_size=2), seed=0)
        assert rewritten == []
        return torch.cat([each.detach().flatten() for each in policy.denoising.trainable_parameters().values()])

    assert torch.equal(trained(1), trained(2))


def test_images_of_ernie_are_those_of_the_prompt_as_it_stands(saved_class: SavedFolder) -> None:
    folder = str(saved_class("ernie_image"))
    choice = {"denoising": TrainingChoice(LoraSettings(rank=2))}
    (group, _) = sampled(DiffusersPolicy.load(folder, settings_of("ernie_image"), choice), None, 1)
    own = diffusers.DiffusionPipeline.from_pretrained(folder)
    expected = own(
        PROMPTS[0],
        height=32,
        width=32,
        num_inference_steps=5,
        guidance_scale=4.0,
        generator=make_generator(0),
        use_pe=False,
    ).images[0]
    image = group.outputs[0]
    assert isinstance(image, Image.Image)
    assert abs(levels(image) - levels(expected)).max() <= 1


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
