"""Rows of other weights, rows that were cut, tokens of low entropy: what the update does with each."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from grpo_core.losses.settings import MismatchSettings
from grpo_core.parity import ParityError, ParityTolerance
from grpo_core.rollouts.records import TrainingRows
from grpo_core.update.optimizer import PolicyOptimizer
from grpo_core.update.policy_update import update_policy
from grpo_core.update.settings import OptimizerSettings, UpdateSettings
from grpo_core.update.step import UpdateResult
from tests.grpo_core.toy_policy import TablePolicy, sampled_rows

ADVANTAGES = [1.0, -1.0, 0.5, -0.5, 1.5, -1.5, 0.25]
PARITY = ParityTolerance(1e-4, 1e-5)
SETTINGS = UpdateSettings(minibatch_size=7, micro_batch_size=2, max_grad_norm=1e9)


def gradient(policy: TablePolicy, rows: TrainingRows, settings: UpdateSettings) -> tuple[Tensor, UpdateResult]:
    optimizer = PolicyOptimizer(policy.trainable_parameters(), OptimizerSettings(1e-9))
    result = update_policy(policy, optimizer, rows, settings, parity=PARITY, seed=0)
    assert policy.table.grad is not None
    return policy.table.grad.clone(), result


def stale_rows() -> tuple[TablePolicy, TrainingRows]:
    """Rows 0 to 2 were sampled by the policy before it moved, the others by the policy itself."""
    policy = TablePolicy(7)
    before = sampled_rows(policy, ADVANTAGES)
    with torch.no_grad():
        policy.table.add_(torch.randn(policy.table.shape, generator=torch.Generator().manual_seed(3)))
    after = sampled_rows(policy, ADVANTAGES)
    own = torch.tensor([False] * 3 + [True] * 4)
    logprobs = torch.where(own.unsqueeze(-1), after.rollout_logprobs, before.rollout_logprobs)
    ids = torch.where(own.unsqueeze(-1), after.actions.token_ids, before.actions.token_ids)
    tokens = replace(after.actions, token_ids=ids)
    return policy, replace(after, actions=tokens, rollout_logprobs=logprobs, on_policy=own)


def test_rows_of_other_weights_need_a_correction() -> None:
    policy, rows = stale_rows()
    with pytest.raises(ValueError, match=r"update\.mismatch\.mode"):
        gradient(policy, rows, SETTINGS)


@pytest.mark.parametrize("padded_together", [64, 2])
def test_rows_of_other_weights_pass_no_gate_and_are_weighted(
    padded_together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient is that of the rows alone, each token's times min(exp(old - rollout), cap)."""
    monkeypatch.setattr("grpo_core.update.policy_update._ROWS_AT_ONCE", padded_together)
    policy, rows = stale_rows()
    corrected, result = gradient(policy, rows, replace(SETTINGS, mismatch=MismatchSettings("truncate", cap=1.5)))
    with torch.no_grad():
        old = policy.logprobs(rows.actions).logprobs
    weights = (old - rows.rollout_logprobs).exp().clamp(max=1.5)
    policy.table.grad = None
    logprobs = policy.logprobs(rows.actions).logprobs
    by_hand = -(weights * rows.advantages.unsqueeze(-1) * logprobs).mean(-1).mean()
    (expected,) = torch.autograd.grad(by_hand, policy.table)
    torch.testing.assert_close(corrected, expected, rtol=1e-5, atol=1e-7)
    metrics = result.metrics()
    assert metrics["mismatch/mean_weight"] == pytest.approx(float(weights.mean()), rel=1e-5)
    assert metrics["sampling/importance_sampling_ratio/mean"] == pytest.approx(float(weights.mean()), rel=1e-5)
    assert metrics["sampling/importance_sampling_ratio/max"] == 1.5
    assert metrics["sampling/sampling_logp_difference/max"] > 0.5


def test_the_gate_still_stands_for_the_rows_of_these_weights() -> None:
    policy, rows = stale_rows()
    disturbed = rows.rollout_logprobs.clone()
    disturbed[5, 0] += 0.3
    settings = replace(SETTINGS, mismatch=MismatchSettings("mask"))
    with pytest.raises(ParityError) as caught:
        gradient(policy, replace(rows, rollout_logprobs=disturbed), settings)
    assert caught.value.report.worst_samples[0] == "s5"


def test_rows_that_were_cut_leave_the_loss_and_stay_in_its_denominator() -> None:
    policy = TablePolicy(7)
    rows = replace(sampled_rows(policy, ADVANTAGES), finished=torch.tensor([True] * 5 + [False] * 2))
    masked, result = gradient(policy, rows, replace(SETTINGS, mask_truncated=True))
    assert torch.equal(masked[5:], torch.zeros_like(masked[5:]))
    assert result.steps[0].trained_tokens == 25
    whole, _ = gradient(TablePolicy(7), rows, SETTINGS)
    # grpo divides by all seven rows either way.
    torch.testing.assert_close(masked[:5], whole[:5])


def test_where_every_row_was_cut_nothing_is_trained() -> None:
    policy = TablePolicy(7)
    before = policy.table.detach().clone()
    rows = replace(sampled_rows(policy, ADVANTAGES), finished=torch.zeros(7, dtype=torch.bool))
    optimizer = PolicyOptimizer(policy.trainable_parameters(), OptimizerSettings(0.1))
    result = update_policy(policy, optimizer, rows, replace(SETTINGS, mask_truncated=True), parity=PARITY, seed=0)
    assert result.metrics()["optimizer_steps"] == 0.0
    assert torch.equal(policy.table.detach(), before)


@pytest.mark.parametrize("micro_batch_size", [1, 2, 7])
def test_tokens_of_low_entropy_are_left_alone_whatever_the_microbatch(micro_batch_size: int) -> None:
    policy = TablePolicy(7)
    rows = sampled_rows(policy, ADVANTAGES)
    settings = replace(SETTINGS, entropy_quantile=0.2, micro_batch_size=micro_batch_size)
    trained, _ = gradient(policy, rows, settings)
    with torch.no_grad():
        entropy = policy.logprobs(rows.actions).entropy
    highest = entropy >= entropy.flatten().sort(descending=True).values[6]
    assert torch.equal(trained.abs().sum(-1) > 0, highest)
