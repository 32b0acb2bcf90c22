"""A component whose velocity is linear, in fp64, and that keeps what it was asked; finished images to train it on."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from grpo_core.policies.trained.lora_and_full import train_model
from grpo_core.policies.trained.settings import TrainingChoice
from grpo_core.rollouts.actions import DenoisingBatch
from grpo_core.rollouts.records import SampledActions, TrainingRows
from grpo_core.rollouts.streams import ImageSize
from grpo_core.update.optimizer import PolicyOptimizer
from grpo_core.update.settings import OptimizerSettings
from grpo_core.update.step import UpdateResult
from grpo_core.update.velocity_settings import NftSettings, VelocitySettings
from grpo_core.update.velocity_update import update_by_velocity
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
