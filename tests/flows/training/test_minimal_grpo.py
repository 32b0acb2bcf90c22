"""docs/minimal_grpo.py learns, and its step is the pipeline's."""

import importlib.util
import json
import statistics
from pathlib import Path
from types import ModuleType

import polars as pl
import pytest

from grpo_core.groups import GroupRequest
from grpo_core.optimizer import OptimizerSettings, PolicyOptimizer
from grpo_core.seeds import derive_seed
from tasks.checkout import CHECKOUT
from tasks.models.files import weights_digest
from tests.flows.conftest import Runs


@pytest.fixture(scope="module")
def example() -> ModuleType:
    specification = importlib.util.spec_from_file_location("minimal_grpo", CHECKOUT / "docs" / "minimal_grpo.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_the_text_reward_rises(example: ModuleType) -> None:
    rewards = [reward for reward, _ in example.train(example.text_task(), iterations=8)]
    assert statistics.fmean(rewards[-3:]) > statistics.fmean(rewards[:3]) + 0.05


def test_the_image_model_is_trained(example: ModuleType) -> None:
    task = example.image_task()
    before = {
        name: value.detach().clone() for name, value in task.policy.components["tokens"].trainable_parameters().items()
    }
    ((reward, update),) = example.train(task, iterations=1, group_size=4)
    assert 0 < reward < 1
    assert len(update.steps) == 1
    assert any(
        not value.equal(before[name]) for name, value in task.policy.components["tokens"].trainable_parameters().items()
    )


def test_a_step_is_the_pipelines(example: ModuleType, empty: Runs, tmp_path: Path) -> None:
    """The same prompts and seeds give the same policy to the bit."""
    empty.start_text(run__iterations=1, evaluate__prompts=None)
    rows = pl.read_parquet(empty.path("iteration_000001", "rollouts", run="text") / "part-*.parquet")
    groups = rows.group_by("group_id", maintain_order=True).agg(pl.all()).to_dicts()
    prompts = [{"prompt": group["prompt"][0], **json.loads(group["columns"][0])} for group in groups]
    requests = [
        GroupRequest(group["prompt"][0], tuple(group["sample_id"]), tuple(group["seed"]), (0,) * 8) for group in groups
    ]
    task = example.text_task()
    optimizer = PolicyOptimizer(
        task.policy.components["tokens"].trainable_parameters(), OptimizerSettings(task.learning_rate)
    )
    example.grpo_step(task, optimizer, prompts, requests, derive_seed(0, 1, "minibatches"))
    task.policy.components["tokens"].save_weights(tmp_path)
    assert weights_digest(tmp_path) == weights_digest(empty.path("policies", "000001", run="text"))
