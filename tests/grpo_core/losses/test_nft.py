"""DiffusionNFT's loss against numbers worked out by hand."""

import pytest
import torch
from torch import Tensor

from grpo_core.losses import NoisedImages, nft_terms

DOUBLE = torch.float64


def noised(
    images: list[list[float]], latents: list[list[float]], sigma: float, advantages: list[float]
) -> NoisedImages:
    def double(values: list[float] | list[list[float]]) -> Tensor:
        return torch.tensor(values, dtype=DOUBLE)

    return NoisedImages(double(images), double(latents), double([sigma] * len(images)), double(advantages))


def tensor(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=DOUBLE, requires_grad=True)


def test_one_value_by_hand() -> None:
    """The image is 1 and at 2 with noise: velocity 1 leads to 1.5, old +- 1 (1 - 3) to 1.5 and -0.5."""
    terms = nft_terms(
        tensor([1.0]), tensor([3.0]).detach(), noised([[1]], [[2]], 0.5, [2.5]), beta=1.0, advantage_clip=5.0
    )
    assert terms.positive.item() == pytest.approx(0.25 / 0.5)
    assert terms.negative.item() == pytest.approx(2.25 / 1.5)
    assert terms.policy.item() == pytest.approx(5 * (0.75 * 0.5 + 0.25 * 1.5))


def test_a_smaller_beta_keeps_both_policies_nearer_to_the_old_one() -> None:
    """Velocities 3 -+ 0.5 lead to 0.75 and 0.25."""
    terms = nft_terms(
        tensor([1.0]), tensor([3.0]).detach(), noised([[1]], [[2]], 0.5, [0]), beta=0.25, advantage_clip=5.0
    )
    assert terms.positive.item() == pytest.approx(0.25**2 / 0.25)
    assert terms.negative.item() == pytest.approx(0.75**2 / 0.75)
    assert terms.policy.item() == pytest.approx(5 / 0.25 * 0.5 * (0.25 + 0.75))


def test_at_beta_one_the_positive_policy_is_the_trained_one() -> None:
    sample = noised([[1.0, -2.0]], [[2.0, 0.5]], 0.7, [5.0])
    policies = [
        nft_terms(tensor([0.3, 0.9]), tensor(old).detach(), sample, beta=1.0, advantage_clip=5.0).policy
        for old in ([3.0, 1.0], [-7.0, 0.0])
    ]
    torch.testing.assert_close(policies[0], policies[1])


@pytest.mark.parametrize(("advantage", "only"), [(5.0, "positive"), (80.0, "positive"), (-5.0, "negative")])
def test_an_advantage_at_the_clip_leaves_one_policy(advantage: float, only: str) -> None:
    sample = noised([[1.0, -2.0]], [[2.0, 0.5]], 0.7, [advantage])
    terms = nft_terms(tensor([0.3, 0.9]), tensor([0.5, 0.1]).detach(), sample, beta=1.0, advantage_clip=5.0)
    torch.testing.assert_close(terms.policy, 5 * getattr(terms, only))


def test_without_advantage_the_old_policy_is_a_minimum() -> None:
    """Where the change is orthogonal to the error, so that it does not change the size that errors are divided by."""
    old = torch.tensor([[3.0, 3.0]], dtype=DOUBLE)
    sample = noised([[1.0, 1.0]], [[2.0, 2.0]], 0.5, [0.0])
    there = old.clone().requires_grad_()
    nft_terms(there, old, sample, beta=1.0, advantage_clip=5.0).policy.sum().backward()
    assert there.grad is not None
    assert torch.equal(there.grad, torch.zeros_like(old))
    beside = (old + torch.tensor([[0.1, -0.1]])).requires_grad_()
    nft_terms(beside, old, sample, beta=1.0, advantage_clip=5.0).policy.sum().backward()
    assert beside.grad is not None
    # 2 * 5 * sigma^2 * change / (2 values * size of the errors, which is 0.5)
    torch.testing.assert_close(beside.grad, 2 * 5 * 0.25 * (beside.detach() - old) / (2 * 0.5))


def test_the_size_of_the_errors_has_no_gradient() -> None:
    """d/dv of (2 - 0.5 v - 1)^2 / 0.5 at v = 1 is 2 * 0.5 * -0.5 / 0.5."""
    velocity = tensor([1.0])
    sample = noised([[1]], [[2]], 0.5, [5.0])
    nft_terms(velocity, velocity.detach(), sample, beta=1.0, advantage_clip=5.0).policy.sum().backward()
    assert velocity.grad is not None
    assert velocity.grad.item() == pytest.approx(5 * -1.0)


def test_a_perfect_image_is_no_division_by_zero() -> None:
    terms = nft_terms(
        tensor([2.0]), tensor([2.0]).detach(), noised([[1]], [[2]], 0.5, [1]), beta=1.0, advantage_clip=5.0
    )
    assert terms.policy.item() == 0.0
