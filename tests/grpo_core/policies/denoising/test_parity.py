"""On unchanged weights the stored log-probs are found again, and the mistakes that others made are not accepted."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import diffusers
import pytest
import torch
from torch import Tensor

from grpo_core.parity import ParityError, ParityTolerance, measure_parity, require_parity
from grpo_core.policies.denoising.component import DenoisingComponent
from grpo_core.policies.denoising.scheduler import NoisyScheduler
from grpo_core.policies.denoising.settings import SdeType
from grpo_core.policies.trained.model import copied, exchanged
from grpo_core.rollouts.actions import DenoisingBatch
from grpo_core.rollouts.records import GroupRequest
from grpo_core.seeds import make_generator
from tests.grpo_core.policies.denoising.tiny_pipelines import (
    PIPELINES,
    component,
    drafts,
    request,
    sampled,
    settings,
    size_of,
)

TOLERANCE = ParityTolerance(max_difference=1e-5, mean_difference=1e-6)


def gate(actions: DenoisingBatch, stored: Tensor, scored: Tensor, tolerance: ParityTolerance = TOLERANCE) -> None:
    names = [f"s{row:02d}" for row in range(len(actions))]
    require_parity(measure_parity(names, stored, scored.detach(), actions.loss_mask), tolerance)


@pytest.mark.parametrize(
    ("name", "sde_type"),
    [
        # Of the other pipelines in diffusers/test_policy.
        *(("sd3", sde_type) for sde_type in get_args(SdeType)),
        pytest.param("glm_image", "flow_grpo", marks=pytest.mark.slow),
        pytest.param("glm_image", "cps", marks=pytest.mark.slow),
    ],
)
def test_the_ratio_is_one_on_unchanged_weights(name: str, sde_type: SdeType) -> None:
    made = component(name, settings(name, sde_type=sde_type))
    for window_start in (0, 2):
        actions, stored = sampled(made, name, window_start=window_start)
        assert actions.states[0].dtype == torch.float16
        made.prepare_for_update()
        ratio = (made.logprobs(actions).logprobs.detach() - stored).double().exp()
        torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-6)


@pytest.mark.slow
def test_the_ratio_of_glm_image_is_one_in_bfloat16() -> None:
    made = component("glm_image", dtype=torch.bfloat16)
    actions, stored = sampled(made, "glm_image")
    gate(actions, stored, made.logprobs(actions).logprobs)


def test_rows_are_scored_alike_in_any_order_and_number() -> None:
    made = component("sd3")
    first, stored = sampled(made, "sd3", window_start=0)
    later, also_stored = sampled(made, "sd3", window_start=2)
    rows = DenoisingBatch.join([first, later])
    order = [5, 0, 7, 3, 2, 6]
    scored = made.logprobs(rows.select(order)).logprobs
    torch.testing.assert_close(scored.detach(), torch.cat([stored, also_stored])[order], rtol=0, atol=1e-6)


def test_sums_over_the_latents_are_the_means_times_their_number() -> None:
    made = component("sd3")
    actions, stored = sampled(made, "sd3")
    assert made.summed_values(actions) == 1
    made.settings = replace(made.settings, logprob_reduction="sum")
    assert made.summed_values(actions) == actions.states[0][0].numel()
    scored = made.logprobs(actions, others=made.step_means([actions], kl=True)[0])
    torch.testing.assert_close(scored.logprobs.detach(), stored * actions.states[0][0].numel(), rtol=1e-6, atol=0)


# Mistakes


def changed(**changes: Any) -> Callable[..., None]:
    def mistake(made: DenoisingComponent, actions: DenoisingBatch, patch: pytest.MonkeyPatch) -> None:
        made.settings = replace(made.settings, **changes)

    return mistake


def adapters_not_loaded(made: DenoisingComponent, actions: DenoisingBatch, patch: pytest.MonkeyPatch) -> None:
    made.load_weights(None)


MISTAKES: dict[str, Callable[..., None]] = {
    "guidance left out": changed(guidance_scale=1.0),
    "another noise level": changed(noise_level=0.8),
    "another kind of noise": changed(sde_type="cps"),
    "another number of steps": changed(num_inference_steps=7),
    "adapters not loaded": adapters_not_loaded,
}


@pytest.fixture(scope="module")
def glm_image() -> tuple[DenoisingComponent, DenoisingBatch, Tensor]:
    """GLM-Image at 128 pixels, where the timesteps that its model is given are not 1000 sigma."""
    made = component("glm_image", settings("glm_image"))
    return made, *sampled(made, "glm_image", samples=2)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_gate_refuses_a_mistake_in_scoring(
    mistake: str, glm_image: tuple[DenoisingComponent, DenoisingBatch, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, actions, stored = glm_image
    right = made.settings
    with torch.no_grad(), exchanged(made.trainable_parameters(), copied(made.trainable_parameters())):
        gate(actions, stored, made.logprobs(actions).logprobs)
        MISTAKES[mistake](made, actions, monkeypatch)
        wrong = made.logprobs(actions).logprobs
    made.settings = right
    with pytest.raises(ParityError):
        gate(actions, stored, wrong)


def test_the_gate_refuses_a_window_that_is_off_by_one() -> None:
    made = component("sd3")
    actions, stored = sampled(made, "sd3", window_start=1)
    with pytest.raises(ParityError):
        gate(actions, stored, made.logprobs(replace(actions, first_steps=(2,) * 4)).logprobs)


def test_the_gate_refuses_the_tokens_of_another_sample(
    glm_image: tuple[DenoisingComponent, DenoisingBatch, Tensor],
) -> None:
    made, actions, stored = glm_image
    assert actions.drafts is not None
    with pytest.raises(ParityError):
        gate(actions, stored, made.logprobs(replace(actions, drafts=actions.drafts.select([1, 0]))).logprobs)


def test_latents_that_were_not_rounded_before_the_window_are_an_error() -> None:
    made = component("sd3")
    scheduler = NoisyScheduler.like(made.pipeline.scheduler, made.settings).begin(0, [1], ["s"])
    scheduler.set_timesteps(6)
    latents = torch.full((1, 4, 2, 2), 1 / 3)
    scheduler.step(latents, scheduler.timesteps[0], latents)
    with pytest.raises(RuntimeError, match="rounded"):
        scheduler.require_sound()


STEPS = 6


class Watching(diffusers.FlowMatchEulerDiscreteScheduler):
    """The pipeline's own scheduler, which keeps what it was given."""

    def set_timesteps(
        self,
        num_inference_steps: Any = None,
        device: Any = None,
        sigmas: Any = None,
        mu: Any = None,
        timesteps: Any = None,
    ) -> None:
        self.seen: list[tuple[Tensor, Tensor]] = []
        super().set_timesteps(num_inference_steps, device, sigmas, mu, timesteps)

    def step(self, model_output: Tensor, timestep: Tensor, sample: Tensor, *args: Any, **options: Any) -> Any:
        self.seen.append((sample, model_output))
        return super().step(model_output, timestep, sample, *args, **options)


def call_of(made: DenoisingComponent, name: str, asked: GroupRequest) -> dict[str, Any]:
    size, rows = size_of(name), len(asked.sample_ids)
    arguments = made.call_arguments([asked.prompt] * rows, drafts(name, size, rows), size)
    generators = [make_generator(seed) for seed in asked.noise_seeds]
    return {**arguments, "num_inference_steps": 6, "generator": generators}


def watched(made: DenoisingComponent, name: str, asked: GroupRequest) -> tuple[Watching, Tensor]:
    """The pipeline's own call: its scheduler, and its finished latents."""
    own = made.pipeline.scheduler
    made.pipeline.scheduler = Watching.from_config(own.config)
    latents = made.pipeline(**call_of(made, name, asked), output_type="latent").images
    watching, made.pipeline.scheduler = made.pipeline.scheduler, own
    return watching, latents


def made_of(name: str) -> DenoisingComponent:
    return component(name, settings(name, sde_window_size=0, num_inference_steps=STEPS))


def finished(made: DenoisingComponent, name: str, asked: GroupRequest) -> DenoisingBatch:
    rows, size = len(asked.sample_ids), size_of(name)
    (group,) = made.sample([asked], drafts(name, size, rows), size=size, rows_per_call=rows)
    assert group.sampled is not None
    assert isinstance(group.sampled.actions, DenoisingBatch)
    assert group.sampled.max_length == 0
    assert group.sampled.rollout_logprobs.shape == (rows, 0)
    assert group.sampled.actions.loss_mask.shape == (rows, 0)
    return group.sampled.actions


@pytest.mark.parametrize("name", PIPELINES)
def test_finished_latents_and_velocities_are_the_pipelines_own(name: str) -> None:
    """In any order of rows and steps; of GLM-Image at 128 pixels, where its two clocks differ."""
    made, asked = made_of(name), request(samples=2, window_start=STEPS)
    actions = finished(made, name, asked)
    assert not isinstance(made.pipeline.scheduler, NoisyScheduler)
    watching, own = watched(made, name, asked)
    assert set(actions.first_steps) == {STEPS}
    assert torch.equal(torch.cat(actions.states), own.to(torch.float16))
    torch.testing.assert_close(made.sigmas(actions), watching.sigmas[:-1])
    order = [(row, step) for row in (1, 0) for step in (4, 0, STEPS - 1)]
    asked_rows = replace(
        actions.select([row for row, _ in order]),
        states=tuple(watching.seen[step][0][row].unsqueeze(0) for row, step in order),
        first_steps=tuple(step for _, step in order),
    )
    velocities = made.velocities(asked_rows)
    expected = torch.stack([watching.seen[step][1][row] for row, step in order]).to(velocities)
    torch.testing.assert_close(velocities.detach(), expected, rtol=1e-4, atol=1e-5)
    # The velocity points from the image to the noise: the last step leads to the finished latents.
    last = order.index((1, STEPS - 1))
    moved = asked_rows.states[last][0] - watching.sigmas[-2] * velocities[last].detach()
    torch.testing.assert_close(moved, own[1], rtol=1e-4, atol=1e-4)
