"""AdamW and its schedule against torch's own, and state that goes on to the bit."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from grpo_core.optimizer import OptimizerSettings, PolicyOptimizer

WARM = OptimizerSettings(
    1e-2, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, lr_scheduler="constant_with_warmup", warmup_steps=4
)


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in [("a|b", (3, 4)), ("bias", (5,))]
    }


def give_gradients(trained: dict[str, nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in trained.values():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def run(optimizer: PolicyOptimizer, steps: range) -> dict[str, Tensor]:
    for step in steps:
        give_gradients(optimizer.parameters, step)
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in optimizer.parameters.items()}


def test_steps_are_those_of_torch_adamw_under_a_hand_made_warm_up() -> None:
    """The rate of step k (from 0) is learning_rate * min(k / 4, 1)."""
    plain = parameters()
    oracle = torch.optim.AdamW(plain.values(), lr=0.0, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    for step in range(7):
        oracle.param_groups[0]["lr"] = 1e-2 * min(step / 4, 1.0)
        give_gradients(plain, step)
        oracle.step()
    ours = run(PolicyOptimizer(parameters(), WARM), range(7))
    assert all(torch.equal(ours[name], value) for name, value in plain.items())


def test_warm_up_rates() -> None:
    optimizer = PolicyOptimizer(parameters(), WARM)
    rates = []
    for step in range(6):
        rates.append(optimizer.learning_rate)
        run(optimizer, range(step, step + 1))
    assert rates == pytest.approx([0.0, 0.0025, 0.005, 0.0075, 0.01, 0.01])


@pytest.mark.parametrize("stop", [1, 3, 4, 6])
@pytest.mark.parametrize("settings", [WARM, OptimizerSettings(1e-2)], ids=["warm-up", "constant"])
def test_stepping_after_save_and_load_is_stepping_on(stop: int, settings: OptimizerSettings, tmp_path: Path) -> None:
    uninterrupted = run(PolicyOptimizer(parameters(), settings), range(8))

    first = PolicyOptimizer(parameters(), settings)
    weights = run(first, range(stop))
    save_file(first.state(), tmp_path / "state.safetensors")

    resumed_parameters = {name: nn.Parameter(value) for name, value in weights.items()}
    second = PolicyOptimizer(resumed_parameters, settings, steps=first.steps)
    second.load_state(load_file(tmp_path / "state.safetensors"))
    assert second.learning_rate == first.learning_rate
    resumed = run(second, range(stop, 8))
    assert second.steps == 8
    assert all(torch.equal(resumed[name], value) for name, value in uninterrupted.items())


@pytest.mark.parametrize("forget", ["state", "steps"])
def test_forgetting_a_part_of_it_shows(forget: str) -> None:
    """The test above can fail: without the moments, or without the step count, the weights are others."""
    uninterrupted = run(PolicyOptimizer(parameters(), WARM), range(6))
    first = PolicyOptimizer(parameters(), WARM)
    weights = run(first, range(3))
    second = PolicyOptimizer(
        {name: nn.Parameter(value) for name, value in weights.items()}, WARM, steps=0 if forget == "steps" else 3
    )
    if forget != "state":
        second.load_state(first.state())
    assert not torch.allclose(run(second, range(3, 6))["bias"], uninterrupted["bias"], atol=1e-5)


def test_a_saved_state_is_not_changed_by_later_steps() -> None:
    optimizer = PolicyOptimizer(parameters(), WARM)
    run(optimizer, range(2))
    state = optimizer.state()
    before = {name: value.clone() for name, value in state.items()}
    run(optimizer, range(2, 4))
    assert all(torch.equal(state[name], value) for name, value in before.items())


def test_a_loaded_state_is_not_shared() -> None:
    first, second = PolicyOptimizer(parameters(), WARM), PolicyOptimizer(parameters(), WARM)
    run(first, range(2))
    state = first.state()
    second.load_state(state)
    before = {name: value.clone() for name, value in state.items()}
    run(second, range(2, 4))
    assert all(torch.equal(state[name], value) for name, value in before.items())


def test_a_state_for_other_parameters_is_refused() -> None:
    optimizer = PolicyOptimizer(parameters(), WARM)
    with pytest.raises(ValueError, match="'lm_head', which this policy does not train"):
        optimizer.load_state({"lm_head|exp_avg": torch.zeros(1)})


def _without(entry: str) -> Callable[[dict[str, Tensor]], None]:
    def damage(state: dict[str, Tensor]) -> None:
        del state[entry]

    return damage


def _shortened(state: dict[str, Tensor]) -> None:
    state["bias|exp_avg"] = state["bias|exp_avg"][:2]


@pytest.mark.parametrize(
    "damage", [_without("bias|exp_avg"), _without("bias|step"), _shortened], ids=["moment", "step", "shape"]
)
def test_a_damaged_state_is_refused(damage: Callable[[dict[str, Tensor]], None]) -> None:
    first = PolicyOptimizer(parameters(), WARM)
    run(first, range(2))
    state = first.state()
    damage(state)
    with pytest.raises(ValueError, match="bias"):
        PolicyOptimizer(parameters(), WARM, steps=2).load_state(state)


def test_an_empty_state_after_steps_is_refused() -> None:
    PolicyOptimizer(parameters(), WARM).load_state({})
    with pytest.raises(ValueError, match="empty, but 2 steps"):
        PolicyOptimizer(parameters(), WARM, steps=2).load_state({})


def test_gradients_are_scaled_to_the_norm_and_the_norm_before_is_told() -> None:
    optimizer = PolicyOptimizer({"w": nn.Parameter(torch.zeros(2))}, WARM)
    weight = optimizer.parameters["w"]
    weight.grad = torch.tensor([3.0, 4.0])
    assert optimizer.clip_gradients(1.0) == 5.0
    torch.testing.assert_close(weight.grad, torch.tensor([0.6, 0.8]), rtol=1e-5, atol=0)
    assert optimizer.clip_gradients(10.0) == pytest.approx(1.0)
    torch.testing.assert_close(weight.grad, torch.tensor([0.6, 0.8]), rtol=1e-5, atol=0)
