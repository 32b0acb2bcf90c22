"""The stages as plain functions over one run's folder: done twice they write the same bytes, and they refuse damage."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from configs.sections import PolicySection
from configs.training import ParitySection
from grpo_core.parity import ParityTolerance
from tasks.storage.artifacts.reference import PolicyRef, StaleReferenceError
from tasks.storage.artifacts.store import ArtifactStore
from tests.tasks.reports.made_runs import flip_last_byte
from tests.tasks.stage_calls import base, collect, compare, content, plan, score, update


def test_one_iteration_done_twice_writes_the_same(store: ArtifactStore) -> None:
    first, second = [], []
    for results in (first, second):
        rollouts = collect(base(), plan())
        scored = score(rollouts)
        advantages = compare(scored)
        policy = update(base(), rollouts, advantages)
        assert policy.checkpoint is not None
        results += [rollouts, scored.rewards["jpeg"], advantages, policy.checkpoint]
        # Between the two, the weights held are those of version 1, and other rollouts have been drawn.
        collect(policy, plan(2))
        results += [policy, content(store, rollouts), content(store, advantages), content(store, policy.checkpoint)]
    assert [r.digest for r in first[:4]] == [r.digest for r in second[:4]]
    assert first[4].digest == second[4].digest
    assert first[5:] == second[5:]
    assert first[4].digest != base().digest
    state = json.loads(first[7]["training_state.json"])
    assert (state["policy_version"], state["policy_digest"], state["optimizer_steps"]) == (1, first[4].digest, 2)


def test_rows_name_their_seeds_and_settings(store: ArtifactStore) -> None:
    rows = pl.read_parquet(store.local_files(collect(base(), plan())) / "*.parquet").to_dicts()
    requested = {
        name: (seed, noise)
        for group in plan().groups
        for request in [plan().request(group)]
        for name, seed, noise in zip(request.sample_ids, request.seeds, request.noise_seeds, strict=True)
    }
    assert {row["sample_id"]: (row["seed"], row["noise_seed"]) for row in rows} == requested
    for row in rows:
        assert (row["policy_version"], row["policy_digest"]) == (0, base().digest)
        assert (row["height"], row["width"], row["temperature"], row["num_inference_steps"]) == (32, 32, 1.0, 1)
        assert row["length"] == sum(row["loss_mask"])
        assert len(row["token_ids"]) == len(row["rollout_logprobs"]) == len(row["loss_mask"])
        assert all(value <= 0 for value in row["rollout_logprobs"])
        assert json.loads(row["columns"]) in ({"note": 0}, {"note": 1})


@pytest.mark.parametrize("damage", [flip_last_byte, Path.unlink])
def test_damaged_input_is_refused_by_name_and_quarantined(store: ArtifactStore, damage: Callable[[Path], None]) -> None:
    rollouts = collect(base(), plan())
    damage(Path(store.path(f"{rollouts.folder}/part-00000.parquet")))
    with pytest.raises(
        StaleReferenceError, match=r"iteration_000001/rollouts: part-00000\.parquet .*start the run again"
    ):
        score(rollouts)
    assert store.find(rollouts.folder) is None
    assert store.find("iteration_000001/rewards/jpeg") is None


def test_rollouts_of_another_policy_are_refused(store: ArtifactStore) -> None:
    rollouts = collect(base(), plan())
    advantages = compare(score(rollouts))
    other = PolicyRef(version=1, digest="e" * 64)
    with pytest.raises(ValueError, match=r"sampled by policy .* not by version 1"):
        update(other, rollouts, advantages)
    assert store.find("policies/000002") is None


@pytest.mark.parametrize(
    ("policy", "largest", "mean"),
    [
        ({"dtype": "float32"}, 1e-3, 1e-4),
        ({"dtype": "bfloat16"}, 1.0, 0.05),
        ({"dtype": "float32", "autocast": "bfloat16"}, 1.0, 0.05),
    ],
)
def test_the_parity_tolerance_follows_the_precision_unless_configured(
    policy: dict[str, Any], largest: float, mean: float
) -> None:
    section = PolicySection(model="m", **policy)
    assert ParitySection().tolerance("tokens", in_fp32=section.in_fp32) == ParityTolerance(largest, mean)
    configured = ParitySection(max_difference=0.5)
    assert configured.tolerance("tokens", in_fp32=section.in_fp32) == ParityTolerance(0.5, mean)
