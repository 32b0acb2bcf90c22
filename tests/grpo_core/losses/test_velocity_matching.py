"""Losses of matched velocities: values by hand, what methods have in common, and the optimum that a pull leads to."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from grpo_core.losses.settings import ImplicitPair, SignedRow, VelocityRow
from grpo_core.losses.velocity_matching import NoisedImages, VelocityTerms, mean_square, velocity_terms
from grpo_core.update.velocity_settings import AwmSettings, NftSettings, RamSettings, VelocitySettings, VGrpoSettings


def terms_of(velocity: float, old: float, image: float, latent: float, advantage: float) -> VelocityTerms:
    """Of one value at the noise level 1/2."""
    values = (torch.tensor([[value]], dtype=torch.float64) for value in (velocity, old, image, latent))
    policy, before, images, latents = values
    level, advantages = (torch.tensor([value], dtype=torch.float64) for value in (0.5, advantage))
    return velocity_terms(policy, before, NoisedImages(images, latents, level, advantages), ImplicitPair(1.0, 5.0))


def test_one_value_by_hand() -> None:
    """The image is 1 and at 2 with noise: velocity 1 leads to 1.5, old +- 1 (1 - 3) to 1.5 and -0.5."""
    terms = terms_of(1.0, 3.0, 1.0, 2.0, 2.5)
    assert terms.measured[0].item() == pytest.approx(0.25 / 0.5)
    assert terms.measured[1].item() == pytest.approx(2.25 / 1.5)
    assert terms.policy.item() == pytest.approx(5 * (0.75 * 0.5 + 0.25 * 1.5))


def test_a_perfect_image_is_no_division_by_zero() -> None:
    assert terms_of(2.0, 2.0, 1.0, 2.0, 1.0).policy.item() == 0.0


def rows(*values: tuple[float, ...]) -> list[Tensor]:
    return [torch.tensor([each], dtype=torch.float64) for each in values]


VELOCITY, OLD, REFERENCE, TARGET, IMAGE = rows((0.3, -0.1), (0.1, 0.2), (0.0, 0.1), (1.0, -0.5), (-0.4, 0.6))
LEVEL, ADVANTAGE = rows(0.5, 2.0)  # type: ignore[arg-type]


def noised_image(advantage: float = 2.0) -> NoisedImages:
    """The image at the level 1/2, whose noise is target + image."""
    level = torch.tensor([0.5], dtype=torch.float64)
    return NoisedImages(IMAGE, IMAGE + 0.5 * TARGET, level, torch.full_like(level, advantage))


def loss_and_gradient(
    row: VelocityRow, velocity: Tensor = VELOCITY, old: Tensor | None = OLD, advantage: float = 2.0, pull: float = 0.0
) -> tuple[float, Tensor]:
    velocity = velocity.clone().requires_grad_()
    old = velocity.detach() if old is None else old
    terms = velocity_terms(velocity, old, noised_image(advantage), row)
    loss = terms.policy + pull * mean_square(velocity - REFERENCE)
    (gradient,) = torch.autograd.grad(loss.sum(), velocity)
    return loss.item(), gradient


FREE = AwmSettings(advantage_clip=99.0)


@pytest.mark.parametrize(
    ("settings", "loss", "gradient"),
    [
        (NftSettings(), 1.8233766234, (-1.4415584416, 0.5584415584)),
        (FREE, 3.0075170110, (-1.6262432958, 0.9292818833)),
        (AwmSettings(advantage_clip=99.0, error_power=1.0, level_power=0.0), 0.65, (-1.4, 0.8)),
        (VGrpoSettings(clip_range=0.5), -1.7483488360, (-1.1125856229, 0.6357632131)),
        (RamSettings(), 0.65 + 0.065, (-1.1, 0.6)),
    ],
    ids=["nft", "awm", "awm of errors", "v_grpo", "ram"],
)
def test_losses_and_gradients_are_those_of_the_formulas(
    settings: VelocitySettings, loss: float, gradient: tuple[float, float]
) -> None:
    """By hand, and by autograd of another implementation of each formula; V-GRPO's loss is -A' in its first step."""
    on_policy = isinstance(settings, VGrpoSettings)
    found, slope = loss_and_gradient(settings.row, old=None if on_policy else OLD, pull=settings.kl_coef)
    assert found == pytest.approx(loss, abs=1e-10)
    torch.testing.assert_close(slope, torch.tensor([gradient], dtype=torch.float64), rtol=0, atol=1e-10)


def test_ram_has_the_gradient_of_its_target() -> None:
    velocity = VELOCITY.clone().requires_grad_()
    target = REFERENCE + 0.3 * 2.0 * (TARGET - velocity)
    (expected,) = torch.autograd.grad(mean_square(velocity - target.detach()).sum(), velocity)
    settings = RamSettings(reward_multiplier=0.3)
    torch.testing.assert_close(loss_and_gradient(settings.row, pull=settings.kl_coef)[1], expected)


@pytest.mark.parametrize("advantage", [1.5, -4.0, 0.0])
def test_on_policy_all_methods_pull_along_the_error(advantage: float) -> None:
    """With n the mean absolute error: A t / n (v - u) for DiffusionNFT and V-GRPO, A t l^(p - 1) (v - u) for AWM."""
    error = VELOCITY - TARGET
    square, size = mean_square(error).item(), error.abs().mean().item()
    scales: dict[SignedRow | ImplicitPair, float] = {
        NftSettings(nft_beta=0.3).row: advantage * 0.5 / size,
        VGrpoSettings().row: 3 * math.tanh(advantage / 3) * 0.5 / size,
        FREE.row: advantage * 0.5 * square**-0.75,
        AwmSettings(error_power=0.5, level_power=2.0).row: max(-1, min(1, advantage)) * 0.25 * square**-0.5,
        RamSettings(reward_multiplier=0.1).row: 0.1 * advantage,
    }
    for row, scale in scales.items():
        _, gradient = loss_and_gradient(row, old=None, advantage=advantage)
        torch.testing.assert_close(gradient, scale * error, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize(
    ("advantage", "shift", "share"), [(1.0, -0.2, 1.0), (1.0, 0.2, 0.0), (-1.0, -0.2, 0.0), (-1.0, 0.2, 1.0)]
)
def test_a_ratio_beyond_its_bound_in_the_direction_of_its_advantage_has_no_gradient(
    advantage: float, shift: float, share: float
) -> None:
    """The old policy's error is larger where the image became likelier: the ratio is above 1."""
    row = AwmSettings(clip_range=0.01).row
    old = VELOCITY + shift * (TARGET - VELOCITY)
    velocity = VELOCITY.clone().requires_grad_()
    terms = velocity_terms(velocity, old, noised_image(advantage), row)
    (gradient,) = torch.autograd.grad(terms.policy.sum(), velocity)
    assert terms.measured[1].item() == share
    assert bool(gradient.abs().max() > 0) == (share == 0)


def test_a_pull_of_one_over_beta_ends_at_the_optimum_of_a_gaussian_and_a_linear_reward() -> None:
    """There RAM's expected gradient is 0 at every latent: Gauss and Hermite's three nodes integrate it exactly."""
    variance, level, beta = 0.3, 0.5, 1.0
    slope = torch.tensor([0.8, -0.6], dtype=torch.float64)
    spread = (1 - level) ** 2 * variance + level**2

    def velocity_of(latents: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
        """The exact velocity of a Gaussian, and its mean image at the latents."""
        off = latents - (1 - level) * mean
        images = mean + (1 - level) * variance / spread * off
        return (latents - images) / level, images

    nodes, weights = (
        torch.tensor(each, dtype=torch.float64) for each in ((-(3**0.5), 0, 3**0.5), (1 / 6, 2 / 3, 1 / 6))
    )
    grid = torch.tensor([*itertools.product(nodes.tolist(), repeat=2)], dtype=torch.float64)
    share = torch.tensor([math.prod(each) for each in itertools.product(weights.tolist(), repeat=2)])
    optimum = variance * slope / beta
    for place in torch.tensor([[0.0, 0.0], [1.0, -2.0], [-0.5, 0.7]], dtype=torch.float64):
        velocity, image = velocity_of(place, optimum)
        reference, _ = velocity_of(place, torch.zeros(2, dtype=torch.float64))
        torch.testing.assert_close(velocity - reference, -0.4615384615 * slope, rtol=1e-9, atol=0)
        images = image + math.sqrt(variance * level**2 / spread) * grid
        rewards = (images - optimum) @ slope
        trained = velocity.expand(9, 2).clone().requires_grad_()
        noised = NoisedImages(images, place.expand(9, 2), torch.full((9,), level, dtype=torch.float64), rewards)
        terms = velocity_terms(trained, trained.detach(), noised, RamSettings(reward_multiplier=1 / beta).row)
        loss = terms.policy + mean_square(trained - reference)
        (gradient,) = torch.autograd.grad((share * loss).sum(), trained)
        torch.testing.assert_close(gradient.sum(0), torch.zeros(2, dtype=torch.float64), rtol=0, atol=1e-12)
