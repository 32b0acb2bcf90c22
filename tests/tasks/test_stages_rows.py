"""Rows with kept ids, reference log-probs, later rounds and earlier versions, through all stages."""

import polars as pl
import pytest

from configs.training import MismatchSection, ReferenceSection
from grpo_core.rewards.image_statistics.statistics import JpegReward
from tasks.storage.artifacts.store import ArtifactStore
from tests.tasks.stage_calls import (
    ROLLOUT,
    UPDATE,
    base,
    collect,
    compare,
    compare_rounds,
    plan,
    score,
    scores_of,
    scoring,
    table_of,
    update,
)


def test_a_cut_distribution_is_stored_and_scored_over_the_same_ids(store: ArtifactStore) -> None:
    cut = ROLLOUT.model_copy(update={"top_k": 3, "top_p": 0.9})
    rollouts = collect(base(), plan(), cut)
    for row in table_of(store, rollouts).iter_rows(named=True):
        assert len(row["support_ids"]) == sum(row["support_counts"])
        assert max(row["support_counts"]) <= 3
        start = 0
        for token, count in zip(row["token_ids"], row["support_counts"], strict=True):
            assert token in row["support_ids"][start : start + count]
            start += count
    policy = update(base(), rollouts, compare(score(rollouts)))
    assert policy.checkpoint is not None
    assert policy.checkpoint.metrics["sampling/sampling_logp_difference/max"] < 1e-4


def test_a_kl_in_the_reward_needs_reference_logprobs_with_the_rollouts(store: ArtifactStore) -> None:
    without = collect(base(), plan())
    with pytest.raises(ValueError, match=r"advantages\.kl_coef needs the reference's log-probs"):
        compare(score(without), kl_coef=0.5)
    first = update(base(), without, compare(score(without)))
    rollouts = collect(first, plan(2), with_reference=True)
    scored = score(rollouts)
    table = table_of(store, compare(scored, kl_coef=0.5))
    drawn = table_of(store, rollouts)
    scores = scores_of(store, scored)["value"].to_list()
    for row, penalty, reward, value in zip(
        drawn.iter_rows(named=True), table["kl_penalty"], table["reward"], scores, strict=True
    ):
        assert row["scored_logprobs"] == pytest.approx(row["rollout_logprobs"], abs=1e-4)
        by_hand = sum(a - b for a, b in zip(row["scored_logprobs"], row["ref_logprobs"], strict=True))
        assert penalty == pytest.approx(by_hand, abs=1e-4)
        assert penalty != 0
        assert reward == pytest.approx(value - 0.5 * penalty, abs=1e-6)


def test_a_policy_is_its_own_reference_exactly(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first update the KL is zero to the bit, or groups without spread would train on its rounding."""
    monkeypatch.setattr(JpegReward, "score", scoring(lambda name: 0.5))
    rollouts = collect(base(), plan(), with_reference=True)
    advantages = compare(score(rollouts), kl_coef=0.5, constant_groups="drop")
    assert table_of(store, advantages)["kl_penalty"].to_list() == [0.0] * 4
    assert advantages.metrics["groups_dropped"] == 2.0


def test_a_later_round_joins_the_groups_of_the_first(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    by_name = {"i000001.p0000.s00": 1.0, "i000001.d02.p0001.s01": 1.0}
    monkeypatch.setattr(JpegReward, "score", scoring(lambda name: by_name.get(name, 0.0)))
    first, second = collect(base(), plan()), collect(base(), plan(sampling_round=2))
    rounds = (score(first), score(second, "iteration_000001/round_02"))
    dropped = compare_rounds(rounds, "iteration_000001/round_02", constant_groups="redraw")
    assert (dropped.metrics["groups_kept"], dropped.metrics["groups_dropped"]) == (2.0, 2.0)
    table = table_of(store, dropped)
    assert table.filter(pl.col("advantage").is_null())["group_id"].unique().sort().to_list() == [
        "i000001.d02.p0000",
        "i000001.p0001",
    ]
    policy = update(base(), (first, second), dropped)
    assert policy.checkpoint is not None
    assert policy.checkpoint.rows == 4


def test_where_every_group_is_dropped_the_weights_do_not_change(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(JpegReward, "score", scoring(lambda name: 0.5))
    rollouts = collect(base(), plan())
    policy = update(base(), rollouts, compare(score(rollouts), constant_groups="drop"))
    assert policy.checkpoint is not None
    assert (policy.version, policy.checkpoint.metrics["optimizer_steps"]) == (1, 0.0)
    following = collect(policy, plan(2))
    assert update(policy, following, compare(score(following))).version == 2


def test_rows_of_an_earlier_version_train_within_the_staleness(store: ArtifactStore) -> None:
    rollouts = collect(base(), plan())
    advantages = compare(score(rollouts))
    first = update(base(), rollouts, advantages)
    corrected = UPDATE.model_copy(update={"mismatch": MismatchSection(mode="truncate")})
    second = update(first, rollouts, advantages, corrected, max_staleness=1)
    assert second.checkpoint is not None
    assert second.checkpoint.metrics["staleness/max"] == 1.0
    third = update(second, rollouts, advantages, corrected, max_staleness=2)
    with pytest.raises(ValueError, match="all 4 rows are further than 1 versions from version 3"):
        update(third, rollouts, advantages, corrected, max_staleness=1)


def test_a_refreshed_reference_is_kept_and_comes_back(store: ArtifactStore) -> None:
    section = UPDATE.model_copy(update={"kl_coef": 0.1, "reference": ReferenceSection(refresh_every=2, mix=1.0)})
    policy, versions = base(), []
    for iteration in (1, 2, 3):
        rollouts = collect(policy, plan(iteration))
        policy = update(policy, rollouts, compare(score(rollouts)), section)
        versions.append(policy)
    assert [version.reference_digest is None for version in versions] == [True, False, False]
    assert versions[1].reference_digest == versions[1].digest
    assert versions[2].reference_digest == versions[1].digest
    # Its weights were swapped for those of version 1 in between.
    collect(versions[0], plan(1))
    again = collect(versions[1], plan(3), with_reference=True)
    for row in table_of(store, again).iter_rows(named=True):
        assert row["ref_logprobs"] == pytest.approx(row["rollout_logprobs"], abs=1e-4)
