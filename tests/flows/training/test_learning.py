"""Whole trainings of the tiny text model: loss, reward, KL and entropy move as they should, draws are made again."""

import gc
import importlib.util
import json
import math
import statistics
from pathlib import Path
from types import ModuleType
from typing import Any

import polars as pl
import pytest
from prefect.context import FlowRunContext

from configs.loader import read_config
from flows.export.export import export
from flows.export.plan import plan_export
from flows.requests import ExportRequest, SampleRequest
from flows.sample import open_source, sample
from flows.training.hooks import use_hook
from flows.training.prefetch import RolloutPrefetcher
from flows.training.train import missing_prompts
from grpo_core.rollouts.records import GroupRequest
from grpo_core.seeds import derive_seed
from grpo_core.update.optimizer import PolicyOptimizer
from grpo_core.update.settings import OptimizerSettings
from tasks.models.initial import weights_digest
from tasks.process import CHECKOUT
from tasks.progress import Lines
from tasks.reports.iteration import IterationRecord
from tasks.storage.artifacts.reference import ArtifactRef
from tests.flows.conftest import REPOSITORY, Runs

STAGES = ("collect rollouts", "score answer", "compute advantages", "update policy")
SMALL = {"rollout__prompts_per_iteration": 4, "rollout__prompts_per_batch": 4, "update__minibatch_size": None}


def metrics_of(runs: Runs, name: str) -> list[float]:
    table = pl.read_parquet(runs.path("iteration_*", "metrics.parquet", run="text")).sort("iteration")
    return table.filter(pl.col("metric") == name)["value"].to_list()


@pytest.mark.slow
def test_reward_entropy_and_kl_move_as_they_should(empty: Runs) -> None:
    """The quick test of the same is of docs/minimal_grpo.py, whose step is this one."""
    summary = empty.start_text(run__iterations=12, update__epochs=2, update__kl_coef=0.01, evaluate__every=0).summary
    assert summary.heldout_before is not None
    assert summary.heldout_after is not None
    assert summary.heldout_after > summary.heldout_before + 0.1
    rewards, entropy, kl = metrics_of(empty, "reward"), metrics_of(empty, "entropy"), metrics_of(empty, "kl")
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 0.3
    assert entropy[-1] < entropy[0] - 0.2
    assert kl[-1] > kl[0]


def test_the_second_epoch_is_better_than_the_first(empty: Runs) -> None:
    empty.start_text(run__iterations=2, update__epochs=2, update__kl_coef=0.01, evaluate__prompts=None, **SMALL)
    assert min(metrics_of(empty, "kl")) >= 0
    assert max(metrics_of(empty, "sampling/sampling_logp_difference/max")) < 1e-4
    # As in TRL: all tokens so far, with a prompt for each of its completions.
    rollouts = pl.scan_parquet(empty.path("iteration_*", "rollouts", "part-*.parquet", run="text"))
    tokens = rollouts.group_by("iteration").agg(pl.col("length").sum() + pl.col("prompt_length").sum()).collect()
    assert metrics_of(empty, "num_tokens") == tokens.sort("iteration")["length"].cum_sum().to_list()
    for iteration in (1, 2):
        first, second = empty.steps(iteration, "text").iter_rows(named=True)
        # On the rows it was just trained on, the policy is better than before.
        assert second["loss"] < first["loss"]
        assert first["ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    everything = pl.read_parquet(empty.path("iteration_*", "metrics.parquet", run="text"))["value"]
    assert all(math.isfinite(value) for value in everything)


def test_groups_without_spread_are_drawn_again_up_to_the_bound(empty: Runs) -> None:
    """An exact reward is zero for most groups of two, so one draw is rarely enough."""
    exact = [{"reward": "answer", "settings": {"mode": "exact"}}]
    empty.start_text(
        run__iterations=2,
        rollout__group_size=2,
        rewards=exact,
        advantages__constant_groups="redraw",
        advantages__max_rounds=3,
        evaluate__prompts=None,
        **SMALL,
    )
    rounds = metrics_of(empty, "rounds")
    kept = metrics_of(empty, "groups_kept")
    assert max(rounds) == 3
    for iteration, (count, groups) in enumerate(zip(rounds, kept, strict=True), start=1):
        folder = empty.path(f"iteration_{iteration:06d}", run="text")
        assert len(list(folder.glob("round_*"))) == count - 1
        assert groups == 4 or count == 3
        last = folder if count == 1 else folder / f"round_{int(count):02d}"
        advantages = pl.read_parquet(last / "advantages" / "advantages.parquet")
        rollouts = pl.concat([pl.read_parquet(path) for path in sorted(folder.rglob("rollouts/part-*.parquet"))])
        assert set(advantages["sample_id"]) == set(rollouts["sample_id"])
        assert rollouts["prompt_id"].n_unique() == rollouts["group_id"].n_unique()
        trained = advantages.filter(pl.col("advantage").is_not_null())
        assert trained["group_id"].n_unique() == groups


@pytest.mark.parametrize(
    ("tokens", "denoising", "missing"),
    [
        (8, 16, 0),
        # Drafts that differ, whose renderings do not, and the reverse.
        (8, 0, 8),
        (5, 16, 3),
        # One of a prompt's two groups of renderings is missing.
        (8, 15, 1),
        (11, 9, 4),
    ],
)
def test_every_stream_gets_its_groups(tokens: int, denoising: int, missing: int) -> None:
    drawn = ["rollout.prompts_per_iteration=8", "rollout.samples_with_images=2"]
    config = read_config(REPOSITORY / "configs" / "tiny_both.yaml", drawn)
    assert missing_prompts(config, {"groups_kept": tokens, "denoising/groups_kept": denoising}) == missing


def test_datasets_have_their_share_and_their_own_reward(empty: Runs) -> None:
    train = "data/prompts/letters_train.jsonl"
    empty.start_text(
        run__iterations=2,
        data={
            "datasets": [
                {"name": "similar", "prompts": train, "weight": 3},
                {"name": "exact", "prompts": train, "weight": 1},
            ],
            "curriculum": {"kind": "difficulty"},
        },
        rewards=[
            {"reward": "answer", "datasets": ["similar"]},
            {"reward": "answer", "name": "exact", "datasets": ["exact"], "settings": {"mode": "exact"}},
        ],
        evaluate__prompts=None,
        **SMALL,
    )
    for iteration, shares in ((1, {"similar": 3, "exact": 1}), (2, {"similar": 2, "exact": 2})):
        folder = empty.path(f"iteration_{iteration:06d}", run="text")
        advantages = pl.read_parquet(folder / "advantages" / "advantages.parquet")
        groups = advantages.unique("group_id")["dataset"].value_counts().rows()
        assert dict(groups) == shares
        for name, other in (("answer", "exact"), ("exact", "similar")):
            scores = pl.read_parquet(folder / "rewards" / name / "scores.parquet", columns=["sample_id", "value"])
            scores = scores.join(advantages.select("sample_id", "dataset", "reward"), on="sample_id")
            mine = scores.filter(pl.col("dataset") != other)
            assert mine["value"].to_list() == mine["reward"].to_list()
            assert scores.filter(pl.col("dataset") == other)["value"].null_count() == scores.height - mine.height


@pytest.mark.slow
def test_a_cut_and_penalised_run_goes_on_where_it_was(empty: Runs) -> None:
    """Truncation, a KL in the reward, a refreshed reference: all of it comes back when the run is started again."""
    settings = {
        **SMALL,
        "rollout__top_k": 8,
        "rollout__top_p": 0.9,
        "advantages__kl_coef": 0.01,
        "update__kl_coef": 0.01,
        "update__reference": {"refresh_every": 2},
        "update__lr_scheduler": "cosine",
        "update__total_steps": 8,
        "evaluate__prompts": None,
    }
    whole = empty.start_text("whole", run__iterations=4, **settings)
    # Under a root of its own, where nothing of the whole run can be used again.
    other = Runs(empty.root.parent / "other")
    other.start_text("halved", run__iterations=3, **settings)
    halved = other.start_text("halved", run__iterations=4, **settings)
    assert halved.stages == tuple(f"iteration 4: {stage}" for stage in STAGES)
    assert halved.summary.policy_digest == whole.summary.policy_digest
    state = json.loads(empty.path("policies", "000004", "training_state.json", run="whole").read_text())
    assert state["optimizer_steps"] == {"tokens": 4}


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
    ((reward, update),) = example.train(task, iterations=1, group_size=2)
    assert 0 < reward < 1
    assert len(update.steps) == 1
    assert any(
        not value.equal(before[name]) for name, value in task.policy.components["tokens"].trainable_parameters().items()
    )


def test_a_step_is_the_pipelines(example: ModuleType, empty: Runs, tmp_path: Path) -> None:
    """The same prompts and seeds give the same policy to the bit."""
    empty.start_text(run__iterations=1, evaluate__prompts=None, **SMALL)
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


FEW: dict[str, Any] = {
    "rollout__prompts_per_iteration": 2,
    "rollout__group_size": 2,
    "rollout__max_completion_length": 4,
    "update__minibatch_size": 4,
    "update__micro_batch_size": 4,
    "evaluate__prompts": None,
}


def count_kept() -> dict[str, int]:
    """Count what belongs to iterations: ours by kind, and Prefect's notes of task runs."""
    gc.collect()
    context = FlowRunContext.get()
    assert context is not None
    found = [each for each in gc.get_objects() if type(each) in (ArtifactRef, RolloutPrefetcher)]
    # One of an earlier test may still be there; it does not grow.
    prefetchers = [each for each in found if isinstance(each, RolloutPrefetcher)]
    return {
        "references": len(found) - len(prefetchers),
        "policies": sum(len(each.policies) for each in prefetchers),
        "ahead": sum(len(each.ahead) for each in prefetchers),
        "results": len(context.run_results),
        "assets": len(context.task_run_assets),
        "submitted": len(context.task_runner._cancel_events),  # type: ignore[attr-defined]
    }


@pytest.mark.parametrize("staleness", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_it_does_not_grow_with_the_iterations(empty: Runs, staleness: int) -> None:
    kept: dict[int, dict[str, int]] = {}

    def count(record: IterationRecord) -> None:
        if record.iteration in (3, 7):
            kept[record.iteration] = count_kept()

    use_hook(count)
    try:
        empty.start_text(run__iterations=8, run__staleness=staleness, **FEW)
    finally:
        use_hook(None)
    # Two iterations' worth: what was just made is there a little longer or shorter. The thread that samples ahead drops
    # the policy before its own when it begins, which may be before or after the count.
    # It submits one task a reward, here one, and forgets it once it has ended: at either count it may be scoring. One
    # that is left in each iteration would be four more. Since tasks were last forgotten, before the iteration, it has
    # ended those of none to two iterations, three each; with the update's they would be sixteen more.
    leeway = {"references": 8, "results": 40, "assets": 6, "policies": 1, "submitted": 1}
    assert {name: n for name, n in kept[7].items() if n > kept[3][name] + leeway.get(name, 0)} == {}


def test_lines_forget_a_stage_that_has_ended() -> None:
    lines = Lines()
    for done in (0, 1, 2):
        lines.advance("iteration 1: stage", done, 2)
    assert (lines._begun, lines._printed) == ({}, {})


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
def test_the_reward_rises_and_a_merged_export_says_that_it_is_another_function(empty: Runs, tmp_path: Path) -> None:
    settings = {"policy__lora": {"rank": 16, "alpha": 32.0}, "policy__quantization": {"kind": "nf4"}}
    summary = empty.start_text(run__iterations=16, evaluate__every=0, update__learning_rate=3e-3, **settings).summary
    assert summary.heldout_before is not None
    assert summary.heldout_after is not None
    assert summary.heldout_after > summary.heldout_before + 0.1
    gates = [empty.metrics(number, "text")["sampling/sampling_logp_difference/max"] for number in range(1, 17)]
    assert max(gates) < 1e-4

    request = ExportRequest(run="text", folder=str(tmp_path / "merged"), merged=True, root=str(empty.root))
    exported = export(plan_export(request))
    card = export(plan_export(request.model_copy(update={"folder": str(tmp_path / "own"), "merged": False})))
    usage = Path(card.folder, "README.md").read_text()
    assert "BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type='nf4'" in usage
    assert "llm_int8_skip_modules=['lm_head'" in usage
    assert exported.quantization is not None
    assert exported.quantization in (tmp_path / "merged" / "README.md").read_text()
    assert "another function" in (tmp_path / "merged" / "README.md").read_text()
    merged = SampleRequest(source=str(tmp_path / "merged"), prompts=("sort the letters of banana",))
    assert len(list(sample(merged, open_source(merged)))) == 1
