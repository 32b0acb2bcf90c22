"""Advantages and their metrics against TRL's own lines, which run here unmodified.

TRL computes advantages in the middle of `GRPOTrainer._generate_and_score_completions`, after generation. The statements
from the combination of the rewards to the last of the metrics are cut out of its source at run time and executed.
"""

import ast
import inspect
import math
import textwrap
from collections import defaultdict
from types import CodeType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from trl import GRPOTrainer
from trl.trainer import grpo_trainer

from grpo_core.advantages.compute import GroupAdvantages, compute_advantages, reward_metrics
from grpo_core.advantages.settings import AdvantageSettings
from grpo_core.rewards.registry import MissingRewards, RewardTerm

NULL = math.nan
WEIGHTS = [1.0, -0.5, 2.0]
SEEDS = st.integers(0, 2**32 - 1)
VARIANTS = [*(("sum_then_normalize", scale) for scale in ("group", "batch", "none")), ("normalize_then_sum", "group")]


class TrlResult(NamedTuple):
    """What TRL trains with, and what it logs."""

    advantages: Tensor
    metrics: dict[str, float]


def _slice_of_trl() -> CodeType:
    """The statements that turn `rewards_per_func` into advantages and log them."""
    source = textwrap.dedent(inspect.getsource(GRPOTrainer._generate_and_score_completions))
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    text = [ast.unparse(statement) for statement in function.body]
    (first,) = [number for number, line in enumerate(text) if line.startswith("unscorable_mask =")]
    (last,) = [number for number, line in enumerate(text) if "'frac_reward_zero_std'" in line]
    return compile(ast.Module(function.body[first : last + 1], type_ignores=[]), "grpo_trainer", "exec")


SLICE = _slice_of_trl()


def trl(values: Tensor, weights: list[float], aggregation: str, scale: str) -> TrlResult:
    """TRL's advantages of [groups, siblings, rewards], as it would compute them on one process."""
    groups, siblings, rewards = values.shape
    names = [str(number) for number in range(rewards)]
    trainer = SimpleNamespace(
        multi_objective_aggregation=aggregation,
        scale_rewards=scale,
        reward_weights=torch.tensor(weights, dtype=values.dtype),
        reward_funcs=names,
        reward_func_names=names,
        accelerator=SimpleNamespace(process_index=0),
        _metrics={"train": defaultdict(list)},
    )
    scope: dict[str, Any] = {
        **vars(grpo_trainer),
        "self": trainer,
        "mode": "train",
        "device": values.device,
        "num_generations": siblings,
        "rewards_per_func": values.flatten(0, 1).clone(),
        "prompts": [""] * (groups * siblings),
    }
    exec(SLICE, scope)
    metrics = {name: found[0] for name, found in trainer._metrics["train"].items()}
    return TrlResult(scope["advantages"].view(groups, siblings), metrics)


def ours(
    values: Tensor, weights: list[float], aggregation: Any, scale: Any, missing: MissingRewards = "group_mean"
) -> GroupAdvantages:
    terms = [RewardTerm(weight) for weight in weights]
    settings = AdvantageSettings(aggregation=aggregation, scale=scale, missing=missing)
    return compute_advantages(values, terms, settings)


def random_values(seed: int, *, groups: int = 5, siblings: int = 6, rewards: int = 3) -> Tensor:
    """Rewards on different scales; the first group does not differ at all, one reward of the second does not."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(groups, siblings, rewards, generator=generator, dtype=torch.float64)
    values = values * torch.tensor([1.0, 10.0, 0.1])[:rewards] + torch.tensor([0.3, -20.0, 5.0])[:rewards]
    values[0] = values[0, 0].clone()
    values[1, :, 2:] = 0.1
    return values


def assert_close(found: GroupAdvantages, expected: Tensor) -> None:
    """Within 1e-6 relative; a sample that TRL gives exactly 0 for want of a reward is NaN here.

    Sums that nearly cancel are held to 1e-7 of the group's scale: TRL's Bessel factor is fp32 in any dtype.
    """
    torch.testing.assert_close(found.advantages.nan_to_num(nan=0.0).double(), expected, rtol=1e-6, atol=1e-7)


# Places of [group, sample, reward] that are null: none; whole samples; and for a reward that is missing as 0 also one
# reward of a sample, two of another, and one of a whole group.
NULLS: dict[str, list[Any]] = {
    "none": [],
    "whole samples": [(2, 1), (2, 4), (3, 0)],
    "zero": [(2, 1, 0), (3, 0, slice(1, None)), (2, 4), (4, slice(None), 2)],
}


@pytest.mark.parametrize("nulls", NULLS)
@pytest.mark.parametrize(("aggregation", "scale"), VARIANTS)
@settings(max_examples=6)
@given(seed=SEEDS)
def test_advantages_with_mean_and_spread_of_the_batch(aggregation: str, scale: str, nulls: str, seed: int) -> None:
    """TRL trains a sample without any reward with 0; here it is not trained."""
    values = random_values(seed)
    for place in NULLS[nulls]:
        values[place] = NULL
    expected, metrics = trl(values, WEIGHTS, aggregation, scale)
    found = ours(values, WEIGHTS, aggregation, scale, "zero" if nulls == "zero" else "group_mean")
    assert_close(found, expected)
    # TRL leaves rounding there: the mean of equal numbers can differ from them in the last bit.
    assert found.advantages[0].tolist() == [0.0] * 6
    unrewarded = [list(place) for place in NULLS[nulls] if len(place) == 2]
    assert found.advantages.isnan().nonzero().tolist() == unrewarded
    assert not found.imputed.any()
    if aggregation == "sum_then_normalize" or nulls == "none":
        reported = reward_metrics(found)
        for name in ("reward", "reward_std"):
            assert reported[name] == pytest.approx(metrics[name], rel=1e-6)


def test_one_null_of_two_where_trl_is_inconsistent() -> None:
    """TRL's nansum counts a null as 0: a sample tied at the top falls from +.72 to -1.40. Imputed it has +.35.

    TRL itself treats the same null as unknown where every reward of the sample is null, and with normalize_then_sum.
    """
    complete = torch.tensor([[[0.49, 0.77], [0.43, 0.83], [0.57, 0.58], [0.29, 0.67]]], dtype=torch.float64)
    lost = complete.clone()
    lost[0, 0, 1] = NULL
    arguments = ([0.5, 0.5], "sum_then_normalize", "group")
    assert trl(complete, *arguments).advantages[0, 0].item() == pytest.approx(0.72, abs=0.005)
    assert ours(complete, *arguments).advantages[0, 0].item() == pytest.approx(0.72, abs=0.005)
    assert trl(lost, *arguments).advantages[0, 0].item() == pytest.approx(-1.40, abs=0.005)
    assert ours(lost, *arguments).advantages[0, 0].item() == pytest.approx(0.35, abs=0.005)
