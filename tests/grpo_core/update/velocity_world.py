"""Two dimensions in which the best policy under a KL is known: four round modes, and a reward that is linear.

A policy is the exact velocity of the mixture plus a small network that starts at zero, so the reference is exact.
"""

import itertools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from grpo_core.policies.trained.lora_and_full import train_model
from grpo_core.policies.trained.settings import TrainingChoice
from grpo_core.rollouts.actions import DenoisingBatch
from grpo_core.rollouts.records import SampledActions, TrainingRows
from grpo_core.rollouts.streams import ImageSize
from tests.grpo_core.toy_policy import training_rows

STEPS, GROUPS, GROUP_SIZE = 16, 4, 24
SIGMAS = torch.linspace(1, 0, STEPS + 1)
WEIGHTS, VARIANCE, SLOPE = torch.tensor([0.4, 0.3, 0.2, 0.1]), 0.16, torch.tensor([0.8, 0.4])
MODES = torch.tensor([[-1.2, -1.2], [-1.2, 1.2], [1.2, -1.2], [1.2, 1.2]])


def exact_velocity(latents: Tensor, sigmas: Tensor) -> Tensor:
    """E[noise - image | latents] of the mixture."""
    sigmas = sigmas[..., None, None]
    spread = (1 - sigmas) ** 2 * VARIANCE + sigmas**2
    off = latents[..., None, :] - (1 - sigmas) * MODES
    share = (WEIGHTS.log() - off.square().sum(-1) / (2 * spread[..., 0])).softmax(-1)
    images = MODES + (1 - sigmas) * VARIANCE / spread * off
    return (share[..., None] * (sigmas / spread * off - images)).sum(-2)


def log_density(images: Tensor) -> Tensor:
    square = (images[:, None] - MODES).square().sum(-1)
    return (WEIGHTS.log() - square / (2 * VARIANCE)).logsumexp(-1) - math.log(2 * math.pi * VARIANCE)


def cheapest_kl(reward: Tensor) -> Tensor:
    """The KL to the mixture of its tilt with this mean reward: no policy of that reward is nearer."""
    strength = torch.linspace(0, 6, 4000).double().requires_grad_()
    along, flat = (MODES @ SLOPE).double(), float(SLOPE.square().sum()) * VARIANCE
    total = (WEIGHTS.double().log() + strength[:, None] * along).logsumexp(-1) + strength**2 * flat / 2
    (rewards,) = torch.autograd.grad(total.sum(), strength)
    at = torch.searchsorted(rewards, reward.double()).clamp(max=len(rewards) - 1)
    return (strength[at] * rewards[at] - total[at]).detach()


class Field(nn.Module):
    """The velocity of the policy."""

    def __init__(self, seed: int, hidden: int = 64) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Linear(8, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU())
        self.last = nn.Linear(hidden, 2)
        for parameter in self.last.parameters():
            nn.init.zeros_(parameter)

    def forward(self, latents: Tensor, sigmas: Tensor) -> Tensor:
        sigmas = sigmas.expand(latents.shape[:-1])
        waves = [sigmas, (3 * sigmas).sin(), (3 * sigmas).cos(), (9 * sigmas).sin(), (9 * sigmas).cos()]
        features = torch.stack([*waves, latents.square().mean(-1) / 4], -1)
        return exact_velocity(latents, sigmas) + self.last(self.layers(torch.cat([latents, features], -1)))


@dataclass
class World:
    """A component with the field as its model, and how many rows were computed without gradients."""

    seed: int = 0
    trained: Any = field(init=False)
    compared: int = 0

    def __post_init__(self) -> None:
        self.trained = train_model(Field(self.seed), TrainingChoice(None, reference="device"), base_name="field")

    def velocities(self, actions: DenoisingBatch) -> Tensor:
        latents = torch.stack([states[0] for states in actions.states])
        self.compared += 0 if torch.is_grad_enabled() else len(latents)
        velocity: Tensor = self.trained.model(latents, SIGMAS[list(actions.first_steps)])
        return velocity

    def sigmas(self, actions: DenoisingBatch) -> Tensor:
        return SIGMAS[:-1]

    def prepare_for_update(self, actions: Any = None) -> None:
        self.trained.prepare_for_update()

    def trainable_parameters(self) -> dict[str, nn.Parameter]:
        parameters: dict[str, nn.Parameter] = self.trained.trainable_parameters()
        return parameters

    @torch.no_grad()
    def images(self, noise: Tensor) -> Tensor:
        """Denoise by the sampler's steps."""
        for now, after in itertools.pairwise(SIGMAS):
            noise = noise + (after - now) * self.trained.model(noise, now)
        return noise

    def reward_and_waste(self, count: int = 1024) -> tuple[float, float]:
        """Return the mean reward, and the KL above that of the best policy of this reward, both of the sampler itself.

        The density of an image is that of its noise over the determinant of the sampler's map.
        """
        latents = torch.randn(count, 2, generator=torch.Generator().manual_seed(2))
        logs = -latents.square().sum(-1) / 2 - math.log(2 * math.pi)
        for now, after in itertools.pairwise(SIGMAS):
            latents.requires_grad_()
            moved = latents + (after - now) * self.trained.model(latents, now)
            first, second = (
                torch.autograd.grad(moved[:, axis].sum(), latents, retain_graph=True)[0] for axis in (0, 1)
            )
            logs = logs - (first[:, 0] * second[:, 1] - first[:, 1] * second[:, 0]).abs().log()
            latents = moved.detach()
        reward = (latents @ SLOPE).mean()
        return float(reward), float((logs.detach() - log_density(latents)).mean() - cheapest_kl(reward))


def scored_rows(images: Tensor, *, scaled: bool) -> TrainingRows:
    """Images in groups with their centred rewards as advantages, divided by the group's deviation or not."""
    rewards = (images @ SLOPE).view(GROUPS, GROUP_SIZE)
    advantages = rewards - rewards.mean(1, keepdim=True)
    if scaled:
        advantages = advantages / (advantages.square().mean(1, keepdim=True).sqrt() + 1e-4)
    count = len(images)
    actions = DenoisingBatch(
        prompts=tuple(str(row // GROUP_SIZE) for row in range(count)),
        states=tuple(images[:, None]),
        first_steps=(STEPS,) * count,
        sizes=(ImageSize(8, 8),) * count,
    )
    finished = torch.ones(count, dtype=torch.bool)
    sampled = SampledActions(actions, torch.zeros(count, 0), finished, max_length=0)
    return training_rows(sampled, advantages.flatten().tolist())
