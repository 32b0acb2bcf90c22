"""The noise and the levels that finished images are trained at."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_core.update.velocity_update import ForwardProcess
from tests.grpo_core.update.linear_velocity import (
    ADVANTAGES,
    DIM,
    SETTINGS,
    SIGMAS,
    LinearComponent,
    changed,
    images_of,
    rows_of,
    trained,
)


@pytest.mark.parametrize("shared", [True, False])
def test_images_of_a_prompt_can_share_their_noise(shared: bool) -> None:
    component = LinearComponent()
    rows = changed(rows_of([1.0] * 4), prompts=("0", "1") * 2)
    trained(component, rows, replace(SETTINGS, shared_noise=shared, micro_batch_size=16))
    noise: dict[tuple[str, int], list[Tensor]] = {}
    # Of a prompt and a level, rows follow one another.
    for prompt, step, latents in component.passes[0].rows:
        found = noise.setdefault((prompt, step), [])
        image = images_of(rows).states[int(prompt) + 2 * len(found)][0]
        found.append((latents - (1 - SIGMAS[step]) * image) / SIGMAS[step])
    assert all(len(pair) == 2 for pair in noise.values())
    values = torch.stack([each for pair in noise.values() for each in pair]).round(decimals=9)
    assert len(values.unique(dim=0)) == (2 if shared else 4) * len(SIGMAS)


def test_images_are_seen_at_every_level_with_noise_of_their_own() -> None:
    component, rows = LinearComponent(), rows_of(ADVANTAGES)
    trained(component, rows, replace(SETTINGS, epochs=2))
    noise: dict[tuple[int, str, int], Tensor] = {}
    for number, each in enumerate(component.passes):
        for prompt, step, latents in each.rows:
            image, sigma = images_of(rows).states[int(prompt)][0], SIGMAS[step]
            noise[number // 5, prompt, step] = (latents - (1 - sigma) * image) / sigma
    assert len(noise) == 2 * len(rows) * len(SIGMAS)
    values = torch.cat(list(noise.values()))
    assert len(values.round(decimals=9).unique()) == len(values)
    assert abs(float(values.mean())) < 0.3
    assert abs(float(values.std()) - 1) < 0.2


def test_levels_are_drawn_by_prompt_and_epoch() -> None:
    component, rows = LinearComponent(), rows_of([1.0] * 8)
    same = changed(rows, prompts=("0", "1") * 4)
    trained(component, same, replace(SETTINGS, timesteps_per_image=2, epochs=6, micro_batch_size=16))
    levels = []
    for each in component.passes:
        by_prompt = {prompt: {step for name, step, _ in each.rows if name == prompt} for prompt in ("0", "1")}
        assert all(len(steps) == 2 for steps in by_prompt.values())
        assert len(each.rows) == 16
        levels.append((frozenset(by_prompt["0"]), frozenset(by_prompt["1"])))
    assert len(set(levels)) > 2
    assert any(one != other for one, other in levels)


def test_a_row_is_noised_alike_whatever_rows_are_beside_it() -> None:
    seen = []
    for chosen in ([0, 1, 2, 3, 4], [3]):
        component = LinearComponent()
        trained(component, rows_of(ADVANTAGES).select(chosen), replace(SETTINGS, timesteps_per_image=2))
        rows = [row for each in component.passes for row in each.rows if row[0] == "3"]
        seen.append({step: latents for _, step, latents in rows})
    assert seen[0].keys() == seen[1].keys()
    assert all(torch.equal(seen[0][step], seen[1][step]) for step in seen[0])


def test_states_in_16_bits_are_trained_in_their_pipelines_arithmetic() -> None:
    """fp16 states are those of a pipeline in fp32; bf16 states those of one in bf16."""
    for stored, working in ((torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)):
        rows = rows_of(ADVANTAGES, stored)
        component: Any = LinearComponent()
        process = ForwardProcess(component, rows, None, 0)
        (part,) = process.microbatches([0, 1], 0, 100)
        actions, noised = process.noised(part, 0)
        assert {states.dtype for states in actions.states} == {working}
        assert noised.images.dtype == torch.float32
        # What the model reads is what the loss reads.
        assert torch.equal(noised.noised, torch.cat(actions.states).float())


def test_rows_of_noisy_steps_are_refused() -> None:
    rows = rows_of([1.0])
    window = changed(rows, states=(torch.zeros(3, DIM),))
    with pytest.raises(ValueError, match="sde_window_size"):
        trained(LinearComponent(), window)


def test_more_levels_than_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="5 noise levels"):
        trained(LinearComponent(), rows_of([1.0]), replace(SETTINGS, timesteps_per_image=5))
