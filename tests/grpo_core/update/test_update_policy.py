"""One update: every row once an epoch, the same gradient however it is split, and never a number that is not finite."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from grpo_core.collect import collect_rollouts, join_groups
from grpo_core.errors import InputError, NonFiniteError
from grpo_core.losses.microbatch_loss import LossInputs, compute_microbatch_loss
from grpo_core.losses.reductions import Denominators
from grpo_core.losses.settings import MismatchSettings
from grpo_core.parity import ParityError, ParityTolerance
from grpo_core.policies.microbatches import by_length
from grpo_core.policies.trained import model
from grpo_core.policies.trained.settings import TrainingChoice
from grpo_core.rollouts.records import ActionLogprobs, GroupRequest, TrainingRows
from grpo_core.update.optimizer import PolicyOptimizer
from grpo_core.update.policy_update import update_policy
from grpo_core.update.settings import OptimizerSettings, UpdateSettings, minibatches
from grpo_core.update.step import RatioStepMetrics, UpdateResult
from tests.grpo_core.toy_policy import TablePolicy, sampled_rows
from tests.tiny_policies import TEXT_PROMPTS, build_text_policy

ADVANTAGES = [1.0, -1.0, 0.5, -0.5, 1.5, -1.5, 0.25]
PARITY = ParityTolerance(1e-4, 1e-5)
SETTINGS = UpdateSettings(minibatch_size=3, micro_batch_size=2, clip_range_high=0.28, max_grad_norm=1e9)


def changed(**changes: Any) -> UpdateSettings:
    """SETTINGS with these changes."""
    return replace(SETTINGS, **changes)


def train(policy: TablePolicy, rows: TrainingRows, seed: int = 0, lr: float = 0.05, **changes: Any) -> UpdateResult:
    optimizer = PolicyOptimizer(policy.trainable_parameters(), OptimizerSettings(lr))
    return update_policy(policy, optimizer, rows, changed(**changes), parity=PARITY, seed=seed)


def table_after(seed: int = 0, **changes: Any) -> Tensor:
    policy = TablePolicy(7)
    train(policy, sampled_rows(policy, ADVANTAGES), seed, **changes)
    return policy.table.detach()


def test_each_epoch_sees_each_row_once_in_an_order_of_its_own() -> None:
    policy = TablePolicy(7)
    result = train(policy, sampled_rows(policy, ADVANTAGES), epochs=2)
    assert [len(prompts) for prompts in policy.seen] == [2, 1, 2, 1, 1] * 2
    seen = [prompt for prompts in policy.seen for prompt in prompts]
    assert sorted(seen[:7]) == sorted(seen[7:]) == [str(row) for row in range(7)]
    assert seen[:7] != seen[7:]
    assert len(result.steps) == 6
    assert torch.equal(table_after(minibatch_size=None, minibatches=4), table_after(minibatch_size=2))


@pytest.mark.parametrize(
    ("setting", "value"), [("kl_estimator", "exact"), ("loss", "grpo_guard"), ("loss", "flow_dppo")]
)
def test_settings_of_denoising_steps_are_refused(setting: str, value: str) -> None:
    policy = TablePolicy(7)
    with pytest.raises(InputError) as refused:
        train(policy, sampled_rows(policy, ADVANTAGES), **{setting: value})
    assert (refused.value.place, refused.value.value) == (f"update.{setting}", value)


class CountedNames(tuple[str, ...]):
    """Names that count how often one is looked up."""

    looked = 0

    def __getitem__(self, place: Any) -> Any:
        type(self).looked += 1
        return super().__getitem__(place)


def test_lookups_of_names_grow_with_the_rows_and_not_with_their_square() -> None:
    def lookups(rows: int) -> int:
        policy, CountedNames.looked = TablePolicy(rows), 0
        sampled = sampled_rows(policy, [1.0, -1.0] * (rows // 2))
        names = CountedNames(sampled.sample_ids)
        train(policy, replace(sampled, sample_ids=names), minibatch_size=None, micro_batch_size=1)
        return CountedNames.looked

    assert lookups(16) >= 16
    assert lookups(64) <= 5 * lookups(16)


def test_order_of_the_rows_comes_from_the_seed() -> None:
    first, again, other = (list(minibatches(50, 8, 2, seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert [len(batch) for batch in first] == [8, 8, 8, 8, 8, 8, 2] * 2


def test_the_same_seed_gives_the_same_weights_to_the_bit() -> None:
    assert torch.equal(table_after(epochs=2), table_after(epochs=2))
    assert not torch.equal(table_after(epochs=2), table_after(seed=1, epochs=2))


def test_first_gradient_by_hand() -> None:
    """One row, one token, uniform over four ids, A = 2: the derivative of -A log p_i by the logits is A (p - e_i)."""
    policy = TablePolicy(1, time=1)
    with torch.no_grad():
        policy.table.zero_()
    rows = sampled_rows(policy, [2.0])
    result = train(policy, rows)
    expected = torch.full((4,), 0.5)
    expected[rows.actions.token_ids[0, 0]] -= 2.0
    assert policy.table.grad is not None
    torch.testing.assert_close(policy.table.grad.flatten(), expected)
    (step,) = result.steps
    assert step.grad_norm == pytest.approx(float(expected.norm()))
    assert step.loss == pytest.approx(-2.0)
    assert step.entropy == pytest.approx(math.log(4))
    assert (step.ratio_mean, step.kl, step.clip_low, step.clip_high) == (1.0, None, 0.0, 0.0)
    assert "kl" not in result.metrics()


def test_the_gradient_is_clipped_to_the_norm() -> None:
    policy = TablePolicy(7)
    result = train(policy, sampled_rows(policy, ADVANTAGES), max_grad_norm=1e-3, minibatch_size=7)
    assert result.steps[0].grad_norm > 1e-2
    assert policy.table.grad is not None
    assert float(policy.table.grad.norm()) == pytest.approx(1e-3, rel=1e-3)


def test_no_gradient_is_left_from_an_earlier_step() -> None:
    """At a learning rate of zero every step has the gradient of the first, whatever stood there before."""
    policy = TablePolicy(7)
    policy.table.grad = torch.full_like(policy.table, 100.0)
    result = train(policy, sampled_rows(policy, ADVANTAGES), epochs=3, minibatch_size=7, lr=0.0)
    norms = [step.grad_norm for step in result.steps]
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-5)
    assert norms[0] < 5


def test_clipping_stops_what_is_repeated() -> None:
    """Far more epochs on the same rows: every ratio is pushed past its bound, then its gradient is gone."""
    policy = TablePolicy(7)
    result = train(policy, sampled_rows(policy, ADVANTAGES), epochs=60, minibatch_size=7, micro_batch_size=7)
    metrics = result.metrics()
    assert result.steps[-1].clip_high + result.steps[-1].clip_low > 0.9
    assert metrics["clip_ratio/low_min"] == 0.0
    assert metrics["clip_ratio/high_max"] > 0.4
    assert metrics["clip_ratio/region_mean"] == pytest.approx(
        metrics["clip_ratio/low_mean"] + metrics["clip_ratio/high_mean"]
    )
    assert metrics["optimizer_steps"] == 60


def test_zero_advantages_change_nothing_and_every_metric_is_finite() -> None:
    policy = TablePolicy(7)
    before = policy.table.detach().clone()
    result = train(policy, sampled_rows(policy, [0.0] * 7), kl_coef=0.1)
    assert all(math.isfinite(value) for value in result.metrics().values())
    assert [step.grad_norm for step in result.steps] == pytest.approx([0.0] * 3, abs=1e-6)
    # What is left is the rounding of the KL's zero, which AdamW may scale up; without the KL it is exactly nothing.
    fresh = TablePolicy(7)
    train(fresh, sampled_rows(fresh, [0.0] * 7))
    assert torch.equal(fresh.table.detach(), before)


def test_a_row_without_tokens_teaches_nothing() -> None:
    policy = TablePolicy(7)
    rows = sampled_rows(policy, ADVANTAGES)
    mask = rows.actions.loss_mask.clone()
    mask[2] = False
    rows = replace(rows, actions=replace(rows.actions, loss_mask=mask))
    before = policy.table.detach().clone()
    result = train(policy, rows, micro_batch_size=1)
    assert torch.equal(policy.table.detach()[2], before[2])
    assert not torch.equal(policy.table.detach()[1], before[1])
    assert all(math.isfinite(value) for value in result.metrics().values())


def test_without_rows_nothing_is_changed() -> None:
    policy = TablePolicy(1)
    before = policy.table.detach().clone()
    result = train(policy, sampled_rows(policy, [1.0]).select([]))
    assert result.metrics() == {"optimizer_steps": 0.0}
    assert torch.equal(policy.table.detach(), before)


def test_progress_counts_every_microbatch_to_its_end() -> None:
    policy = TablePolicy(7)
    reported: list[tuple[int, int]] = []
    optimizer = PolicyOptimizer(policy.trainable_parameters(), OptimizerSettings(0.1))
    settings = replace(SETTINGS, epochs=2, old_logprobs="recompute")
    rows = sampled_rows(policy, ADVANTAGES)
    update_policy(
        policy, optimizer, rows, settings, parity=PARITY, seed=0, on_progress=lambda *ticks: reported.append(ticks)
    )
    # 2 without gradients, for the rows outside the first minibatch; (2 + 2 + 1) an epoch.
    assert reported == [(done, 12) for done in range(1, 13)]


def updated_with_recomputed_log_probs(rows: TrainingRows, settings: UpdateSettings) -> Tensor:
    """The table after an update by hand, with every old log-prob from passes of its own before the first step."""
    policy = TablePolicy(7)
    optimizer = torch.optim.AdamW([policy.table], lr=0.05, betas=(0.9, 0.95), weight_decay=0.0)
    with torch.no_grad():
        old = policy.logprobs(rows.actions).logprobs
    for indices in minibatches(7, settings.minibatch_size or 7, settings.epochs, seed=0):
        optimizer.zero_grad()
        mask = rows.actions.loss_mask[indices]
        counts = replace(Denominators.of(mask), rollout_rows=7, rollout_tokens=int(rows.actions.loss_mask.sum()))
        for places in by_length(mask.sum(-1).tolist(), settings.micro_batch_size):
            part = [indices[place] for place in places]
            inputs = LossInputs(
                logprobs=policy.logprobs(rows.actions.select(part)).logprobs,
                old_logprobs=old[part],
                rollout_logprobs=rows.rollout_logprobs[part],
                advantages=rows.advantages[part],
                loss_mask=rows.actions.loss_mask[part],
            )
            compute_microbatch_loss(inputs, settings, counts)[0].backward()
        nn.utils.clip_grad_norm_([policy.table], settings.max_grad_norm)
        optimizer.step()
    return policy.table.detach()


@pytest.mark.parametrize("micro_batch_size", [2, 7])
@pytest.mark.parametrize(("minibatch_size", "epochs"), [(7, 1), (7, 3), (3, 1), (3, 2)])
def test_log_probs_of_the_first_passes_train_as_recomputed_ones(
    minibatch_size: int, epochs: int, micro_batch_size: int
) -> None:
    policy = TablePolicy(7)
    rows = sampled_rows(policy, ADVANTAGES)
    # Other weights than 1, so that a wrong old log-prob shows in the first step too.
    rows = replace(rows, rollout_logprobs=rows.rollout_logprobs - 5e-6 * torch.arange(5))
    settings = changed(
        minibatch_size=minibatch_size,
        epochs=epochs,
        micro_batch_size=micro_batch_size,
        loss="dapo",
        mismatch=MismatchSettings("truncate"),
    )
    optimizer = PolicyOptimizer(policy.trainable_parameters(), OptimizerSettings(0.05, betas=(0.9, 0.95)))
    parity = ParityTolerance(1e-3, 1e-3)
    result = update_policy(policy, optimizer, rows, settings, parity=parity, seed=0)
    assert result.before["sampling/sampling_logp_difference/max"] == pytest.approx(2e-5, rel=0.05)
    assert torch.equal(policy.table.detach(), updated_with_recomputed_log_probs(rows, settings))


def update_of_24_rows(planted: Mapping[int, float], **changes: Any) -> tuple[Tensor, UpdateResult, int]:
    """Table, measurements and passes without gradients of an update where some stored log-probs are off by this."""
    policy, passes = TablePolicy(24), 0
    rows = sampled_rows(policy, [1.0, -1.0] * 12)
    for row, difference in planted.items():
        rows.rollout_logprobs[row, 1] += difference
    score = policy.logprobs

    def counted(*args: Any, **options: Any) -> ActionLogprobs:
        nonlocal passes
        passes += not torch.is_grad_enabled()
        return score(*args, **options)

    policy.logprobs = counted  # type: ignore[method-assign]
    result = train(policy, rows, minibatch_size=4, **changes)
    return policy.table.detach(), result, passes


FIRST = next(minibatches(24, 4, 1, 0))
OTHERS = [row for row in range(24) if row not in FIRST]


@pytest.mark.parametrize(
    ("planted", "saved"),
    [
        pytest.param({}, 10, id="equal"),
        pytest.param({FIRST[2]: 2e-6}, 0, id="first minibatch"),
        pytest.param({OTHERS[10]: 2e-6}, 0, id="checked row of a later one"),
        pytest.param({OTHERS[11]: 2e-6}, 10, id="unchecked row"),
    ],
)
def test_stored_log_probs_stand_for_recomputed_ones_that_are_equal(planted: Mapping[int, float], saved: int) -> None:
    table, result, passes = update_of_24_rows(planted)
    expected, recomputed, all_passes = update_of_24_rows(planted, old_logprobs="recompute")
    assert result.before["old_logprobs/passes_saved"] == saved
    assert "old_logprobs/passes_saved" not in recomputed.before
    # One pass compares rows of later minibatches, unless the first minibatch has shown a difference.
    assert (passes, all_passes) == (10 - saved + (FIRST[2] not in planted), 10)
    assert torch.equal(table, expected) == (OTHERS[11] not in planted)


def test_one_damaged_row_among_those_that_stand_is_seen_by_recomputing_alone() -> None:
    assert update_of_24_rows({OTHERS[11]: 0.3})[1].before["sampling/sampling_logp_difference/max"] == 0
    with pytest.raises(ParityError, match=f"s{OTHERS[11]} "):
        update_of_24_rows({OTHERS[11]: 0.3}, old_logprobs="recompute")


def test_stored_log_probs_of_other_weights_do_not_stand() -> None:
    policy = TablePolicy(24)
    rows = sampled_rows(policy, [1.0, -1.0] * 12)
    older = replace(rows, on_policy=torch.arange(24) != OTHERS[11])
    result = train(policy, older, minibatch_size=4, mismatch=MismatchSettings("truncate"))
    assert "old_logprobs/passes_saved" not in result.before


@pytest.mark.parametrize("minibatch_size", [3, 7])
def test_a_disturbed_log_prob_is_refused_before_any_weight_changes(minibatch_size: int) -> None:
    policy = TablePolicy(7)
    rows = sampled_rows(policy, ADVANTAGES)
    disturbed = rows.rollout_logprobs.clone()
    disturbed[4, 2] += 0.3
    before = policy.table.detach().clone()
    with pytest.raises(ParityError) as caught:
        train(policy, replace(rows, rollout_logprobs=disturbed), minibatch_size=minibatch_size)
    assert caught.value.report.max_difference == pytest.approx(0.3, rel=1e-3)
    assert caught.value.report.worst_samples[0] == "s4"
    assert torch.equal(policy.table.detach(), before)
    assert policy.table.grad is None


def test_shares_of_rows_are_the_extremes_over_the_steps() -> None:
    first = RatioStepMetrics(0.5, 0.5, 1.0, 1e-3, None, None, 0.2, 0.3, 0.1, 0.4, 1.0, 2.0, 1.0, 10.0)
    second = replace(first, clip_low=0.4, clip_low_min=0.3, clip_high_max=0.6, log_ratio_clamped=3.0)
    metrics = UpdateResult({}, (first, second)).metrics()
    assert (metrics["clip_ratio/low_min"], metrics["clip_ratio/high_max"]) == (0.1, 0.6)
    assert (metrics["clip_ratio/low_mean"], metrics["log_ratio_clamped"]) == (pytest.approx(0.3), 5.0)


def test_a_minibatch_without_a_trained_token_leaves_finite_metrics() -> None:
    """Both rows of one of two minibatches are cut, whichever that is."""
    policy = TablePolicy(4)
    rows = sampled_rows(policy, ADVANTAGES[:4])
    (first, _) = minibatches(4, 2, 1, 0)
    rows = replace(rows, finished=torch.tensor([row not in first for row in range(4)]))
    result = train(policy, rows, minibatch_size=2, mask_truncated=True)
    assert sorted(step.trained_tokens > 0 for step in result.steps) == [False, True]
    assert all(math.isfinite(value) for value in result.metrics().values())


def test_a_few_tokens_of_an_engine_may_be_apart_and_no_more() -> None:
    policy = TablePolicy(7)
    rows = sampled_rows(policy, ADVANTAGES)
    disturbed, tokens = rows.rollout_logprobs.clone(), int(rows.actions.loss_mask.sum())
    disturbed[4, 2] += 0.3
    disturbed[1, 0] -= 0.4
    apart = replace(rows, rollout_logprobs=disturbed)
    before, by = policy.table.detach().clone(), "vllm 1 with a"

    def updated(share: float, mean: float = 0.1) -> UpdateResult:
        tolerance, settings = ParityTolerance(0.01, mean, share), changed()
        optimizer = PolicyOptimizer(policy.trainable_parameters(), OptimizerSettings(learning_rate=0.05))
        return update_policy(policy, optimizer, apart, settings, seed=0, parity=tolerance, sampled_by=by)

    for share, mean in ((1.9 / tokens, 0.1), (0.5, 0.6 / tokens)):
        with pytest.raises(ParityError) as refused:
            updated(share, mean)
        report = refused.value.report
        assert (report.tokens_beyond, report.worst_samples[:2], report.sampled_by) == (2, ("s1", "s4"), by)
        assert report.worst_differences[:2] == pytest.approx((0.4, 0.3), abs=1e-4)
        assert by in str(refused.value)
        assert "s1 (0.4)" in str(refused.value)
        assert torch.equal(policy.table.detach(), before)
    assert updated(2.01 / tokens).steps


@pytest.mark.parametrize("minibatch_size", [3, 7])
@pytest.mark.parametrize(
    ("part", "quantity"),
    [
        ("rollout_logprobs", "stored log-prob"),
        ("advantages", "loss"),
        ("weights", "recomputed log-prob"),
        ("reference", "loss"),
    ],
)
def test_nan_is_refused_by_name_and_leaves_the_weights(part: str, quantity: str, minibatch_size: int) -> None:
    policy = TablePolicy(7)
    rows = sampled_rows(policy, ADVANTAGES)
    if part == "weights":
        with torch.no_grad():
            policy.table[5, 1, 0] = math.nan
    elif part == "reference":
        policy.reference[5, 1, 0] = math.nan
    else:
        damaged = getattr(rows, part).clone()
        damaged[5] = math.nan
        rows = replace(rows, **{part: damaged})
    before = policy.table.detach().clone()
    with pytest.raises(NonFiniteError) as caught:
        train(policy, rows, lr=0.0, kl_coef=0.1, minibatch_size=minibatch_size)
    assert (caught.value.quantity, caught.value.sample_ids) == (quantity, ("s5",))
    assert policy.table.grad is None
    assert torch.equal(policy.table.detach().nan_to_num(), before.nan_to_num())


def test_weights_that_a_step_broke_are_refused() -> None:
    policy = TablePolicy(3)
    rows = sampled_rows(policy, [1.0, -1.0, 0.5])
    optimizer = PolicyOptimizer(policy.trainable_parameters(), OptimizerSettings(1e20, weight_decay=1e20))
    with pytest.raises(NonFiniteError) as caught:
        update_policy(policy, optimizer, rows, SETTINGS, parity=PARITY, seed=0)
    assert caught.value.quantity == "weight after a step"


def test_a_gradient_that_is_not_finite_is_refused_before_the_step() -> None:
    policy = TablePolicy(3)
    rows = sampled_rows(policy, [1.0, -1.0, 0.5])
    policy.table.register_hook(lambda gradient: torch.full_like(gradient, math.inf))
    before = policy.table.detach().clone()
    with pytest.raises(NonFiniteError) as caught:
        train(policy, rows)
    assert (caught.value.quantity, {*caught.value.sample_ids}) == ("gradient", {"s0", "s1", "s2"})
    assert torch.equal(policy.table.detach(), before)


# --- the shipped model


def test_the_references_weights_are_exchanged_once_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all weights are trained each exchange copies them."""
    policy = build_text_policy(choice=TrainingChoice(lora=None, reference="cpu"))
    requests = [GroupRequest(each, (f"{each} 0", f"{each} 1"), (1, 2), (0, 0)) for each in TEXT_PROMPTS[:3]]
    rows = join_groups(list(collect_rollouts(policy, requests, prompts_per_batch=3)), torch.tensor([[1.0, -1.0]] * 3))
    exchanges: list[int] = []
    exchange = model._exchange
    monkeypatch.setattr(model, "_exchange", lambda *given: (exchanges.append(1), exchange(*given)))
    optimizer = PolicyOptimizer(policy.trainable_parameters(), OptimizerSettings(0.01))
    result = update_policy(policy, optimizer, rows, UpdateSettings(kl_coef=0.1, micro_batch_size=2), seed=0)
    assert result.steps[0].kl == pytest.approx(0.0, abs=1e-6)
    assert len(exchanges) == 2  # to the reference's and back
