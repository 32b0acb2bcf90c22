"""Matched velocities against a plain loop over every image and noise level, and the policies that each method asks."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from grpo_core.rollouts.records import TrainingRows
from grpo_core.update import velocity_update
from grpo_core.update.velocity_settings import AwmSettings, NftSettings, RamSettings, VelocitySettings, VGrpoSettings
from tests.grpo_core.update.linear_velocity import (
    ADVANTAGES,
    SETTINGS,
    SIGMAS,
    LinearComponent,
    gradient_of,
    images_of,
    rows_of,
    trained,
)


def plain_loss(
    weight: Tensor, old: Tensor, reference: Tensor, asked: list[tuple[str, int, Tensor]], rows: TrainingRows, kl: float
) -> Tensor:
    """The paper's loss, image by image and level by level."""
    beta, clip, total = SETTINGS.nft_beta, SETTINGS.advantage_clip, torch.zeros((), dtype=torch.float64)
    for prompt, step, noised in asked:
        image, sigma = images_of(rows).states[int(prompt)][0], float(SIGMAS[step])
        seen = torch.cat([noised, torch.tensor([sigma], dtype=torch.float64)])
        new, before = weight @ seen, old @ seen
        share = min(max(float(rows.advantages[int(prompt)]) / clip, -1.0), 1.0) / 2 + 0.5
        for velocity, part in (
            ((1 - beta) * before + beta * new, share),
            ((1 + beta) * before - beta * new, 1 - share),
        ):
            found = noised - sigma * velocity
            size = max(float((found - image).detach().abs().mean()), 1e-5)
            total = total + clip / beta * part * ((found - image) ** 2).mean() / size
        total = total + kl * ((new - reference @ seen) ** 2).mean()
    return total / len(asked)


@pytest.mark.parametrize(
    ("kl", "kept_before", "images"),
    [
        *((kl, kept_before, (3, 2)) for kl, kept_before in ((0.0, False), (0.3, False), (0.3, True))),
        # In one minibatch the old policy is the trained one, as a constant.
        (0.3, False, (5,)),
    ],
)
def test_loss_and_gradient_of_each_minibatch_are_those_of_a_plain_loop(
    monkeypatch: pytest.MonkeyPatch, kl: float, kept_before: bool, images: tuple[int, ...]
) -> None:
    """The reference is exchanged once for two passes here: three times for the five of all."""
    monkeypatch.setattr(velocity_update, "BATCHES_PER_EXCHANGE", 2)
    component, rows = LinearComponent(), rows_of(ADVANTAGES)
    reference, exchanged = component.weight.detach().clone(), []
    entered = component.trained.reference
    monkeypatch.setattr(component.trained, "reference", lambda: exchanged.append(1) or entered())
    with torch.no_grad():
        component.weight.add_(0.3)
        old = component.weight.detach().clone()
        if kept_before:
            component.trained.keep("old")
            component.weight.mul_(0.9)
    result = trained(component, rows, replace(SETTINGS, minibatch_size=images[0], kl_coef=kl))
    # Four rows a pass: as many passes as images, which are seen at four levels.
    cuts = (component.passes[: images[0]], component.passes[images[0] :])
    for passes, step in zip(cuts[: len(images)], result.steps, strict=True):
        asked = [row for each in passes for row in each.rows]
        weight = passes[0].weight.requires_grad_()
        loss = plain_loss(weight, old, reference, asked, rows, kl)
        assert step.loss == pytest.approx(loss.item(), rel=1e-12)
    (expected,) = torch.autograd.grad(loss, weight)
    torch.testing.assert_close(gradient_of(component), expected, rtol=1e-12, atol=0)
    assert len(images) == 1 or not torch.equal(component.passes[3].weight, component.passes[0].weight)
    assert ("old" in component.trained.copies) == kept_before
    assert len(exchanged) == (sum(-(-each // 2) for each in images) if kl else 0)


def by_error(power: float, bound: float) -> Callable[[Tensor, Tensor, float, float], Tensor]:
    """AWM's loss, or RAM's."""

    def loss(velocity: Tensor, target: Tensor, sigma: float, advantage: float) -> Tensor:
        error = ((velocity - target) ** 2).mean() + 1e-10
        level = sigma if power < 1 else 1.0
        return max(-bound, min(bound, advantage)) * level / power * (error**power - 1e-10**power)

    return loss


def by_size(velocity: Tensor, target: Tensor, sigma: float, advantage: float) -> Tensor:
    """V-GRPO's loss."""
    size = (velocity - target).detach().abs().mean()
    return 3 * math.tanh(advantage / 3) * sigma * ((velocity - target) ** 2).mean() / size


@pytest.mark.parametrize(
    ("settings", "row_loss"),
    [
        (AwmSettings(), by_error(0.25, 1.0)),
        (VGrpoSettings(kl_coef=0.3), by_size),
        (RamSettings(), by_error(1.0, 99.0)),
    ],
    ids=["awm", "v_grpo", "ram"],
)
def test_signed_losses_and_gradients_are_those_of_a_plain_loop(
    settings: VelocitySettings, row_loss: Callable[[Tensor, Tensor, float, float], Tensor]
) -> None:
    component, rows = LinearComponent(), rows_of(ADVANTAGES)
    reference = component.weight.detach().clone()
    with torch.no_grad():
        component.weight.add_(0.3)
    settings = replace(settings, micro_batch_size=4, max_grad_norm=1e9, minibatch_size=3)
    result = trained(component, rows, settings)
    for passes, step in zip((component.passes[:3], component.passes[3:]), result.steps, strict=True):
        weight, total = passes[0].weight.requires_grad_(), torch.zeros((), dtype=torch.float64)
        asked = [row for each in passes for row in each.rows]
        for prompt, level, noised in asked:
            image, sigma = images_of(rows).states[int(prompt)][0], float(SIGMAS[level])
            seen = torch.cat([noised, torch.tensor([sigma], dtype=torch.float64)])
            velocity, target = weight @ seen, (noised - image) / sigma
            total = total + row_loss(velocity, target, sigma, float(rows.advantages[int(prompt)]))
            total = total + settings.kl_coef * ((velocity - reference @ seen) ** 2).mean()
        assert step.loss == pytest.approx(total.item() / len(asked), rel=1e-9)
    (expected,) = torch.autograd.grad(total / len(asked), weight)
    torch.testing.assert_close(gradient_of(component), expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("settings", "policies"),
    [
        (NftSettings(), (0, 1)),
        (NftSettings(kl_coef=0.1), (1, 2)),
        (AwmSettings(), (0, 0)),
        (AwmSettings(kl_coef=0.1), (1, 1)),
        (AwmSettings(clip_range=0.1), (0, 1)),
        (VGrpoSettings(), (0, 0)),
        (VGrpoSettings(clip_range=0.1, kl_coef=0.1), (1, 2)),
        (RamSettings(), (1, 1)),
        (RamSettings(kl_coef=0.0), (0, 0)),
    ],
)
def test_a_method_computes_the_policies_that_it_compares_with_and_keeps_no_other(
    settings: VelocitySettings, policies: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy before the update is another from the second optimizer step on; 3 and 2 images at four levels."""
    component, rows, kept = LinearComponent(), rows_of(ADVANTAGES), list[str]()
    keep = component.trained.keep
    monkeypatch.setattr(component.trained, "keep", lambda name: kept.append(name) or keep(name))
    trained(component, rows, replace(settings, minibatch_size=3, micro_batch_size=4))
    assert len(kept) == policies[1] - policies[0]
    assert component.compared == 4 * (3 * policies[0] + 2 * policies[1])
    assert sum(len(each.rows) for each in component.passes) == 4 * 5
    assert "old" not in component.trained.copies


@pytest.mark.parametrize("settings", [AwmSettings(), VGrpoSettings(), RamSettings(), VGrpoSettings(clip_range=0.1)])
def test_images_whose_siblings_have_the_same_reward_change_nothing(settings: VelocitySettings) -> None:
    component = LinearComponent()
    start = component.weight.detach().clone()
    trained(component, rows_of([0.0] * 4), replace(settings, minibatch_size=2))
    assert torch.equal(component.weight, start)
