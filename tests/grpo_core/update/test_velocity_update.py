"""Updates by matched velocities: steps, processes, metrics, and what they refuse."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_core.errors import InputError, NonFiniteError
from grpo_core.update.settings import UpdateSettings
from grpo_core.update.velocity_settings import AwmSettings, NftSettings, VelocitySettings
from grpo_core.update.velocity_update import NftStepMetrics
from tests.grpo_core.update.linear_velocity import (
    ADVANTAGES,
    SETTINGS,
    LinearComponent,
    changed,
    gradient_of,
    images_of,
    rows_of,
    trained,
)


@pytest.mark.parametrize("micro_batch_size", [1, 3, 100])
def test_the_cut_into_microbatches_changes_nothing(micro_batch_size: int) -> None:
    gradients = []
    for size in (4, micro_batch_size):
        component = LinearComponent()
        trained(component, rows_of(ADVANTAGES), replace(SETTINGS, micro_batch_size=size))
        gradients.append(gradient_of(component))
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-14)


@dataclass
class _OneOfThree:
    """One process of three, whose sums are not added: a test adds them."""

    rank: int
    count: int = 3

    def add_gradients(self, parameters: Any) -> None:
        """Leave this process's share."""

    def add(self, values: Tensor) -> Tensor:
        return values

    def gradient_norm(self, parameters: Any, max_norm: float) -> float:
        return 1.0


def test_processes_add_up_to_one() -> None:
    alone = LinearComponent()
    result = trained(alone, rows_of(ADVANTAGES))
    parts, losses = [], []
    for rank in range(3):
        component = LinearComponent()
        losses.append(trained(component, rows_of(ADVANTAGES), process_group=_OneOfThree(rank)).steps[0].loss)
        parts.append(gradient_of(component))
    torch.testing.assert_close(sum(parts), gradient_of(alone), rtol=1e-12, atol=1e-14)
    assert sum(losses) == pytest.approx(result.steps[0].loss)


def test_the_same_seed_gives_the_same_weights_to_the_bit() -> None:
    weights = []
    for seed in (1, 1, 2):
        component = LinearComponent()
        trained(component, rows_of(ADVANTAGES), replace(SETTINGS, epochs=2, minibatch_size=2), seed)
        weights.append(component.weight.detach())
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("settings", [NftSettings(kl_coef=0.1), AwmSettings(kl_coef=0.1)], ids=["nft", "awm"])
def test_the_norm_is_compared_with_the_reference_s(settings: VelocitySettings) -> None:
    """The model is linear, so that weights scaled by 1.125 scale every velocity."""
    component = LinearComponent()
    with torch.no_grad():
        component.weight.mul_(1.125)
    result = trained(component, rows_of(ADVANTAGES), settings)
    assert result.metrics()["velocity/norm_ratio"] == pytest.approx(1.125)
    without = trained(component, rows_of(ADVANTAGES), replace(settings, kl_coef=0.0))
    assert "velocity/norm_ratio" not in without.metrics()


def test_metrics_of_the_steps() -> None:
    component = LinearComponent()
    result = trained(component, rows_of(ADVANTAGES), replace(SETTINGS, minibatch_size=3, kl_coef=0.1))
    first, second = result.steps
    assert isinstance(first, NftStepMetrics)
    assert isinstance(second, NftStepMetrics)
    assert first.velocity_change == 0.0 == first.kl
    assert second.kl == pytest.approx(second.velocity_change)
    assert second.velocity_change > 0
    assert second.loss == pytest.approx(second.policy_loss + 0.1 * second.velocity_change)
    assert result.metrics()["optimizer_steps"] == 2.0
    assert "importance_ratio/mean" not in result.metrics()


def test_progress_counts_every_pass() -> None:
    seen: list[tuple[int, int]] = []
    component = LinearComponent()
    trained(
        component,
        rows_of(ADVANTAGES),
        replace(SETTINGS, epochs=2),
        on_progress=lambda done, total: seen.append((done, total)),
    )
    assert seen == [(number, 10) for number in range(1, 11)]
    assert len(component.passes) == 10


@pytest.mark.parametrize("minibatch_size", [5, 2])
def test_an_image_that_is_not_finite_is_named_and_changes_nothing(minibatch_size: int) -> None:
    component, rows = LinearComponent(), rows_of(ADVANTAGES)
    states = list(images_of(rows).states)
    states[3] = torch.full_like(states[3], torch.nan)
    broken = changed(rows, states=tuple(states))
    with pytest.raises(NonFiniteError) as caught:
        trained(component, broken, replace(SETTINGS, minibatch_size=minibatch_size))
    assert caught.value.sample_ids == ("s3",)
    assert component.weight.grad is None
    assert "old" not in component.trained.copies


def test_the_average_follows_every_step() -> None:
    component = LinearComponent()
    start = component.weight.detach().clone()
    component.trained.keep("ema")
    trained(component, rows_of(ADVANTAGES), replace(SETTINGS, minibatch_size=3, ema=0.5))
    after_one = component.passes[3].weight
    expected = 0.25 * start + 0.25 * after_one + 0.5 * component.weight.detach()
    # Averages are computed in fp32.
    torch.testing.assert_close(component.trained.copies["ema"].values["weight"], expected, rtol=1e-5, atol=1e-6)


def test_no_rows_change_nothing() -> None:
    component = LinearComponent()
    assert trained(component, rows_of([1.0]).select([])).metrics() == {"optimizer_steps": 0.0}


def test_the_decay_of_the_old_policy_grows_to_its_limit() -> None:
    assert [NftSettings().old_policy_decay(update) for update in (1, 40, 499, 501)] == pytest.approx(
        [0.001, 0.04, 0.499, 0.5]
    )
    assert NftSettings(old_decay=0.0).old_policy_decay(40) == 0
    assert UpdateSettings().old_policy_decay(40) == 0


@pytest.mark.parametrize("name", ["nft_beta", "advantage_clip", "timesteps_per_image"])
def test_settings_are_positive(name: str) -> None:
    with pytest.raises(InputError) as caught:
        NftSettings(**{name: 0})
    assert (caught.value.place, caught.value.value) == (f"update.{name}", 0)
