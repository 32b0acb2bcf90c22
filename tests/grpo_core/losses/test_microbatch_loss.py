"""The composed loss: by hand, over any split into microbatches, and blind to what is masked."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor

from grpo_core.losses.microbatch_loss import LossInputs, compute_microbatch_loss, count_clipped
from grpo_core.losses.policy_loss import TermInputs
from grpo_core.losses.ratios import MAX_LOG_RATIO
from grpo_core.losses.settings import LOSSES, LossSettings, MismatchSettings
from tests.grpo_core.losses.oracles import TOKEN_LOSSES, Loss, count, loss_of, random_inputs

SEEDS = st.integers(0, 2**32 - 1)
PER_TOKEN = ("surrogate", "kl", "importance_ratio", "clipped_low", "clipped_high", "active")


def everything(loss: str, estimator: Any = "k3") -> LossSettings:
    """Every switch that the loss has."""
    return LossSettings(
        loss,
        clip_range_high=0.28,
        delta=1.5 if LOSSES[loss].clips else None,
        loss_settings={"ratio_cap": 1.4} if loss == "cispo" else {},
        kl_coef=0.1,
        kl_estimator=estimator,
        kl_importance_correction=True,
        entropy_coef=0.05,
        mismatch=MismatchSettings("truncate", "token", 1.5),
        off_policy_threshold=0.2,
    )


def plain(loss: str = "grpo", **options: Any) -> LossSettings:
    return LossSettings(loss, **{"kl_importance_correction": False} | options)


@st.composite
def partitions(draw: st.DrawFn, rows: int = 6) -> list[list[int]]:
    """The rows in any order, cut anywhere."""
    order = draw(st.permutations(range(rows)))
    cuts = sorted(draw(st.sets(st.integers(1, rows - 1))))
    return [order[start:end] for start, end in zip([0, *cuts], [*cuts, rows], strict=True)]


def by_hand() -> LossInputs:
    """Row 1, A = 1: ratios 1.5 and .5. Row 2, A = -2: one token of ratio 1. k3 = .193147 for the first token alone."""
    return LossInputs(
        logprobs=torch.tensor([[0.3, 0.2], [0.5, 0.1]]).log(),
        old_logprobs=torch.tensor([[0.2, 0.4], [0.5, 0.9]]).log(),
        advantages=torch.tensor([1.0, -2.0]),
        loss_mask=torch.tensor([[True, True], [True, False]]),
        rollout_logprobs=torch.tensor([[0.1, 0.4], [1.0, 0.5]]).log(),
        ref_logprobs=torch.tensor([[0.15, 0.2], [0.5, 0.7]]).log(),
        entropy=torch.tensor([[1.0, 2.0], [4.0, 8.0]]),
        entropy_mask=None,
    )


KL = 0.1 * 0.193147
ROOT = math.sqrt(0.75)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # grpo: the first ratio is clipped at 1.2; KL on the first token.
        (plain(kl_coef=0.1), ((-1.2 - 0.5 + KL) / 2 + 2) / 2),
        (plain("dr_grpo", kl_coef=0.1), (-1.2 - 0.5 + KL + 2) / (2 * 11)),
        # k1 is ln 2, k2 is (ln 2)^2 / 2; the correction multiplies by the ratio 1.5, which no clip touches.
        (plain(kl_coef=0.1, kl_estimator="k1"), ((-1.7 + 0.1 * 0.693147) / 2 + 2) / 2),
        (plain(kl_coef=0.1, kl_estimator="k2"), ((-1.7 + 0.1 * 0.240227) / 2 + 2) / 2),
        (plain(kl_coef=0.1, kl_importance_correction=True), ((-1.7 + 1.5 * KL) / 2 + 2) / 2),
        # gspo: the row's ratio is sqrt(1.5 * .5), one term a row whatever its length; luspo counts it for each token.
        (plain("gspo"), (-ROOT + 2) / 2),
        (plain("luspo"), (-2 * ROOT + 2) / 2),
        # The mean entropy of three tokens is 7 / 3, whatever the loss's reduction.
        (plain("dapo", entropy_coef=0.3), (-1.7 + 2) / 3 - 0.3 * 7 / 3),
        # Mismatch ratios 2, 1 and .5; truncated at 1.5, or masked beyond it.
        (plain("dapo", mismatch=MismatchSettings("truncate", "token", 1.5)), (-1.2 * 1.5 - 0.5 + 2 * 0.5) / 3),
        (plain("dapo", mismatch=MismatchSettings("mask", "token", 1.5)), (-0.5 + 2 * 0.5) / 3),
        (plain("dapo", mismatch=MismatchSettings("truncate", "sequence", 1.5)), (-1.7 * 1.5 + 2 * 0.5) / 3),
        # The second row's log-prob fell from ln 1 to ln .5, by .69 nats: out at .5, in at .7.
        (plain("dapo", off_policy_threshold=0.5), -1.7 / 3),
        (plain("dapo", off_policy_threshold=0.7), (-1.7 + 2) / 3),
    ],
)
def test_loss_by_hand(settings: LossSettings, expected: float) -> None:
    assert loss_of(by_hand(), settings).value == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_of_tokens_that_other_weights_sampled(estimator: Any) -> None:
    """One token of three ids, in the sampler's proportions: the mean is the expectation, and so is its gradient."""
    ids = torch.tensor([[0]] * 5 + [[1]] * 3 + [[2]] * 2)
    sampler, old, reference, policy = (
        torch.tensor(weights, dtype=torch.float64).log()
        for weights in ([0.5, 0.3, 0.2], [0.1, 0.2, 0.7], [0.6, 0.3, 0.1], [0.15, 0.25, 0.6])
    )
    logits = policy.clone().requires_grad_()
    logprobs = logits.log_softmax(-1)
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    assert float(exact.detach()) == pytest.approx(0.15 * math.log(0.25) + 0.25 * math.log(5 / 6) + 0.6 * math.log(6))
    (gradient,) = torch.autograd.grad(exact, logits)

    def kl(mismatch: MismatchSettings) -> Tensor:
        inputs = LossInputs(
            logits.log_softmax(-1)[ids],
            old[ids],
            torch.zeros(10, dtype=torch.float64),
            torch.ones(10, 1).bool(),
            sampler[ids],
            reference[ids],
        )
        settings = LossSettings("bnpo", kl_coef=1.0, kl_estimator=estimator, mismatch=mismatch)
        loss, terms = compute_microbatch_loss(inputs, settings, count(inputs))
        assert float(terms.kl.mean()) == pytest.approx(float(loss.detach()))
        return loss

    found = kl(MismatchSettings("truncate", cap=5.0))
    assert float(found.detach()) == pytest.approx(float(exact.detach()))
    torch.testing.assert_close(torch.autograd.grad(found, logits)[0], gradient)
    # The third id's weight is 3.5; truncated at 3, its term 0.6 x (ln 6, or 1 / 6 + ln 6 - 1) counts 6 / 7.
    term = 0.6 * (math.log(6) + (0.0 if estimator == "k1" else 1 / 6 - 1))
    assert float(kl(MismatchSettings("truncate")).detach()) == pytest.approx(float(exact.detach()) - term / 7)
    assert abs(float(kl(MismatchSettings()).detach()) - float(exact.detach())) > 0.3


def test_terms_by_hand() -> None:
    terms = loss_of(by_hand(), plain(kl_coef=0.1)).terms[0]
    assert terms.importance_ratio.flatten().tolist() == pytest.approx([1.5, 0.5, 1.0, 0.0])
    assert terms.surrogate.flatten().tolist() == pytest.approx([-1.2, -0.5, 2.0, 0.0])
    assert terms.clipped_high.tolist() == [[True, False], [False, False]]
    assert not terms.clipped_low.any()


def test_clipped_rows_count_once_with_one_ratio_a_row() -> None:
    """Row 1 has the ratio .866: below .9 and to become less likely, so clipped, once; as tokens, twice."""
    inputs = replace(by_hand(), advantages=torch.tensor([-1.0, 1.0]))
    terms = loss_of(inputs, plain("gspo", clip_range=0.1)).terms[0]
    rows = count_clipped(terms, inputs.loss_mask, plain("gspo"))
    tokens = count_clipped(terms, inputs.loss_mask, plain("grpo"))
    assert rows.tolist() == [1, 0, 2]
    assert tokens.tolist() == [2, 0, 3]


def test_overlong_rows_stay_in_the_count_of_rows_and_leave_that_of_tokens() -> None:
    inputs = by_hand()
    inputs = replace(inputs, loss_mask=inputs.loss_mask & torch.tensor([[False], [True]]))
    assert loss_of(inputs, plain("grpo")).value == pytest.approx(2 / 2)
    assert loss_of(inputs, plain("dapo")).value == pytest.approx(2 / 1)


def require_same(found: Loss, expected: Loss) -> None:
    assert found.value == pytest.approx(expected.value, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=1e-9, atol=1e-14)
    torch.testing.assert_close(found.entropy, expected.entropy, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("loss", TOKEN_LOSSES)
@hypothesis_settings(max_examples=8)
@given(SEEDS, partitions(), st.sampled_from(["k1", "k2", "k3"]))
def test_microbatches_add_up_to_the_minibatch(loss: str, seed: int, split: list[list[int]], estimator: Any) -> None:
    """Any rows in any microbatch, every switch on, the minibatch a part of a larger rollout set."""
    inputs, settings = random_inputs(seed), everything(loss, estimator)
    denominators = count(inputs, rollout_rows=20, rollout_tokens=81)
    require_same(loss_of(inputs, settings, denominators, split), loss_of(inputs, settings, denominators))


@pytest.mark.parametrize("loss", TOKEN_LOSSES)
@hypothesis_settings(max_examples=8)
@given(SEEDS)
def test_nothing_under_the_mask_is_seen(loss: str, seed: int) -> None:
    """NaN and infinity there reach neither the loss, nor its gradient, nor its terms."""
    inputs, settings = random_inputs(seed), everything(loss)
    garbage = {
        "logprobs": math.nan,
        "old_logprobs": -math.inf,
        "rollout_logprobs": math.nan,
        "ref_logprobs": math.inf,
        "entropy": math.nan,
        "entropy_mask": True,
    }
    mask = inputs.loss_mask
    changed = {name: torch.where(mask, getattr(inputs, name), value) for name, value in garbage.items()}
    expected, found = loss_of(inputs, settings), loss_of(replace(inputs, **changed), settings, count(inputs))
    assert found.value == expected.value
    assert torch.equal(found.logprobs, expected.logprobs)
    assert torch.equal(found.entropy, expected.entropy)
    for name in PER_TOKEN:
        values = getattr(found.terms[0], name)
        assert torch.equal(values, getattr(expected.terms[0], name))
        assert not values[~mask].any()


@pytest.mark.parametrize("loss", TOKEN_LOSSES)
def test_only_log_probs_and_entropy_get_a_gradient(loss: str) -> None:
    inputs = random_inputs(2)
    names = ("old_logprobs", "advantages", "rollout_logprobs", "ref_logprobs", "logprobs", "entropy")
    leaves = {name: getattr(inputs, name).clone().requires_grad_() for name in names}
    value, terms = compute_microbatch_loss(replace(inputs, **leaves), everything(loss), count(inputs))
    value.backward()
    assert {name for name, leaf in leaves.items() if leaf.grad is not None} == {"logprobs", "entropy"}
    constants = (each for each in vars(terms).values() if isinstance(each, Tensor))
    assert not any(each.requires_grad for each in constants)


def test_drift_is_measured_against_the_old_policy_where_nothing_else_is_known() -> None:
    """Row 2's log-prob is that of the old policy, so it stays; against the sampler's it had drifted."""
    inputs = replace(by_hand(), rollout_logprobs=None)
    assert loss_of(inputs, plain("dapo", off_policy_threshold=0.5)).value == pytest.approx((-1.7 + 2) / 3)


@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({"kl_coef": 0.1}, "ref_logprobs"),
        ({"mismatch": MismatchSettings("mask")}, "rollout_logprobs"),
        ({"entropy_coef": 0.1}, "entropy"),
    ],
)
def test_a_term_without_its_input_is_refused(options: dict[str, Any], missing: str) -> None:
    inputs = replace(by_hand(), **{missing: None})
    with pytest.raises(ValueError, match=missing):
        compute_microbatch_loss(inputs, plain(**options), count(inputs))


@pytest.mark.parametrize("loss", TOKEN_LOSSES)
@pytest.mark.parametrize(("distance", "advantage"), [(200.0, -1.0), (200.0, 1.0), (-200.0, 1.0)])
def test_one_token_far_away_leaves_a_finite_loss_and_gradient(loss: str, distance: float, advantage: float) -> None:
    """exp(200) overflows fp32: its log-ratio is clamped, and counted once per token, or per token of its row."""
    logprobs = torch.tensor([[-1.0, -1.0]])
    old = torch.tensor([[-1.0 - 4 * distance, -1.0]])
    inputs = LossInputs(logprobs, old, torch.tensor([advantage]), torch.ones(1, 2).bool(), ref_logprobs=old + distance)
    found = loss_of(inputs, LossSettings(loss, kl_coef=0.1))
    assert math.isfinite(found.value)
    assert found.logprobs.isfinite().all()
    assert int(found.terms[0].log_ratio_clamped.sum()) == (2 if plain(loss).level == "sequence" else 1)
    assert found.terms[0].importance_ratio.log().abs().max() <= MAX_LOG_RATIO * 1.001
    assert not loss_of(random_inputs(6), plain(loss)).terms[0].log_ratio_clamped.any()


def reinforce(inputs: TermInputs, settings: LossSettings) -> torch.Tensor:
    return -inputs.advantages.unsqueeze(-1) * inputs.logprobs


def reinforce_over_tokens(inputs: TermInputs, settings: LossSettings) -> torch.Tensor:
    return (reinforce(inputs, settings) * inputs.loss_mask).sum() / inputs.denominators.tokens


@pytest.mark.parametrize("function", [reinforce, reinforce_over_tokens])
def test_a_loss_of_the_users(function: Any) -> None:
    """Named by its import path: per token it is averaged over rows as grpo is, a scalar is taken as it is."""
    inputs = replace(random_inputs(3), entropy_mask=None)
    per_token = -inputs.advantages.unsqueeze(-1) * torch.where(inputs.loss_mask, inputs.logprobs, 0.0)
    expected = {
        "reinforce": per_token.sum(-1) / inputs.loss_mask.sum(-1).clamp(min=1) / 6,
        "reinforce_over_tokens": per_token / inputs.loss_mask.sum(),
    }[function.__name__]
    settings = plain(f"{__name__}:{function.__name__}")
    found = loss_of(inputs, settings, count(inputs), split=[[4], [0, 5, 2], [1, 3]])
    assert found.value == pytest.approx(float(expected.sum()))
    assert sum(float(terms.policy_loss) for terms in found.terms) == pytest.approx(found.value)
    with_kl = replace(settings, kl_coef=0.1)
    kl = loss_of(inputs, replace(settings, loss="grpo", kl_coef=0.1)).value - loss_of(inputs, plain("grpo")).value
    assert loss_of(inputs, with_kl).value == pytest.approx(float(expected.sum()) + kl)


def test_the_policy_loss_is_the_loss_without_kl_and_bonus() -> None:
    settings = plain("dapo", kl_coef=0.1, entropy_coef=0.3)
    terms = loss_of(by_hand(), settings).terms[0]
    assert float(terms.policy_loss) == pytest.approx((-1.2 - 0.5 + 2) / 3)


@pytest.mark.parametrize(("loss", "expected"), [("grpo", -0.25), ("bnpo", -0.5), ("dr_grpo", -0.375)])
def test_rows_without_denominators_are_the_whole_minibatch(loss: str, expected: float) -> None:
    """On policy every ratio is 1: rows of two tokens and one, A = 1 and -1/2, in a batch of two tokens per row."""
    logprobs = torch.tensor([[-1.0, -2.0], [-3.0, 0.0]], requires_grad=True)
    mask = torch.tensor([[True, True], [True, False]])
    inputs = LossInputs(logprobs, logprobs.detach(), torch.tensor([1.0, -0.5]), mask)
    value, _ = compute_microbatch_loss(inputs, None if loss == "grpo" else LossSettings(loss=loss))
    assert value.item() == pytest.approx(expected)
