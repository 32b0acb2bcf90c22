"""Updates of a denoising component: the gate, the exact KL, and losses that know how far the update has moved."""

from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from diffusers import GlmImagePipeline
from torch import Tensor

from grpo_core.errors import InputError
from grpo_core.losses.policy_loss import TermInputs
from grpo_core.losses.settings import LossSettings, MismatchSettings
from grpo_core.parity import ParityTolerance
from grpo_core.policies.denoising.component import DenoisingComponent
from grpo_core.policies.denoising.scheduler import Transition, step_kl
from grpo_core.policies.glm_image.policy import GlmImagePolicy
from grpo_core.policies.trained.model import TrainedModel
from grpo_core.rollouts.actions import DenoisingBatch
from grpo_core.rollouts.ragged import RaggedRows
from grpo_core.rollouts.records import ActionLogprobs, SampledActions, StepGaussians, TrainingRows
from grpo_core.settings import Truncation
from grpo_core.update.gradient import Passes, add_up_gradient, make_minibatch, trained_actions
from grpo_core.update.optimizer import PolicyOptimizer
from grpo_core.update.policy_update import update_policy
from grpo_core.update.process_group import SINGLE_PROCESS
from grpo_core.update.settings import OptimizerSettings, UpdateSettings
from grpo_core.update.step import OptimizerStep, RatioStepMetrics, UpdateResult
from tests.grpo_core.policies.denoising.tiny_pipelines import component, sampled
from tests.grpo_core.policies.glm_image.test_memory import PeakBytes
from tests.grpo_core.toy_policy import training_rows
from tests.tiny_policies import PROMPTS, build_policy

PARITY = ParityTolerance(1e-5, 1e-6)
ADVANTAGES = torch.tensor([1.0, -1.0, 2.0, -2.0])


def rows_of(made: DenoisingComponent, window_start: int = 1) -> TrainingRows:
    actions, logprobs = sampled(made, "sd3", window_start=window_start)
    return training_rows(SampledActions(actions, logprobs, torch.ones(4, dtype=torch.bool), max_length=2), ADVANTAGES)


def train(made: DenoisingComponent, rows: TrainingRows, lr: float = 3e-4, **changes: Any) -> UpdateResult:
    settings = UpdateSettings(**{"clip_range": 1e-4, "micro_batch_size": 2, "kl_estimator": "exact", **changes})
    optimizer = PolicyOptimizer(made.trainable_parameters(), OptimizerSettings(lr))
    return update_policy(made, optimizer, rows, settings, parity=PARITY, seed=0)


def rows_by(made: DenoisingComponent, rows: TrainingRows) -> Tensor:
    with torch.no_grad():
        return made.logprobs(rows.actions).logprobs.mean(1)


@pytest.mark.parametrize(
    ("setting", "value"), [("entropy_quantile", 0.5), ("entropy_coef", 0.1), ("mask_truncated", True)]
)
def test_settings_of_tokens_are_refused_before_anything_is_computed(setting: str, value: Any) -> None:
    made = component("sd3")
    rows = rows_of(made)
    before = [each.detach().clone() for each in made.trainable_parameters().values()]
    with pytest.raises(InputError) as refused:
        train(made, rows, **{setting: value})
    assert (refused.value.place, refused.value.value) == (f"update.{setting}", value)
    assert all(map(torch.equal, made.trainable_parameters().values(), before))


@pytest.mark.parametrize("loss", ["grpo", "grpo_guard", pytest.param("flow_dppo", marks=pytest.mark.slow)])
def test_steps_with_a_high_advantage_become_likelier(loss: str) -> None:
    made = component("sd3")
    rows = rows_of(made)
    result = train(made, rows, loss=loss, lr=1e-4, minibatch_size=2, epochs=2)
    change = rows_by(made, rows) - rows.rollout_logprobs.mean(1)
    assert float((change * ADVANTAGES).sum()) > 0
    assert result.metrics()["sampling/sampling_logp_difference/max"] < 1e-6
    assert "entropy" not in result.metrics()
    assert len(result.steps) == 4
    assert not made.trained.copies


def entered(monkeypatch: pytest.MonkeyPatch, trained: TrainedModel) -> list[int]:
    """Return a list that grows each time the reference is exchanged."""
    found, own = list[int](), trained.reference
    monkeypatch.setattr(trained, "reference", lambda: found.append(1) or own())
    return found


def test_the_exact_kl_holds_the_policy_at_its_reference_which_is_exchanged_once_a_minibatch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DenoisingComponent, "reference_logprobs", None)
    distances = []
    for kl_coef in (0.0, 1e4):
        made = component("sd3")
        rows = rows_of(made)
        exchanged = entered(monkeypatch, made.trained)
        result = train(made, rows, kl_coef=kl_coef, epochs=4, lr=2e-3)
        assert len(exchanged) == 4 * bool(kl_coef)
        with torch.no_grad():
            actions: Any = rows.actions
            (others,) = made.step_means([actions], kl=True)
            distances.append(float(made.logprobs(rows.actions, others=others).kl.mean()))
        assert ("kl" in result.metrics()) == bool(kl_coef)
        if kl_coef:
            kls = [step.kl for step in result.steps if step.kl is not None]
            assert kls[-1] < 0.7 * kls[0]
    assert distances[1] < 0.7 * distances[0]


@pytest.mark.parametrize("backward_per_step", [False, True])
def test_the_velocity_s_norm_is_compared_with_the_reference_s(backward_per_step: bool) -> None:
    """As two more passes find it, row by row and step by step; only with a KL, whose passes it is read from."""
    made, rows = moved_component()
    settings = UpdateSettings(kl_estimator="exact", kl_coef=0.5, micro_batch_size=3, minibatch_size=4)
    speeds = []
    for weights in (nullcontext(), made.trained.reference()):
        with weights:
            steps = transitions(made, rows.actions)
            speeds.append(torch.stack([step.velocity.flatten(1).norm(dim=1) for step in steps], 1))
    expected = float((speeds[0] / speeds[1]).mean())
    assert abs(expected - 1) > 1e-4
    for kl_coef in (0.5, 0.0):
        changed = replace(settings, kl_coef=kl_coef, backward_per_step=backward_per_step)
        _, passes = gradient_of(made, rows, changed)
        step = passes.sums.metrics(
            SINGLE_PROCESS, OptimizerStep(0.0, 0.0), with_reference=kl_coef > 0, with_entropy=False
        )
        found = RatioStepMetrics.summarize([step]).get("velocity/norm_ratio")
        assert found == (pytest.approx(expected, rel=1e-5) if kl_coef else None)


def of_a_user(inputs: TermInputs, settings: LossSettings) -> Tensor:
    return -inputs.advantages.unsqueeze(-1) * inputs.ratio


@pytest.mark.parametrize("loss", ["grpo_guard", pytest.param(f"{__name__}:of_a_user", marks=pytest.mark.slow)])
def test_the_drift_is_measured_from_the_weights_before_the_update(monkeypatch: pytest.MonkeyPatch, loss: str) -> None:
    made, unchanged = component("sd3"), component("sd3")
    rows = rows_of(made)
    seen: list[tuple[StepGaussians, Tensor]] = []
    original = DenoisingComponent.logprobs

    def watched(self: DenoisingComponent, actions: DenoisingBatch, **options: Any) -> ActionLogprobs:
        scored = original(self, actions, **options)
        if torch.is_grad_enabled() and scored.gaussians is not None:
            steps = zip(transitions(made, actions), transitions(unchanged, actions), strict=True)
            expected = torch.stack([step_kl(step.mean, old, "mean") for step, old in steps], 1)
            seen.append((scored.gaussians, expected))
        return scored

    monkeypatch.setattr(DenoisingComponent, "logprobs", watched)
    train(made, rows, loss=loss, epochs=2, lr=1e-3)
    assert [bool(found.drift.any()) for found, _ in seen] == [False, False, True, True]
    for found, expected in seen[2:]:
        torch.testing.assert_close(found.drift.detach(), expected, rtol=1e-4, atol=1e-12)
    step = transitions(made, rows.actions)[0]
    assert torch.equal(seen[0][0].std[:, 0], step.std.expand(2))
    assert torch.equal(seen[0][0].dt[:, 0], step.dt.expand(2))


# --- a backward pass for each step


@cache
def moved_component() -> tuple[DenoisingComponent, TrainingRows]:
    """A policy that an update has moved from its old and from its reference, and rows of neither."""
    made, generator = component("sd3"), torch.Generator().manual_seed(3)

    def move() -> None:
        for parameter in made.trainable_parameters().values():
            parameter.data += 0.02 * torch.randn(parameter.shape, generator=generator)

    move()
    made.trained.keep("old")
    move()
    rows = rows_of(made)
    old, stored, reference = (rows.rollout_logprobs + 0.3 * torch.randn(4, 2, generator=generator) for _ in range(3))
    return made, replace(rows, old_logprobs=old, rollout_logprobs=stored, ref_logprobs=reference)


def gradient_of(made: DenoisingComponent, rows: TrainingRows, settings: UpdateSettings) -> tuple[Tensor, Passes]:
    parameters = list(made.trainable_parameters().values())
    for parameter in parameters:
        parameter.grad = None
    ragged = RaggedRows.of(rows)
    minibatch = make_minibatch(ragged, [2, 0, 3, 1], trained_actions(ragged, settings), settings)
    passes = add_up_gradient(made, minibatch, settings, SINGLE_PROCESS, lambda: None)
    return torch.cat([each.grad.flatten() for each in parameters if each.grad is not None]), passes


BY_ROW = {"mismatch": MismatchSettings("truncate", "sequence")}


@pytest.mark.parametrize(
    ("loss", "changes", "couples", "first"),
    [
        ("grpo", {"kl_coef": 0.5}, False, False),
        pytest.param("grpo", {"kl_coef": 0.5, "kl_estimator": "k3"}, False, False, marks=pytest.mark.slow),
        ("grpo", {"importance_level": "sequence", "clip_range": 0.01}, True, False),
        ("grpo", BY_ROW, True, True),
        ("cispo", {"off_policy_threshold": 0.1}, True, False),
        pytest.param(
            "sapo",
            {"kl_coef": 0.5, "kl_estimator": "k3", "mismatch": MismatchSettings("mask")},
            False,
            True,
            marks=pytest.mark.slow,
        ),
        pytest.param("luspo", {"kl_coef": 0.5, "kl_estimator": "k3"}, True, True, marks=pytest.mark.slow),
        ("vespo", {}, True, False),
        ("grpo_guard", {"kl_coef": 0.5}, False, True),
        pytest.param("flow_dppo", {"loss_settings": {"dppo_threshold": 1e-3}}, False, False, marks=pytest.mark.slow),
        (f"{__name__}:of_a_user", {}, True, False),
    ],
)
def test_steps_taken_one_by_one_give_the_gradient_of_the_window(
    loss: str, changes: dict[str, Any], couples: bool, first: bool
) -> None:
    """A pass without gradients comes before where a loss couples the steps, and nowhere else; metrics are equal."""
    made, rows = moved_component()
    rows = replace(rows, old_logprobs=None) if first else rows
    settings = UpdateSettings(**{"loss": loss, "kl_estimator": "exact", "micro_batch_size": 3, **changes})
    passes: list[int] = []
    scored = made.logprobs

    def counted(actions: Any, **options: Any) -> ActionLogprobs:
        passes.append(actions.loss_mask.shape[1])
        return scored(actions, **options)

    expected, whole = gradient_of(made, rows, replace(settings, backward_per_step=False))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(made, "logprobs", counted)
        found, by_step = gradient_of(made, rows, replace(settings, backward_per_step=True))
    assert float((found - expected).norm() / expected.norm()) < 1e-6
    assert torch.equal(by_step.logprobs.values, whole.logprobs.values)
    made_step = OptimizerStep(0.0, 0.0)
    metrics = [
        each.sums.metrics(SINGLE_PROCESS, made_step, with_reference=True, with_entropy=False)
        for each in (by_step, whole)
    ]
    assert metrics[0] == metrics[1]
    assert passes == 2 * ([2] * couples + [1, 1])


@torch.no_grad()
def transitions(made: DenoisingComponent, actions: Any) -> list[Transition]:
    return made._transitions(made._call(actions, list(range(len(actions)))))


MEMORY_PARITY = ParityTolerance(1e-4, 1e-4)
SETTINGS = UpdateSettings(minibatch_size=64, micro_batch_size=4, kl_coef=0.1, entropy_coef=0.01)


def group_rows(policy: GlmImagePolicy, group_size: int) -> TrainingRows:
    sampled = policy.tokens.sample(PROMPTS[:1], group_size=group_size, seeds=range(group_size))
    return training_rows(sampled, torch.linspace(-1, 1, group_size))


def peak_of_update(pipeline: GlmImagePipeline, group_size: int, micro_batch_size: int, *, checkpointed: bool) -> int:
    """Most bytes alive in an update of one step on one group, beside weights, rows and both recomputed log-probs."""
    policy = build_policy(
        pipeline, width=64, truncation=Truncation(top_p=0.9), gradient_checkpointing=checkpointed, disturbed=0.02
    )
    rows = group_rows(policy, group_size)
    support = rows.actions.support
    assert support is not None
    stored = [rows.actions.token_ids, rows.actions.loss_mask, support.ids, support.counts, rows.rollout_logprobs]
    weights = [*policy.tokens.trained.model.parameters(), *policy.tokens.trained.model.buffers()]
    optimizer = PolicyOptimizer(policy.tokens.trainable_parameters(), OptimizerSettings(1e-4))
    settings = replace(SETTINGS, micro_batch_size=micro_batch_size)
    with PeakBytes([*weights, *stored, rows.advantages]) as watched:
        update_policy(policy.tokens, optimizer, rows, settings, parity=MEMORY_PARITY, seed=0)
    return watched.peak - 2 * rows.rollout_logprobs.nbytes


@pytest.mark.parametrize("checkpointed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_memory_grows_with_the_microbatch_and_not_with_the_group(
    shipped_pipeline: GlmImagePipeline, checkpointed: bool
) -> None:
    small, middle, large = (peak_of_update(shipped_pipeline, size, 4, checkpointed=checkpointed) for size in (4, 8, 16))
    assert large == pytest.approx(middle, rel=0.01)
    # At the peak of a step's first microbatch there are no gradients yet.
    assert middle == pytest.approx(small, rel=0.04)
    assert peak_of_update(shipped_pipeline, 16, 8, checkpointed=checkpointed) > 1.8 * middle
