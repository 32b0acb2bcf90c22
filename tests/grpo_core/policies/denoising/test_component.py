from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.distributions import Normal, kl_divergence

from grpo_core.errors import InputError, NonFiniteError
from grpo_core.policies.denoising import rows as images
from grpo_core.policies.denoising.component import DenoisingComponent
from grpo_core.policies.denoising.rows import SampleRows, image_of
from grpo_core.policies.denoising.settings import Solver
from grpo_core.policies.trained.lora_and_full import train_model
from grpo_core.policies.trained.settings import TrainingChoice
from grpo_core.rollouts.actions import DenoisingBatch, TokenBatch
from grpo_core.rollouts.images import SourceImage, encode_png
from grpo_core.rollouts.records import BrokenImage
from grpo_core.rollouts.streams import ImageSize
from tests.grpo_core.policies.denoising.test_scheduler import flow_grpo_formula
from tests.grpo_core.policies.denoising.tiny_pipelines import (
    PIPELINES,
    SIZE,
    RandomComponent,
    autoencoder,
    component,
    embedded,
    request,
    sampled,
    settings,
)

SOURCE = SourceImage.of(encode_png(Image.new("RGB", (2, 2))))
STARTS: tuple[tuple[str, tuple[SourceImage, ...]], ...] = (("a", ()), ("b", ()), ("a", (SOURCE,)))


def pixels(images: Sequence[Any]) -> np.ndarray:
    return np.stack([np.asarray(image) for image in images])


# Groups


def test_rows_of_one_start_differ_by_the_noise_of_their_steps() -> None:
    made = component("sd3")
    actions, logprobs = sampled(made, "sd3", window_start=0)
    states = torch.stack(actions.states)
    assert torch.equal(states[0, 0], states[1, 0])
    assert not torch.equal(states[0, 1], states[1, 1])
    assert logprobs.shape == (4, 2)
    assert len(set(logprobs.flatten().tolist())) == 8


@pytest.mark.parametrize("solver", ["euler", "lms"])
def test_steps_before_the_window_are_made_once_for_rows_that_start_alike(
    monkeypatch: pytest.MonkeyPatch, solver: Solver
) -> None:
    made, rows = component("sd3"), list[int]()
    forward = made.pipeline.transformer.forward
    monkeypatch.setattr(
        made.pipeline.transformer, "forward", lambda **given: rows.append(len(given["timestep"])) or forward(**given)
    )
    # Two noises of one prompt, and two prompts with one noise.
    requests = [request("a", 3, group="g"), request("a", 3, group="h"), request("b", 3)]
    requests[2] = replace(requests[2], noise_seeds=requests[0].noise_seeds)
    requests = [replace(each, window_start=3) for each in requests]
    found = []
    for branch in (False, True):
        made.settings = replace(made.settings, branch=branch, solver=solver)
        groups = made.sample(requests, None, size=SIZE, rows_per_call=3)
        found.append([(group.sampled, pixels(group.images)) for group in groups])
        # Each counts twice, with and without guidance; three of six steps are before the window.
        assert sum(rows) == 2 * (3 * 3 * (3 if branch else 6) + 3 * 3 * branch)
        rows.clear()
    for (plain, drawn), (branched, also) in zip(*found, strict=True):
        assert torch.equal(plain.rollout_logprobs, branched.rollout_logprobs)
        assert torch.equal(torch.stack(plain.actions.states), torch.stack(branched.actions.states))
        assert np.array_equal(drawn, also)


def test_rows_start_alike_with_one_prompt_draft_source_and_noise() -> None:
    drafted = replace(request("a", 5), noise_seeds=(1, 1, 1, 2, 1))
    ids = torch.tensor([[4, 5], [4, 6], [4, 5], [4, 5], [4, 5]])
    mask = torch.ones(5, 2, dtype=torch.bool)
    mask[4, 1] = False
    assert SampleRows.of([drafted], TokenBatch(("a",) * 5, ids, mask, 1.0)).first_alike() == [0, 1, 0, 3, 4]
    others = [replace(request(prompt, 2), noise_seeds=(1, 1), sources=sources) for prompt, sources in STARTS]
    assert SampleRows.of(others, None).first_alike() == [0, 0, 2, 2, 4, 4]


def test_rows_of_one_prompt_share_a_call_where_the_pipeline_needs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made = component("sd3")
    assert isinstance(made, RandomComponent)
    calls: list[list[str]] = []
    original = made.arguments

    def counted(prompts: Sequence[str], *args: Any) -> Mapping[str, Any]:
        calls.append(list(prompts))
        return original(prompts, *args)

    made.arguments = counted
    monkeypatch.setattr(type(made), "one_prompt_per_call", True)
    groups = made.sample([request("a", 3), request("b", 2)], None, size=SIZE, rows_per_call=2)
    assert calls == [["a", "a"], ["a"], ["b", "b"]]
    calls.clear()
    batches = [group.sampled.actions for group in groups if group.sampled is not None]
    rows = DenoisingBatch.join([each for each in batches if isinstance(each, DenoisingBatch)])
    made.logprobs(rows.select([4, 0, 3, 1]))
    assert calls == [["b", "b"], ["a", "a"]]


def test_small_images_are_decoded_at_once_and_large_ones_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    made, decoded = component("sd3"), list[int]()
    decode = made.pipeline.vae._decode

    def counted(latents: Tensor, *args: Any, **kwargs: Any) -> Any:
        decoded.append(len(latents))
        return decode(latents, *args, **kwargs)

    monkeypatch.setattr(made.pipeline.vae, "_decode", counted)
    found = []
    for limit in (3 * SIZE.pixels, 3 * SIZE.pixels - 1):
        monkeypatch.setattr(images, "PIXELS_AT_ONCE", limit)
        (group,) = made.sample([request(samples=3)], None, size=SIZE, rows_per_call=3)
        found.append(pixels(group.images))
    assert decoded == [3, 1, 1, 1]
    # A level that is rounded the other way is one of 255.
    np.testing.assert_allclose(found[0].astype(int), found[1], atol=1)


def test_a_broken_image_is_reported_and_can_be_viewed() -> None:
    levels = np.full((4, 4, 3), 0.5)
    levels[0, 0, 1] = np.nan
    found = image_of(levels)
    assert isinstance(found, BrokenImage)
    assert found.reason.startswith("6.2%")
    assert np.asarray(found.image)[0, 0].tolist() == [0, 0, 0]


# Latents that are not finite


class Damaged(RandomComponent):
    def call_arguments(
        self, prompts: Sequence[str], drafts: TokenBatch | None, size: ImageSize, sources: tuple[Any, ...] = ()
    ) -> Mapping[str, Any]:
        found = dict(super().call_arguments(prompts, drafts, size))
        found["pooled_prompt_embeds"] = found["pooled_prompt_embeds"].clone()
        found["pooled_prompt_embeds"][[row for row, prompt in enumerate(prompts) if prompt == "bad"]] = torch.nan
        return found


@pytest.mark.parametrize("window_start", [0, 2])
def test_latents_that_are_not_finite_name_their_samples_and_the_step(window_start: int) -> None:
    made = component("sd3")
    assert isinstance(made, RandomComponent)
    damaged = Damaged(made.pipeline, made.settings, made.trained, arguments=made.arguments)
    requests = [request(prompt, 2, group=prompt, window_start=window_start) for prompt in ("good", "bad")]
    with pytest.raises(NonFiniteError, match="Step 1 of 6") as refused:
        damaged.sample(requests, None, size=SIZE, rows_per_call=4)
    assert refused.value.sample_ids == ("bad.s00", "bad.s01")


# Gradients


def unrolled(made: DenoisingComponent, actions: DenoisingBatch) -> Iterator[Normal]:
    """Yield the Gaussian of each noisy step of the SD3 pipeline, by a loop of our own in fp64."""
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(6)
    sigmas = scheduler.sigmas.double().tolist()
    rows, scale = len(actions), made.settings.guidance_scale
    texts = torch.stack([embedded(prompt, 6, 32) for prompt in actions.prompts]).double()
    pooled = torch.stack([embedded(prompt, 64) for prompt in actions.prompts]).double()
    for place in range(2):
        index, x = actions.first_steps[0] + place, torch.stack([each[place] for each in actions.states])
        with_text, without = (
            made.pipeline.transformer(
                hidden_states=x,
                timestep=scheduler.timesteps[index].expand(rows),
                encoder_hidden_states=text,
                pooled_projections=pool,
            ).sample
            for text, pool in (
                (texts, pooled),
                (embedded("", 6, 32).double().expand(rows, -1, -1), embedded("", 64).double().expand(rows, -1)),
            )
        )
        velocity = without + scale * (with_text - without)
        step = flow_grpo_formula(x, velocity, sigmas[index], sigmas[index + 1], sigmas[1], made.settings.noise_level)
        yield Normal(step.mean, step.std)


def unrolled_logprobs(made: DenoisingComponent, actions: DenoisingBatch) -> Tensor:
    steps = enumerate(unrolled(made, actions))
    after = [torch.stack([each[place + 1] for each in actions.states]) for place in range(2)]
    return torch.stack([step.log_prob(after[place]).flatten(1).mean(1) for place, step in steps], 1)


def gradient_of(made: DenoisingComponent, value: Tensor) -> Tensor:
    parameters = list(made.trainable_parameters().values())
    return torch.cat([each.flatten() for each in torch.autograd.grad(value, parameters)])


@pytest.fixture(scope="module")
def exact() -> tuple[DenoisingComponent, DenoisingBatch, Tensor]:
    made = component("sd3", dtype=torch.float64)
    actions, stored = sampled(made, "sd3", samples=3, window_start=0)
    made.prepare_for_update()
    return made, actions, stored


def test_log_probs_and_gradients_are_those_of_a_plain_loop(
    exact: tuple[DenoisingComponent, DenoisingBatch, Tensor],
) -> None:
    made, actions, stored = exact
    weights = torch.tensor([[1.0, -2.0], [0.5, 3.0], [-1.0, 0.7]], dtype=torch.float64)
    scored, plain = made.logprobs(actions).logprobs, unrolled_logprobs(made, actions)
    torch.testing.assert_close(plain, stored, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(scored, plain, rtol=1e-9, atol=1e-10)
    found, expected = (gradient_of(made, (each * weights).sum()) for each in (scored, plain))
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "sd3" else pytest.mark.slow) for name in PIPELINES]
)
def test_recomputed_activations_give_the_same_gradient_to_the_bit(name: str) -> None:
    gradients = []
    for checkpointing in (False, True):
        made = component(name, settings(name), checkpointing=checkpointing)
        actions, _ = sampled(made, name, samples=2)
        made.prepare_for_update()
        calls = count_recomputations(made)
        gradients.append(gradient_of(made, made.logprobs(actions).logprobs.sum()))
        assert calls == ([made] if checkpointing else []) * len(calls)
        assert bool(calls) == checkpointing
    assert gradients[0].abs().max() > 0
    assert torch.equal(*gradients)


def count_recomputations(made: DenoisingComponent) -> list[DenoisingComponent]:
    calls: list[DenoisingComponent] = []
    transformer = made.pipeline.transformer
    original = getattr(transformer, "_gradient_checkpointing_func", None)

    def counted(*args: Any) -> Any:
        calls.append(made)
        assert original is not None
        return original(*args)

    if original is not None:
        for module in transformer.modules():
            if hasattr(module, "_gradient_checkpointing_func"):
                module._gradient_checkpointing_func = counted
    return calls


def test_a_model_that_cannot_recompute_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = TrainingChoice(None, gradient_checkpointing=True)
    with pytest.raises(InputError, match=r"policy\.gradient_checkpointing"):
        train_model(torch.nn.Linear(2, 2), choice, base_name="linear")
    monkeypatch.setattr(diffusers.AutoencoderKL, "_supports_gradient_checkpointing", False)
    with pytest.raises(InputError, match="AutoencoderKL"):
        train_model(autoencoder(), choice, base_name="vae")


# The exact KL


def test_the_exact_kl_and_its_gradient_are_those_of_torch(
    exact: tuple[DenoisingComponent, DenoisingBatch, Tensor],
) -> None:
    made, actions, _ = exact
    scored = made.logprobs(actions, others=made.step_means([actions], kl=True)[0])
    with torch.no_grad(), made.trained.reference():
        references = list(unrolled(made, actions))
    steps = zip(unrolled(made, actions), references, strict=True)
    expected = torch.stack([kl_divergence(step, other).flatten(1).mean(1) for step, other in steps], 1)
    assert float(expected.detach().min()) > 1e-8
    torch.testing.assert_close(scored.kl, expected, rtol=1e-7, atol=1e-14)
    found, plain = (gradient_of(made, each.sum()) for each in (scored.kl, expected))
    torch.testing.assert_close(found, plain, rtol=1e-6, atol=1e-12)
    torch.testing.assert_close(scored.logprobs, made.logprobs(actions).logprobs, rtol=0, atol=0)


def test_the_exact_kl_of_full_weights_can_be_trained_on() -> None:
    """Values are exchanged for the reference's pass, of several calls, before any graph is built."""
    made = component("sd3", lora=False)
    first, _ = sampled(made, "sd3", samples=2, window_start=0)
    later, _ = sampled(made, "sd3", samples=2, window_start=2)
    rows = DenoisingBatch.join([first, later])
    (others,) = made.step_means([rows], kl=True)
    assert torch.equal(made.logprobs(rows, others=others).kl, torch.zeros(4, 2))
    with torch.no_grad():
        for parameter in made.trainable_parameters().values():
            parameter.mul_(1.01)
    scored = made.logprobs(rows, others=others)
    scored.kl.sum().backward()
    assert float(scored.kl.detach().min()) > 0
    assert all(
        bool(each.grad.isfinite().all()) for each in made.trainable_parameters().values() if each.grad is not None
    )
