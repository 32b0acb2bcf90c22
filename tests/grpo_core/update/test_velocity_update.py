"""Updates by matched velocities against a plain loop over every image and noise level, in fp64 on a linear velocity."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grpo_core.errors import InputError, NonFiniteError
from grpo_core.policies.trained.lora_and_full import train_model
from grpo_core.policies.trained.settings import TrainingChoice
from grpo_core.rollouts.actions import DenoisingBatch
from grpo_core.rollouts.records import SampledActions, TrainingRows
from grpo_core.rollouts.streams import ImageSize
from grpo_core.update import velocity_update
from grpo_core.update.optimizer import PolicyOptimizer
from grpo_core.update.settings import OptimizerSettings, UpdateSettings
from grpo_core.update.step import UpdateResult
from grpo_core.update.velocity_settings import AwmSettings, NftSettings, RamSettings, VelocitySettings, VGrpoSettings
from grpo_core.update.velocity_update import ForwardProcess, NftStepMetrics, update_by_velocity
from tests.grpo_core.toy_policy import training_rows

SIGMAS = torch.tensor([1.0, 0.8, 0.5, 0.2], dtype=torch.float64)
DIM = 3
SETTINGS = NftSettings(micro_batch_size=4, max_grad_norm=1e9, nft_beta=0.7)
ADVANTAGES = [1.5, -0.5, 0.0, 7.0, -1.0]
SIZE = ImageSize(8, 8)


class Linear(nn.Module):
    """Velocity W [x, sigma]."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(DIM, DIM + 1, generator=generator, dtype=torch.float64))

    def forward(self, latents: Tensor, sigmas: Tensor) -> Tensor:
        return torch.cat([latents, sigmas.unsqueeze(-1)], -1) @ self.weight.T


@dataclass
class Pass:
    """What was asked with gradients: weights, and by prompt, step and latents every row."""

    weight: Tensor
    rows: list[tuple[str, int, Tensor]]


@dataclass
class LinearComponent:
    """A component that keeps what it was asked."""

    trained: Any = field(
        default_factory=lambda: train_model(Linear(), TrainingChoice(None, reference="device"), base_name="linear")
    )
    passes: list[Pass] = field(default_factory=list)
    compared: int = 0  # rows computed without gradients

    def velocities(self, actions: DenoisingBatch) -> Tensor:
        latents = torch.stack([states[0] for states in actions.states])
        if torch.is_grad_enabled():
            rows = list(zip(actions.prompts, actions.first_steps, latents, strict=True))
            self.passes.append(Pass(self.weight.detach().clone(), rows))
        else:
            self.compared += len(latents)
        velocity: Tensor = self.trained.model(latents, SIGMAS[list(actions.first_steps)])
        return velocity

    def sigmas(self, actions: DenoisingBatch) -> Tensor:
        return SIGMAS

    @property
    def weight(self) -> Tensor:
        weight: Tensor = next(self.trained.model.parameters())
        return weight

    def prepare_for_update(self, actions: Any = None) -> None:
        self.trained.prepare_for_update()

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        parameters: dict[str, nn.Parameter] = self.trained.trainable_parameters()
        return parameters


def rows_of(advantages: list[float], dtype: torch.dtype = torch.float64) -> TrainingRows:
    count, generator = len(advantages), torch.Generator().manual_seed(4)
    images = torch.randn(count, 1, DIM, generator=generator, dtype=torch.float64).to(dtype)
    actions = DenoisingBatch(
        prompts=tuple(map(str, range(count))),
        states=tuple(images),
        first_steps=(len(SIGMAS),) * count,
        sizes=(SIZE,) * count,
    )
    finished = torch.ones(count, dtype=torch.bool)
    return training_rows(SampledActions(actions, torch.zeros(count, 0), finished, max_length=0), advantages)


def images_of(rows: TrainingRows) -> DenoisingBatch:
    assert isinstance(rows.actions, DenoisingBatch)
    return rows.actions


def changed(rows: TrainingRows, **actions: Any) -> TrainingRows:
    """The rows with changes of their actions."""
    return replace(rows, actions=replace(images_of(rows), **actions))


def trained(
    component: LinearComponent, rows: TrainingRows, settings: VelocitySettings = SETTINGS, seed: int = 0, **options: Any
) -> UpdateResult:
    optimizer = PolicyOptimizer(component.trainable_parameters(), OptimizerSettings(0.05))
    acting: Any = component
    return update_by_velocity(acting, optimizer, rows, settings, seed=seed, **options)


def gradient_of(component: LinearComponent) -> Tensor:
    gradient = component.weight.grad
    assert gradient is not None
    return gradient


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


@pytest.mark.parametrize("micro_batch_size", [1, 3, 100])
def test_the_cut_into_microbatches_changes_nothing(micro_batch_size: int) -> None:
    gradients = []
    for size in (4, micro_batch_size):
        component = LinearComponent()
        trained(component, rows_of(ADVANTAGES), replace(SETTINGS, micro_batch_size=size))
        gradients.append(gradient_of(component))
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-14)


def test_a_row_is_noised_alike_whatever_rows_are_beside_it() -> None:
    seen = []
    for chosen in ([0, 1, 2, 3, 4], [3]):
        component = LinearComponent()
        trained(component, rows_of(ADVANTAGES).select(chosen), replace(SETTINGS, timesteps_per_image=2))
        rows = [row for each in component.passes for row in each.rows if row[0] == "3"]
        seen.append({step: latents for _, step, latents in rows})
    assert seen[0].keys() == seen[1].keys()
    assert all(torch.equal(seen[0][step], seen[1][step]) for step in seen[0])


@dataclass
class _OneOfThree:
    """One process of three, whose sums are not added: a test adds them."""

    rank: int
    count: int = 3

    def add_gradients(self, parameters: Any) -> None:
        """Leave this process's share."""

    def add(self, values: Tensor) -> Tensor:
        return values

    def gradient_norm(self, parameters: Any, max_norm: float) -> float:
        return 1.0


def test_processes_add_up_to_one() -> None:
    alone = LinearComponent()
    result = trained(alone, rows_of(ADVANTAGES))
    parts, losses = [], []
    for rank in range(3):
        component = LinearComponent()
        losses.append(trained(component, rows_of(ADVANTAGES), process_group=_OneOfThree(rank)).steps[0].loss)
        parts.append(gradient_of(component))
    torch.testing.assert_close(sum(parts), gradient_of(alone), rtol=1e-12, atol=1e-14)
    assert sum(losses) == pytest.approx(result.steps[0].loss)


def test_the_same_seed_gives_the_same_weights_to_the_bit() -> None:
    weights = []
    for seed in (1, 1, 2):
        component = LinearComponent()
        trained(component, rows_of(ADVANTAGES), replace(SETTINGS, epochs=2, minibatch_size=2), seed)
        weights.append(component.weight.detach())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("settings", [NftSettings(kl_coef=0.1), AwmSettings(kl_coef=0.1)], ids=["nft", "awm"])
def test_the_norm_is_compared_with_the_reference_s(settings: VelocitySettings) -> None:
    """The model is linear, so that weights scaled by 1.125 scale every velocity."""
    component = LinearComponent()
    with torch.no_grad():
        component.weight.mul_(1.125)
    result = trained(component, rows_of(ADVANTAGES), settings)
    assert result.metrics()["velocity/norm_ratio"] == pytest.approx(1.125)
    without = trained(component, rows_of(ADVANTAGES), replace(settings, kl_coef=0.0))
    assert "velocity/norm_ratio" not in without.metrics()


def test_metrics_of_the_steps() -> None:
    component = LinearComponent()
    result = trained(component, rows_of(ADVANTAGES), replace(SETTINGS, minibatch_size=3, kl_coef=0.1))
    first, second = result.steps
    assert isinstance(first, NftStepMetrics)
    assert isinstance(second, NftStepMetrics)
    assert first.velocity_change == 0.0 == first.kl
    assert second.kl == pytest.approx(second.velocity_change)
    assert second.velocity_change > 0
    assert second.loss == pytest.approx(second.policy_loss + 0.1 * second.velocity_change)
    assert result.metrics()["optimizer_steps"] == 2.0
    assert "importance_ratio/mean" not in result.metrics()


def test_progress_counts_every_pass() -> None:
    seen: list[tuple[int, int]] = []
    component = LinearComponent()
    trained(
        component,
        rows_of(ADVANTAGES),
        replace(SETTINGS, epochs=2),
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(number, 10) for number in range(1, 11)]
    assert len(component.passes) == 10


@pytest.mark.parametrize("minibatch_size", [5, 2])
def test_an_image_that_is_not_finite_is_named_and_changes_nothing(minibatch_size: int) -> None:
    component, rows = LinearComponent(), rows_of(ADVANTAGES)
    states = list(images_of(rows).states)
    states[3] = torch.full_like(states[3], torch.nan)
    broken = changed(rows, states=tuple(states))
    with pytest.raises(NonFiniteError) as caught:
        trained(component, broken, replace(SETTINGS, minibatch_size=minibatch_size))
    assert caught.value.sample_ids == ("s3",)
    assert component.weight.grad is None
    assert "old" not in component.trained.copies


def test_the_average_follows_every_step() -> None:
    component = LinearComponent()
    start = component.weight.detach().clone()
    component.trained.keep("ema")
    trained(component, rows_of(ADVANTAGES), replace(SETTINGS, minibatch_size=3, ema=0.5))
    after_one = component.passes[3].weight
    expected = 0.25 * start + 0.25 * after_one + 0.5 * component.weight.detach()
    # Averages are computed in fp32.
    torch.testing.assert_close(component.trained.copies["ema"].values["weight"], expected, rtol=1e-5, atol=1e-6)


def test_rows_of_noisy_steps_are_refused() -> None:
    rows = rows_of([1.0])
    window = changed(rows, states=(torch.zeros(3, DIM),))
    with pytest.raises(ValueError, match="sde_window_size"):
        trained(LinearComponent(), window)


def test_more_levels_than_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="5 noise levels"):
        trained(LinearComponent(), rows_of([1.0]), replace(SETTINGS, timesteps_per_image=5))


def test_no_rows_change_nothing() -> None:
    component = LinearComponent()
    assert trained(component, rows_of([1.0]).select([])).metrics() == {"optimizer_steps": 0.0}


def test_the_decay_of_the_old_policy_grows_to_its_limit() -> None:
    assert [NftSettings().old_policy_decay(update) for update in (1, 40, 499, 501)] == pytest.approx(
        [0.001, 0.04, 0.499, 0.5]
    )
    assert NftSettings(old_decay=0.0).old_policy_decay(40) == 0
    assert UpdateSettings().old_policy_decay(40) == 0


@pytest.mark.parametrize("name", ["nft_beta", "advantage_clip", "timesteps_per_image"])
def test_settings_are_positive(name: str) -> None:
    with pytest.raises(InputError) as caught:
        NftSettings(**{name: 0})
    assert (caught.value.place, caught.value.value) == (f"update.{name}", 0)


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
