"""The stages as plain functions over one run's folder: done twice they write the same bytes, and they refuse damage."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import polars as pl
import pytest

from configs.schema import (
    AdvantagesSection,
    LoraSection,
    ParitySection,
    PlacementSection,
    PolicySection,
    RewardSection,
    RolloutSection,
    UpdateSection,
)
from grpo_core.errors import NonFiniteError
from grpo_core.rewards.jpeg import JpegReward
from grpo_core.rewards.protocol import Score, ScoringBatch
from tasks.collect_rollouts import collect_rollouts_task
from tasks.compute_advantages import compute_advantages_task
from tasks.model_files import model_digest
from tasks.models import ModelSpec
from tasks.plan import RolloutPlan, plan_iteration
from tasks.prompts import Prompt
from tasks.score_rewards import score_rewards_task
from tasks.storage.reference import ArtifactRef, PolicyRef, StaleReferenceError
from tasks.storage.store import ArtifactStore, use_store
from tasks.update_policy import update_policy_task, update_settings
from tests.tiny_policy import MODEL

ROLLOUT = RolloutSection(height=32, width=32, num_inference_steps=1, guidance_scale=1.0)
PLACEMENT = PlacementSection(device="cpu")
MIX = (RewardSection(reward="jpeg", settings={"direction": "compressible"}),)
UPDATE = UpdateSection(learning_rate=1e-3, minibatch_size=2)
SECTION = PolicySection(model=str(MODEL), dtype="float32", lora=LoraSection(rank=2, alpha=4.0))


def spec() -> ModelSpec:
    return ModelSpec(section=SECTION, digest=model_digest(str(MODEL)), adapter_seed=3, keep_reference=False)


def base() -> PolicyRef:
    return PolicyRef(version=0, digest=spec().digest)


def plan(iteration: int = 1) -> RolloutPlan:
    prompts = [Prompt(f"id{i}", text, {"note": i}) for i, text in enumerate(["a red circle", "a blue cross"])]
    return plan_iteration(prompts, [None] * 2, seed=11, iteration=iteration, count=2, group_size=2, shared_noise=True)


def collect(policy: PolicyRef, drawn: RolloutPlan) -> ArtifactRef:
    return collect_rollouts_task.fn(policy, drawn, spec(), ROLLOUT, PLACEMENT)


def score(rollouts: ArtifactRef, folder: str = "iteration_000001") -> ArtifactRef:
    return score_rewards_task.fn(rollouts, MIX, folder, "iteration 1", PLACEMENT)


def compare(rollouts: ArtifactRef, rewards: ArtifactRef) -> ArtifactRef:
    return compute_advantages_task.fn(rollouts, rewards, MIX, AdvantagesSection(), "iteration_000001", "iteration 1")


def update(policy: PolicyRef, rollouts: ArtifactRef, advantages: ArtifactRef) -> PolicyRef:
    return update_policy_task.fn(policy, rollouts, advantages, spec(), UPDATE, 11, "iteration 1", PLACEMENT)


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    store = ArtifactStore(str(tmp_path), "run")
    use_store(store)
    return store


def content(store: ArtifactStore, reference: ArtifactRef) -> dict[str, bytes]:
    folder = store.local_files(reference)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_one_iteration_done_twice_writes_the_same(store: ArtifactStore) -> None:
    first, second = [], []
    for results in (first, second):
        rollouts = collect(base(), plan())
        rewards = score(rollouts)
        advantages = compare(rollouts, rewards)
        policy = update(base(), rollouts, advantages)
        assert policy.checkpoint is not None
        results += [rollouts, rewards, advantages, policy.checkpoint]
        # Between the two, the weights held are those of version 1, and other rollouts have been drawn.
        collect(policy, plan(2))
        results += [policy, content(store, rollouts), content(store, advantages), content(store, policy.checkpoint)]
    assert [r.digest for r in first[:4]] == [r.digest for r in second[:4]]
    assert first[4].digest == second[4].digest
    assert first[5:] == second[5:]
    assert first[4].digest != base().digest
    state = json.loads(first[7]["training_state.json"])
    assert (state["policy_version"], state["policy_digest"], state["optimizer_steps"]) == (1, first[4].digest, 2)


def test_rows_say_how_they_were_drawn(store: ArtifactStore) -> None:
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


def test_advantages_are_the_definition_over_the_stored_rewards(store: ArtifactStore) -> None:
    rollouts = collect(base(), plan())
    rewards = score(rollouts)
    scores = pl.read_parquet(store.local_files(rewards) / "jpeg.parquet")
    table = pl.read_parquet(store.local_files(compare(rollouts, rewards)) / "advantages.parquet")
    assert table["reward"].to_list() == scores["value"].to_list()
    for (_,), group in table.group_by("group_id"):
        a, b = group["reward"].to_list()
        mean, std = (a + b) / 2, abs(a - b) / 2**0.5
        expected = [0.0, 0.0] if a == b else [(value - mean) / (std + 1e-4) for value in (a, b)]
        assert group["advantage"].to_list() == pytest.approx(expected, abs=1e-6)


def corrupt(path: Path) -> None:
    changed = bytearray(path.read_bytes())
    changed[len(changed) // 2] ^= 1
    path.write_bytes(changed)


@pytest.mark.parametrize("damage", [corrupt, Path.unlink])
def test_damaged_input_is_refused_by_name_and_set_aside(store: ArtifactStore, damage: Callable[[Path], None]) -> None:
    rollouts = collect(base(), plan())
    damage(Path(store.path(f"{rollouts.folder}/part-00000.parquet")))
    with pytest.raises(
        StaleReferenceError, match=r"iteration_000001/rollouts: part-00000\.parquet .*start the run again"
    ):
        score(rollouts)
    assert store.find(rollouts.folder) is None
    assert store.find("iteration_000001/rewards") is None


def test_rollouts_of_another_policy_are_refused(store: ArtifactStore) -> None:
    rollouts = collect(base(), plan())
    advantages = compare(rollouts, score(rollouts))
    other = PolicyRef(version=1, digest="e" * 64)
    with pytest.raises(ValueError, match=r"sampled by policy .* not by version 1"):
        update(other, rollouts, advantages)
    assert store.find("policies/000002") is None


def scoring(values: Callable[[str], float | None]) -> Callable[[JpegReward, ScoringBatch], Sequence[Score]]:
    def score(self: JpegReward, batch: ScoringBatch) -> Sequence[Score]:
        return [Score(value, value) for value in map(values, batch.sample_ids)]

    return score


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_reward_that_is_not_finite_names_its_samples(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    rollouts = collect(base(), plan())
    monkeypatch.setattr(JpegReward, "score", scoring(lambda name: value if name.endswith("p0001.s01") else 0.5))
    with pytest.raises(NonFiniteError, match=r"reward jpeg .* 1 sample\(s\): i000001\.p0001\.s01"):
        score(rollouts)
    assert store.find("iteration_000001/rewards") is None


def test_reward_that_gives_too_few_scores_is_refused(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = collect(base(), plan())
    monkeypatch.setattr(JpegReward, "score", lambda self, batch: [Score(0.5, 0.5)])
    with pytest.raises(ValueError, match="reward jpeg gave 1 scores for 4 samples"):
        score(rollouts)


def test_samples_without_a_reward_are_left_out_and_none_at_all_is_refused(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts = collect(base(), plan())
    by_name = {"i000001.p0000.s00": 1.0, "i000001.p0000.s01": 0.0}
    monkeypatch.setattr(JpegReward, "score", scoring(by_name.get))
    advantages = compare(rollouts, score(rollouts))
    table = pl.read_parquet(store.local_files(advantages) / "advantages.parquet")
    assert [value is None for value in table["advantage"]] == [False, False, True, True]
    policy = update(base(), rollouts, advantages)
    assert policy.checkpoint is not None
    assert policy.checkpoint.rows == 2
    monkeypatch.setattr(JpegReward, "score", scoring(lambda name: None))
    nothing = compare(rollouts, score(rollouts))
    with pytest.raises(ValueError, match="every reward of every sample is null"):
        update(base(), rollouts, nothing)
    assert store.find("policies/000001") == policy.checkpoint


@pytest.mark.parametrize(("dtype", "largest", "mean"), [("float32", 1e-3, 1e-4), ("bfloat16", 1.0, 0.05)])
def test_the_parity_gate_allows_what_the_dtype_needs_unless_told_otherwise(
    dtype: str, largest: float, mean: float
) -> None:
    left_open = update_settings(UpdateSection(), 8, dtype).parity
    assert (left_open.max_difference, left_open.mean_difference) == (largest, mean)
    told = update_settings(UpdateSection(parity=ParitySection(max_difference=0.5)), 8, dtype).parity
    assert (told.max_difference, told.mean_difference) == (0.5, mean)
