"""Log-probs by hand, and in chunks against all at once: values, gradients and bytes."""

import math
import pickle
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from grpo_core.errors import NonFiniteError
from grpo_core.logprobs import score_hidden, vocabulary_logprobs
from grpo_core.parity import ParityError, ParityReport, ParityTolerance, measure_parity, require_parity
from grpo_core.rollouts.actions import TokenSupport
from grpo_core.rollouts.records import Entropies
from tests.grpo_core.policies.glm_image.test_memory import PeakBytes


def log(*probabilities: float) -> Tensor:
    return torch.tensor([probabilities]).log()


def test_vocabulary_logprobs_are_computed_in_fp32_from_half_precision() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0], dtype=torch.bfloat16)
    found = vocabulary_logprobs(logits, 3, 0.7)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, torch.log_softmax(logits.double() / 0.7, -1).float(), atol=1e-6, rtol=0)


# --- in chunks

ROWS, TIME, DIM, IDS, VOCABULARY = 3, 6, 8, 15, 11


@dataclass(frozen=True)
class Case:
    """Hidden states and a head with gradients, and tokens to score."""

    hidden: Tensor
    weight: Tensor
    token_ids: Tensor
    loss_mask: Tensor
    support: TokenSupport | None

    def head(self, states: Tensor) -> Tensor:
        return states @ self.weight.T


def drawn_case(seed: int, *, truncated: bool) -> Case:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(ROWS, TIME, DIM, generator=generator, requires_grad=True)
    weight = torch.randn(IDS, DIM, generator=generator, requires_grad=True)
    loss_mask = torch.rand(ROWS, TIME, generator=generator) < 0.7
    ids = torch.randint(VOCABULARY, (ROWS, TIME), generator=generator)
    support = None
    if truncated:
        possible = torch.rand(ROWS, TIME, VOCABULARY, generator=generator) < 0.4
        possible.scatter_(-1, ids.unsqueeze(-1), True)
        # Supports of tokens that are not trained any more are passed over.
        support = TokenSupport(possible.nonzero()[:, 2].int(), possible.sum(-1))
    return Case(hidden, weight, torch.where(loss_mask, ids, -1), loss_mask, support)


def all_at_once(case: Case, temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies in fp64, token by token."""
    logprobs = torch.zeros(ROWS, TIME, dtype=torch.float64)
    entropies = torch.zeros(ROWS, TIME, dtype=torch.float64)
    ends = [0] * ROWS * TIME if case.support is None else case.support.counts.flatten().cumsum(0).tolist()
    for row, time in case.loss_mask.nonzero().tolist():
        logits = case.head(case.hidden[row, time]).double() / temperature
        possible = list(range(VOCABULARY))
        if case.support is not None:
            place = row * TIME + time
            possible = case.support.ids[ends[place] - int(case.support.counts[row, time]) : ends[place]].tolist()
        probabilities = logits[possible].softmax(-1)
        logprobs[row, time] = probabilities[possible.index(int(case.token_ids[row, time]))].log()
        entropies[row, time] = -(probabilities * probabilities.log()).sum()
    return logprobs, entropies


def gradients(case: Case, logprobs: Tensor, entropies: Tensor) -> tuple[Tensor, ...]:
    """Of a loss that weighs every token and its entropy otherwise."""
    weights = torch.linspace(-1, 2, ROWS * TIME).reshape(ROWS, TIME)
    return torch.autograd.grad((logprobs * weights + entropies * weights.flip(0)).sum(), [case.hidden, case.weight])


@given(
    seed=st.integers(0, 2**32 - 1),
    truncated=st.booleans(),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    chunk_tokens=st.sampled_from([1, 4, 7, 100]),
    whole=st.booleans(),
)
def test_chunks_give_the_values_and_gradients_of_all_at_once(
    seed: int, truncated: bool, temperature: float, chunk_tokens: int, whole: bool
) -> None:
    case = drawn_case(seed, truncated=truncated)
    tokens = {"token_ids": case.token_ids, "loss_mask": case.loss_mask, "support": case.support}
    sizes = {
        "vocabulary": VOCABULARY,
        "temperature": temperature,
        "chunk_tokens": chunk_tokens,
        "entropy": "differentiable",
    }
    if whole:
        scored = score_hidden(case.head(case.hidden), lambda part: part, **tokens, **sizes)
    else:
        scored = score_hidden(case.hidden, case.head, **tokens, **sizes)
    logprobs, entropies = all_at_once(case, temperature)
    torch.testing.assert_close(scored.logprobs, logprobs.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scored.entropy, entropies.float(), rtol=1e-5, atol=1e-5)
    assume(case.loss_mask.any())
    expected = gradients(case, logprobs, entropies)
    for found, wanted in zip(gradients(case, scored.logprobs, scored.entropy), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_batch_without_a_trained_token_has_zeros_and_a_gradient_of_zeros() -> None:
    case = replace(drawn_case(0, truncated=True), loss_mask=torch.zeros(ROWS, TIME, dtype=torch.bool))
    scored = score_hidden(
        case.hidden, case.head, case.token_ids, case.loss_mask, vocabulary=IDS, temperature=1.0, support=case.support
    )
    assert not scored.logprobs.any()
    assert not any(gradient.any() for gradient in gradients(case, scored.logprobs, scored.entropy))


def test_a_token_outside_its_support_is_impossible() -> None:
    """Never a silent mismatch: minus infinity is refused by the gate."""
    case = replace(drawn_case(1, truncated=False), loss_mask=torch.ones(ROWS, TIME, dtype=torch.bool))
    support = TokenSupport(torch.tensor([3, 4], dtype=torch.int32).repeat(ROWS * TIME), torch.full((ROWS, TIME), 2))
    token_ids = torch.full((ROWS, TIME), 4)
    token_ids[1, 2] = 5
    scored = score_hidden(
        case.hidden, case.head, token_ids, case.loss_mask, vocabulary=IDS, temperature=1.0, support=support
    )
    assert (scored.logprobs == -torch.inf).nonzero().tolist() == [[1, 2]]


@pytest.mark.parametrize("gradient", [True, False])
def test_logits_are_made_of_trained_tokens_and_again_for_gradients_alone(gradient: bool) -> None:
    case = drawn_case(2, truncated=False)
    count = int(case.loss_mask.sum())
    seen: list[int] = []

    def head(states: Tensor) -> Tensor:
        seen.append(len(states))
        return case.head(states)

    with torch.set_grad_enabled(gradient):
        scored = score_hidden(
            case.hidden, head, case.token_ids, case.loss_mask, vocabulary=IDS, temperature=1.0, chunk_tokens=2
        )
    assert sum(seen) == count == 13
    assert max(seen) == 2
    if gradient:
        scored.logprobs.sum().backward()
        # The last four chunks' are kept: of 2, 2, 2 and 1 tokens.
        assert sum(seen) == 2 * count - 7


def test_entropies_that_nobody_asks_for_are_zero() -> None:
    case = drawn_case(3, truncated=True)
    tokens = {"token_ids": case.token_ids, "loss_mask": case.loss_mask, "support": case.support}
    plain = score_hidden(case.hidden, case.head, **tokens, vocabulary=VOCABULARY, temperature=1.0, entropy="none")
    full = score_hidden(case.hidden, case.head, **tokens, vocabulary=VOCABULARY, temperature=1.0)
    graph = score_hidden(
        case.hidden, case.head, **tokens, vocabulary=VOCABULARY, temperature=1.0, entropy="differentiable"
    )
    assert torch.equal(full.entropy, graph.entropy)
    assert graph.entropy.requires_grad
    assert not full.entropy.requires_grad
    assert torch.equal(plain.logprobs, full.logprobs)
    assert not plain.entropy.any()
    assert (full.entropy > 0)[case.loss_mask].any()


# --- bytes


def peak_of(*, tokens: int, chunk_tokens: int, entropy: Entropies, truncated: bool) -> tuple[int, int]:
    """Most bytes alive in a forward and backward pass over a vocabulary of 3000, and those kept between the two."""
    hidden = torch.randn(1, tokens, DIM, requires_grad=True)
    weight = torch.randn(3000, DIM)
    ids, mask = torch.zeros(1, tokens, dtype=torch.long), torch.ones(1, tokens, dtype=torch.bool)
    support = None
    if truncated:
        support = TokenSupport(torch.arange(5, dtype=torch.int32).repeat(tokens), torch.full((1, tokens), 5))
    with PeakBytes([hidden, weight, ids, mask]) as watched:
        scored = score_hidden(
            hidden,
            lambda states: states @ weight.T,
            ids,
            mask,
            vocabulary=3000,
            temperature=0.9,
            support=support,
            entropy=entropy,
            chunk_tokens=chunk_tokens,
        )
        kept = watched.alive
        loss = scored.logprobs.sum()
        (loss + scored.entropy.sum() if entropy == "differentiable" else loss).backward()
    return watched.peak, kept


@pytest.mark.parametrize(("entropy", "truncated"), [("none", True), ("constant", False), ("differentiable", True)])
def test_few_chunks_of_logits_are_alive_at_a_time(entropy: Entropies, truncated: bool) -> None:
    """So many bytes an id of 256 tokens, at most; all of 2048 tokens are one fp32 tensor of 25 MB."""
    ids = 256 * 3000
    peak, kept = peak_of(tokens=2048, chunk_tokens=256, entropy=entropy, truncated=truncated)
    assert peak < 22 * ids
    # Between the passes the log-probs of the last four chunks; with a support more of the last one alone.
    assert kept < 18 * ids
    twice, _ = peak_of(tokens=4096, chunk_tokens=256, entropy=entropy, truncated=truncated)
    assert twice < 1.1 * peak
    together, _ = peak_of(tokens=2048, chunk_tokens=2048, entropy=entropy, truncated=truncated)
    assert together > 2.5 * peak


SAMPLE_IDS = ("a", "b", "c")
MASK = torch.tensor([[True, True], [True, False], [True, True]])
STORED = torch.full((3, 2), -1.0)
TOLERANCE = ParityTolerance(max_difference=1e-2, mean_difference=1e-3)


def report_of(*differences: tuple[float, float]) -> ParityReport:
    return measure_parity(SAMPLE_IDS, STORED, STORED + torch.tensor(differences), MASK)


def test_differences_by_hand() -> None:
    """Over the five unmasked tokens: 0, .5, -.25, 0, .25; the 9 is under the mask."""
    report = report_of((0.0, 0.5), (-0.25, 9.0), (0.0, 0.25))
    assert report.max_difference == 0.5
    assert report.mean_difference == pytest.approx(0.2)
    assert report.tokens == 5
    assert report.ratio_min == pytest.approx(math.exp(-0.25))
    assert report.ratio_max == pytest.approx(math.exp(0.5))
    assert report.worst_samples[0] == "a"
    assert report.metrics()["sampling/sampling_logp_difference/max"] == 0.5


@pytest.mark.parametrize(
    "tolerance", [ParityTolerance(0.4, 1.0), ParityTolerance(1.0, 0.1)], ids=["single token", "mean"]
)
def test_either_bound_refuses(tolerance: ParityTolerance) -> None:
    report = report_of((0.0, 0.5), (0.0, 0.0), (0.0, 0.5))
    with pytest.raises(ParityError):
        require_parity(report, tolerance)
    require_parity(report, ParityTolerance(0.5, 0.2001))


@pytest.mark.parametrize(
    ("maximum", "mean", "rows_apart", "cause"),
    [
        (7.8, 1.8, 8, "position_ids or attention_mask"),
        (2.2, 0.1, 4, "position_ids or attention_mask"),
        (0.48, 0.06, 8, "temperature"),
        (0.14, 0.0076, 5, "ids that can be sampled"),
        (0.14, 0.004, 8, "temperature"),
        (0.04, 0.006, 8, "temperature"),
        (0.352, 0.0392, 8, "weights other than those that sampled"),
        (0.3, 1e-3, 1, "a few rows only"),
        (9.0, 1.2, 2, "a few rows only"),
        (1.6e-2, 2.7e-3, 8, "another dtype"),
    ],
)
def test_the_likely_cause_fits_what_was_measured(maximum: float, mean: float, rows_apart: int, cause: str) -> None:
    report = ParityReport(maximum, mean, 1.0, 1.0, 100, 8, rows_apart, ("a",))
    assert cause in str(ParityError(report, TOLERANCE))


@pytest.mark.parametrize(
    ("maximum", "mean", "cause"),
    [
        (5.6, 0.58, "other prompts or tokens"),
        (0.48, 0.42, "window"),
        (4.6e-3, 2.3e-3, "guidance"),
        (3.1e-4, 1.9e-4, "adapters that were not loaded"),
        (2.0e-5, 1.7e-5, "another dtype"),
    ],
)
def test_the_likely_cause_of_denoising_steps(maximum: float, mean: float, cause: str) -> None:
    report = ParityReport(maximum, mean, 1.0, 1.0, 16, 8, 8, ("a",), "denoising")
    message = str(ParityError(report, TOLERANCE))
    assert cause in message
    assert "over 16 denoising steps" in message


def test_rows_that_are_apart_are_counted() -> None:
    report = report_of((0.0, 0.5), (-0.04, 9.0), (0.06, 0.0))
    assert (report.rows, report.rows_apart) == (3, 2)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", ["stored", "recomputed"])
def test_what_is_not_finite_is_refused_by_name(value: float, side: str) -> None:
    damaged = STORED.clone()
    damaged[1, 0] = value
    pair = (damaged, STORED) if side == "stored" else (STORED, damaged)
    with pytest.raises(NonFiniteError) as caught:
        measure_parity(SAMPLE_IDS, *pair, MASK)
    assert (caught.value.quantity, caught.value.sample_ids) == (f"{side} log-prob", ("b",))


def test_what_is_not_finite_under_the_mask_is_not_looked_at() -> None:
    damaged = STORED.clone()
    damaged[1, 1] = math.nan
    assert measure_parity(SAMPLE_IDS, damaged, damaged, MASK).max_difference == 0.0


def test_an_empty_mask_is_refused() -> None:
    with pytest.raises(ValueError, match="loss mask is empty"):
        measure_parity(SAMPLE_IDS, STORED, STORED, torch.zeros_like(MASK))


def test_the_error_survives_another_process() -> None:
    error = ParityError(report_of((0.0, 0.5), (0.0, 0.0), (0.0, 0.0)), TOLERANCE)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
