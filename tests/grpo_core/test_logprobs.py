"""Log-probs by hand, and a sampler whose frequencies are the probabilities."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from grpo_core.logprobs import draw_tokens, entropy_of, gather_logprobs, support_logprobs

LARGEST_UNIFORM = 1.0 - 2.0**-53


def log(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities]).log()


def test_support_logprobs_by_hand() -> None:
    """exp(logit / .5) over the first three ids: e^0, e^2, e^4; the fourth, far larger, does not count."""
    found = support_logprobs(torch.tensor([0.0, 1.0, 2.0, 50.0]), 3, 0.5)
    total = math.log(1 + math.exp(2) + math.exp(4))
    assert found.tolist() == pytest.approx([-total, 2 - total, 4 - total], abs=1e-6)


def test_support_logprobs_are_computed_in_fp32_from_half_precision() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0], dtype=torch.bfloat16)
    found = support_logprobs(logits, 3, 0.7)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.log_softmax(logits.double() / 0.7, -1).float(), atol=1e-6, rtol=0)


def test_gather_takes_the_given_ids() -> None:
    table = torch.arange(12.0).reshape(1, 3, 4)
    assert gather_logprobs(table, torch.tensor([[3, 0, 2]])).tolist() == [[3.0, 4.0, 10.0]]


def test_entropy_by_hand() -> None:
    """Uniform over 8: ln 8. (1/2, 1/4, 1/4): 1.5 ln 2. One certain id, the others impossible: 0."""
    assert float(entropy_of(torch.full((8,), -math.log(8)))) == pytest.approx(math.log(8), abs=1e-6)
    assert entropy_of(log(0.5, 0.25, 0.25)).tolist() == pytest.approx([1.5 * math.log(2)], abs=1e-6)
    assert entropy_of(log(0.0, 1.0, 0.0)).tolist() == [0.0]


@pytest.mark.parametrize(
    ("uniform", "expected"), [(0.0, 0), (0.19, 0), (0.21, 1), (0.49, 1), (0.51, 2), (0.99, 2), (LARGEST_UNIFORM, 2)]
)
def test_draw_inverts_the_cumulative_distribution(uniform: float, expected: int) -> None:
    assert draw_tokens(log(0.2, 0.3, 0.5), torch.tensor([uniform], dtype=torch.float64)).tolist() == [expected]


@pytest.mark.parametrize("uniform", [0.0, 5e-324, 0.5, LARGEST_UNIFORM, 1.0])
def test_impossible_ids_are_never_drawn_at_the_edges(uniform: float) -> None:
    drawn = draw_tokens(log(0.0, 0.0, 0.4, 0.0, 0.6, 0.0), torch.tensor([uniform], dtype=torch.float64))
    assert drawn.tolist() in ([2], [4])


@pytest.mark.parametrize("uniform", [0.0, LARGEST_UNIFORM, 1.0])
def test_an_id_whose_probability_underflows_is_not_drawn(uniform: float) -> None:
    drawn = draw_tokens(torch.tensor([[-2000.0, 0.0, -2000.0]]), torch.tensor([uniform], dtype=torch.float64))
    assert drawn.tolist() == [1]


def test_frequencies_follow_the_probabilities() -> None:
    """Chi-square over 20000 draws, three degrees of freedom: above 16.27 with probability 0.001."""
    probabilities = [0.5, 0.0, 0.25, 0.2, 0.05, 0.0]
    uniforms = torch.rand(20_000, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    counts = torch.bincount(draw_tokens(log(*probabilities).expand(20_000, -1), uniforms), minlength=6)
    assert counts[1] == counts[5] == 0
    expected = torch.tensor([0.5, 0.25, 0.2, 0.05]) * 20_000
    assert float(((counts[[0, 2, 3, 4]] - expected) ** 2 / expected).sum()) < 16.27


@given(st.integers(0, 2**32 - 1), st.integers(2, 100))
def test_a_row_is_drawn_alike_alone_and_beside_others(seed: int, support: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logprobs = torch.log_softmax(4 * torch.randn(6, support, generator=generator), -1)
    uniforms = torch.rand(6, generator=generator, dtype=torch.float64)
    alone = [draw_tokens(logprobs[row : row + 1], uniforms[row : row + 1]).item() for row in range(6)]
    assert draw_tokens(logprobs, uniforms).tolist() == alone


@given(st.integers(0, 2**32 - 1))
def test_draw_agrees_with_a_loop_over_the_ids(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logprobs = torch.log_softmax(3 * torch.randn(1, 9, generator=generator), -1)
    uniform = torch.rand(1, generator=generator, dtype=torch.float64)
    remaining, expected = float(uniform) * math.fsum(logprobs.double().exp().flatten().tolist()), 0
    for probability in logprobs.double().exp().flatten().tolist():
        remaining -= probability
        if remaining < 0:
            break
        expected += 1
    assert draw_tokens(logprobs, uniform).tolist() == [expected]


def test_a_row_of_nan_gives_an_id_that_exists() -> None:
    """The NaN then stands in the recorded log-prob, where collection refuses it by name."""
    logprobs = torch.cat([torch.full((1, 3), torch.nan), log(0.2, 0.3, 0.5)])
    assert draw_tokens(logprobs, torch.tensor([0.9, 0.9], dtype=torch.float64)).tolist() == [0, 2]
