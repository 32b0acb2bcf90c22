"""Finished latents, and velocities where noise was added to them: against what each pipeline's own scheduler sees."""

from dataclasses import replace
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

from grpo_core.groups import GroupRequest
from grpo_core.optimizer import OptimizerSettings, PolicyOptimizer
from grpo_core.policies.denoising import DenoisingComponent
from grpo_core.records import DenoisingBatch, TrainingRows
from grpo_core.update import NftSettings, update_by_nft
from tests.grpo_core.policies.denoising.test_component import call_of
from tests.grpo_core.policies.denoising.tiny_pipelines import (
    PIPELINES,
    component,
    drafts,
    request,
    settings,
    size_of,
)

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
    watching, own = watched(made, name, asked)
    assert set(actions.first_steps) == {STEPS}
    assert torch.equal(torch.cat(actions.states), own.to(torch.float16))
    torch.testing.assert_close(made.sigmas(actions), watching.sigmas[:-1])
    order = [(row, step) for step in (4, 0, STEPS - 1) for row in (1, 0)]
    asked_rows = replace(
        actions.select([row for row, _ in order]),
        states=tuple(watching.seen[step][0][row].unsqueeze(0) for row, step in order),
        first_steps=tuple(step for _, step in order),
    )
    velocities = made.velocities(asked_rows)
    expected = torch.stack([watching.seen[step][1][row] for row, step in order]).to(velocities)
    torch.testing.assert_close(velocities.detach(), expected, rtol=1e-4, atol=1e-5)
    # The velocity points from the image to the noise: the last step leads to the finished latents.
    before, image = asked_rows.states[4][0], own[1]
    torch.testing.assert_close(before - watching.sigmas[-2] * velocities[4].detach(), image, rtol=1e-4, atol=1e-4)


def rows_of(actions: DenoisingBatch, advantages: list[float]) -> TrainingRows:
    count = len(advantages)
    return TrainingRows(
        sample_ids=tuple(f"s{row}" for row in range(count)),
        actions=actions,
        rollout_logprobs=torch.zeros(count, 0),
        advantages=torch.tensor(advantages),
        finished=torch.ones(count, dtype=torch.bool),
        on_policy=torch.ones(count, dtype=torch.bool),
        max_length=0,
    )


@pytest.mark.parametrize("name", ["z_image", "glm_image"])
def test_an_update_moves_towards_an_image_with_a_good_advantage(name: str) -> None:
    """With one seed the noise is the same, and the images' share of the loss falls from update to update."""
    made, asked = made_of(name), request(samples=2, window_start=STEPS)
    rows = rows_of(finished(made, name, asked), [5.0, 5.0])
    optimizer = PolicyOptimizer(made.trainable_parameters(), OptimizerSettings(3e-3))
    chosen = NftSettings(micro_batch_size=2, timesteps_per_image=2, kl_coef=1e-4)
    results = [update_by_nft(made, optimizer, rows, chosen, seed=3).steps[0] for _ in range(3)]
    assert results[2].loss < results[1].loss < results[0].loss
    assert results[0].kl is not None
    assert results[0].kl > 0


@pytest.mark.parametrize("lora", [True, False])
def test_the_weights_before_the_update_are_the_old_policy(lora: bool) -> None:
    """In the second minibatch the change of the velocity is that from a component which was not updated."""
    made = component("sd3", settings("sd3", sde_window_size=0, num_inference_steps=STEPS), lora=lora)
    untouched = component("sd3", made.settings, lora=lora)
    rows = rows_of(finished(made, "sd3", request(samples=2, window_start=STEPS)), [1.0, -1.0])
    optimizer = PolicyOptimizer(made.trainable_parameters(), OptimizerSettings(1e-3))
    seen: list[Tensor] = []

    def watching(component: DenoisingComponent) -> Any:
        original = component.velocities

        def velocities(actions: DenoisingBatch) -> Tensor:
            found = original(actions)
            with torch.no_grad():
                seen.append((found - untouched.velocities(actions)).square().flatten(1).mean(1).mean())
            return found

        return velocities

    made.velocities = watching(made)  # type: ignore[method-assign]
    result = update_by_nft(made, optimizer, rows, NftSettings(epochs=2, micro_batch_size=12), seed=0)
    first, old, new = (float(change) for change in seen)
    assert first == old == 0.0
    assert new > 0
    assert result.metrics()["nft/velocity_change"] == pytest.approx(new, rel=1e-4)
