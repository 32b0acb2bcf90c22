"""The loss by hand, its gradient by hand, and what must hold for any numbers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from grpo_core.losses import TokenLoss, clipped_surrogate, compute_grpo_loss, k3_kl, mean_of_row_means

ALL = torch.ones(1, 1, dtype=torch.bool)
SEEDS = st.integers(0, 2**32 - 1)


def surrogate(ratio: float, advantage: float, *, low: float = 0.2, high: float = 0.28) -> tuple[TokenLoss, float]:
    """Terms of a single token, and the surrogate's derivative by its log-prob."""
    logprob = torch.tensor([[math.log(ratio)]], dtype=torch.float64, requires_grad=True)
    terms = clipped_surrogate(
        logprob,
        torch.zeros(1, 1, dtype=torch.float64),
        torch.tensor([advantage], dtype=torch.float64),
        ALL,
        clip_range=low,
        clip_range_high=high,
    )
    terms.surrogate.sum().backward()
    assert logprob.grad is not None
    return terms, float(logprob.grad)


def random_batch(seed: int, rows: int = 6, time: int = 7) -> dict[str, Tensor]:
    """Log-probs, advantages and a mask with short rows, one of them empty."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, time + 1, (rows,), generator=generator)
    lengths[int(torch.randint(rows, (1,), generator=generator))] = 0
    return {
        "logprobs": -torch.rand(rows, time, generator=generator, dtype=torch.float64).mul(3),
        "old_logprobs": -torch.rand(rows, time, generator=generator, dtype=torch.float64).mul(3),
        "ref_logprobs": -torch.rand(rows, time, generator=generator, dtype=torch.float64).mul(3),
        "advantages": torch.randn(rows, generator=generator, dtype=torch.float64),
        "loss_mask": torch.arange(time) < lengths.unsqueeze(-1),
    }


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope", "clipped"),
    [
        # -min(r A, clip(r) A) with clip to [0.8, 1.28]; the slope is -r A unless the clipped branch is taken.
        (1.0, 2.0, -2.0, -2.0, ""),
        (1.0, -2.0, 2.0, 2.0, ""),
        (1.2, 2.0, -2.4, -2.4, ""),
        (1.5, 2.0, -2.56, 0.0, "high"),
        (1.5, -2.0, 3.0, 3.0, ""),
        (0.5, 2.0, -1.0, -1.0, ""),
        (0.5, -2.0, 1.6, 0.0, "low"),
        (0.9, -2.0, 1.8, 1.8, ""),
        (3.0, 0.0, 0.0, 0.0, ""),
    ],
)
def test_surrogate_by_hand(ratio: float, advantage: float, value: float, slope: float, clipped: str) -> None:
    terms, found = surrogate(ratio, advantage)
    assert float(terms.surrogate.detach()) == pytest.approx(value)
    assert found == pytest.approx(slope)
    assert float(terms.importance_ratio) == pytest.approx(ratio)
    assert (bool(terms.clipped_low), bool(terms.clipped_high)) == (clipped == "low", clipped == "high")


@given(st.floats(0.1, 3.0), st.floats(-3.0, 3.0), st.floats(0.05, 0.9), st.floats(0.05, 1.5))
def test_gradient_is_zero_exactly_beyond_the_active_bound(
    ratio: float, advantage: float, low: float, high: float
) -> None:
    terms, slope = surrogate(ratio, advantage, low=low, high=high)
    # As the code has it: the bound is met by exp(log(ratio)).
    met = float(terms.importance_ratio)
    clipped = (advantage > 0 and met > 1 + high) or (advantage < 0 and met < 1 - low)
    assert bool(terms.clipped_low | terms.clipped_high) == clipped
    assert slope == (0.0 if clipped else pytest.approx(-met * advantage))


def test_symmetric_settings_clip_symmetrically() -> None:
    assert float(surrogate(1.25, 1.0, low=0.2, high=0.2)[0].surrogate.detach()) == pytest.approx(-1.2)
    assert float(surrogate(1.25, 1.0, low=0.2, high=0.28)[0].surrogate.detach()) == pytest.approx(-1.25)


def test_k3_by_hand() -> None:
    """lp = ln .5, ref = ln .25: exp(ln .5) - ln .5 - 1 = .5 + .693147 - 1."""
    found = k3_kl(torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.25, 0.5]]).log(), torch.ones(1, 2).bool())
    assert found[0].tolist() == pytest.approx([0.193147, 0.0], abs=1e-6)


def test_k3_is_unbiased() -> None:
    """Its mean under the policy is KL(policy || reference), summed by definition over four ids."""
    policy, reference = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([0.4, 0.1, 0.25, 0.25])
    estimates = k3_kl(policy.log().unsqueeze(0), reference.log().unsqueeze(0), torch.ones(1, 4).bool())
    assert float((policy * estimates).sum()) == pytest.approx(float((policy * (policy / reference).log()).sum()))


@given(st.lists(st.floats(-20, 20, width=32) | st.floats(-(2.0**-20), 2.0**-20, width=32), min_size=1, max_size=50))
def test_k3_is_never_negative(differences: list[float]) -> None:
    reference = torch.tensor([differences])
    assert (k3_kl(torch.zeros_like(reference), reference, torch.ones_like(reference).bool()) >= 0).all()


def test_row_means_by_hand() -> None:
    """Means 2 and 8, an empty row, over 4 rows of which one stands in another microbatch: 10 / 4."""
    values = torch.tensor([[1.0, 3.0], [8.0, 100.0], [100.0, 100.0]])
    mask = torch.tensor([[True, True], [True, False], [False, False]])
    assert float(mean_of_row_means(values, mask, rows=4)) == 2.5


def test_loss_by_hand() -> None:
    """Row 1, A = 1: ratios 1.5 (clipped at 1.2) and .5: -(1.2 + .5) / 2. Row 2, A = -2, one token, ratio 1: 2.

    KL of .1 weight: k3 = .193147 for the first token alone, so .0193147 / 2. Mean over the two rows.
    """
    old = torch.tensor([[0.2, 0.4], [0.5, 0.9]]).log()
    logprobs = torch.tensor([[0.3, 0.2], [0.5, 0.1]]).log()
    reference = torch.tensor([[0.15, 0.2], [0.5, 0.7]]).log()
    loss, terms = compute_grpo_loss(
        logprobs,
        old,
        torch.tensor([1.0, -2.0]),
        torch.tensor([[True, True], [True, False]]),
        clip_range=0.2,
        clip_range_high=0.2,
        kl_coef=0.1,
        ref_logprobs=reference,
    )
    assert float(loss) == pytest.approx((-0.85 + 0.0193147 / 2 + 2.0) / 2, abs=1e-6)
    assert terms.kl.flatten().tolist() == pytest.approx([0.193147, 0, 0, 0], abs=1e-6)
    assert terms.clipped_high.tolist() == [[True, False], [False, False]]


def test_on_policy_gradient_is_the_policy_gradient() -> None:
    """At ratio one the derivative of the loss by each log-prob is -A / length / rows, and 0 where masked."""
    batch = random_batch(0)
    logprobs = batch["logprobs"].clone().requires_grad_()
    mask = batch["loss_mask"]
    loss, _ = compute_grpo_loss(
        logprobs, batch["logprobs"], batch["advantages"], mask, clip_range=0.2, clip_range_high=0.2
    )
    loss.backward()
    expected = -batch["advantages"].unsqueeze(-1) / mask.sum(-1, keepdim=True).clamp(min=1) / len(mask) * mask
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, expected)
    assert (logprobs.grad[~mask] == 0).all()


def loss_and_gradient(batch: dict[str, Tensor], rows: int | None = None) -> tuple[float, Tensor]:
    logprobs = batch["logprobs"].clone().requires_grad_()
    rest = {name: value for name, value in batch.items() if name != "logprobs"}
    loss, _ = compute_grpo_loss(logprobs, **rest, clip_range=0.2, clip_range_high=0.28, kl_coef=0.05, rows=rows)
    loss.backward()
    assert logprobs.grad is not None
    return float(loss.detach()), logprobs.grad


@given(SEEDS, st.integers(1, 6))
def test_microbatches_add_up_to_the_minibatch(seed: int, size: int) -> None:
    batch = random_batch(seed)
    whole, gradient = loss_and_gradient(batch)
    parts = [
        loss_and_gradient({name: value[start : start + size] for name, value in batch.items()}, rows=6)
        for start in range(0, 6, size)
    ]
    assert math.fsum(loss for loss, _ in parts) == pytest.approx(whole, rel=1e-9)
    torch.testing.assert_close(torch.cat([part for _, part in parts]), gradient, rtol=1e-9, atol=0)


@given(SEEDS)
def test_nothing_under_the_mask_is_seen(seed: int) -> None:
    """NaN and infinity there reach neither the loss nor the gradient."""
    batch = random_batch(seed)
    expected = loss_and_gradient(batch)
    mask = batch["loss_mask"]
    for name, garbage in (("logprobs", math.nan), ("old_logprobs", -math.inf), ("ref_logprobs", math.inf)):
        batch[name] = torch.where(mask, batch[name], garbage)
    loss, gradient = loss_and_gradient(batch)
    assert loss == expected[0]
    assert torch.equal(gradient, expected[1])


def test_rows_without_tokens_give_zero_and_no_nan() -> None:
    batch = {name: value[:2] for name, value in random_batch(1).items()}
    batch["loss_mask"] = torch.zeros(2, 7, dtype=torch.bool)
    loss, gradient = loss_and_gradient(batch)
    assert loss == 0.0
    assert torch.equal(gradient, torch.zeros(2, 7, dtype=torch.float64))


def test_neither_old_nor_reference_gets_a_gradient() -> None:
    batch = random_batch(2)
    for name in ("old_logprobs", "ref_logprobs"):
        batch[name].requires_grad_()
    loss_and_gradient(batch)
    assert batch["old_logprobs"].grad is None
    assert batch["ref_logprobs"].grad is None


def test_kl_pulls_towards_the_reference() -> None:
    """With zero advantage a step down the gradient brings the log-prob nearer to the reference's."""
    batch = random_batch(3)
    batch["advantages"] = torch.zeros(6, dtype=torch.float64)
    _, gradient = loss_and_gradient(batch)
    away = (batch["logprobs"] - batch["ref_logprobs"])[batch["loss_mask"]]
    assert torch.equal(gradient[batch["loss_mask"]].sign(), away.sign())


def test_a_kl_without_a_reference_is_refused() -> None:
    one = torch.zeros(1, 1)
    with pytest.raises(ValueError, match=r"kl_coef is 0\.1 but there are no ref_logprobs"):
        compute_grpo_loss(one, one, torch.ones(1), ALL, clip_range=0.2, clip_range_high=0.2, kl_coef=0.1)
