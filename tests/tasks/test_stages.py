"""The stages as plain functions over one run's folder: done twice they write the same bytes, and they refuse damage."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from diffusers import AutoencoderKL
from torch import Tensor

from configs.scoring import RewardSection
from configs.sections import PolicySection
from configs.training import MismatchSection, ParitySection, ReferenceSection
from grpo_core.parity import ParityTolerance
from grpo_core.rewards.image_statistics import JpegReward
from tasks.prompts.targets import TargetReference
from tasks.runs.layout import SamplingRound
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.store import ArtifactStore, use_store
from tests.tasks.stage_calls import (
    MIX,
    ROLLOUT,
    UPDATE,
    base,
    collect,
    compare,
    compare_rounds,
    content,
    plan,
    score,
    scores_of,
    scoring,
    table_of,
    update,
)


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> tuple[ArtifactStore, SamplingRound]:
    """A run of which the first stages are done."""
    store = ArtifactStore(str(tmp_path_factory.mktemp("sampled")), "run")
    use_store(store)
    return store, score(collect(base(), plan()))


@pytest.fixture
def scored(store: ArtifactStore, sampled: tuple[ArtifactStore, SamplingRound]) -> SamplingRound:
    shutil.copytree(sampled[0].path(), store.path())
    return sampled[1]


@pytest.fixture
def rollouts(scored: SamplingRound) -> ArtifactRef:
    return scored.rollouts


def test_one_iteration_done_twice_writes_the_same(store: ArtifactStore) -> None:
    first, second = [], []
    for results in (first, second):
        rollouts = collect(base(), plan())
        scored = score(rollouts)
        advantages = compare(scored)
        policy = update(base(), rollouts, advantages)
        results += [rollouts, scored.rewards["jpeg"], advantages, policy.checkpoint]
        # Between the two, the weights held are those of version 1, and other rollouts have been drawn.
        collect(policy, plan(2))
        results += [policy, content(store, rollouts), content(store, advantages), content(store, policy.checkpoint)]
    assert [r.digest for r in first[:4]] == [r.digest for r in second[:4]]
    assert first[4].digest == second[4].digest
    assert first[5:] == second[5:]
    assert first[4].digest != base().digest
    state = json.loads(first[7]["training_state.json"])
    assert (state["policy_version"], state["policy_digest"], state["optimizer_steps"]) == (
        1,
        first[4].digest,
        {"tokens": 2},
    )


def test_rows_name_their_seeds_and_settings(store: ArtifactStore, rollouts: ArtifactRef) -> None:
    rows = pl.read_parquet(store.local_files(rollouts) / "part-*.parquet").to_dicts()
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


def test_rollouts_of_another_policy_are_refused(store: ArtifactStore, scored: SamplingRound) -> None:
    advantages = compare(scored)
    other = PolicyRef(version=1, digest="e" * 64)
    with pytest.raises(ValueError, match=r"sampled by policy .* not by version 1"):
        update(other, scored.rollouts, advantages)
    assert store.find("policies/000002") is None


def test_the_parity_tolerance_of_tokens_follows_the_precision() -> None:
    sections: list[dict[str, Any]] = [{}, {"dtype": "bfloat16"}, {"autocast": "bfloat16"}]
    precisions = [PolicySection(model="m", **{"dtype": "float32", **section}).in_fp32 for section in sections]
    assert precisions == [True, False, False]
    assert ParitySection().tolerance("tokens", in_fp32=True) == ParityTolerance(1e-3, 1e-4)
    assert ParitySection(max_difference=0.5).tolerance("tokens", in_fp32=True) == ParityTolerance(0.5, 1e-4)


def test_an_image_with_broken_pixels_gets_the_lowest_score(
    store: ArtifactStore, rollouts: ArtifactRef, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By every reward that applies to it; the first prompt has a target to compare with, the second none."""
    whole = table_of(store, rollouts)
    content = whole["image"][0]["bytes"]
    (tmp_path / "target.png").write_bytes(content)
    target = TargetReference(str(tmp_path / "target.png"), hashlib.sha256(content).hexdigest())
    real = AutoencoderKL.decode

    def without_a_corner(self: AutoencoderKL, *arguments: Any, **options: Any) -> tuple[Tensor]:
        (pixels,) = real(self, *arguments, **options)
        pixels[1, :, :16, :8] = torch.nan
        return (pixels,)

    monkeypatch.setattr(AutoencoderKL, "decode", without_a_corner)
    rollouts = collect(base(), plan(targets=(target, None)))
    rows = table_of(store, rollouts)
    reason = "12.5% of the pixels are not numbers"
    assert rows["defect"].to_list() == [None, reason] * 2
    assert whole["defect"].to_list() == [None] * 4
    assert rows["image"].to_list()[::2] == whole["image"].to_list()[::2]
    mix = (*MIX, RewardSection(reward="ssim"))
    judged = score(rollouts, mix=mix, targets=(str(tmp_path),))
    jpeg, ssim = (scores_of(store, judged, label) for label in ("jpeg", "ssim"))
    for scores, applies in ((jpeg, (0, 1, 2, 3)), (ssim, (0, 1))):
        for row, scored in enumerate(scores.iter_rows(named=True)):
            assert scored["failure"] is None
            if row not in applies:
                assert (scored["value"], scored["raw"]) == (None, None)
            elif row % 2:
                assert (scored["value"], scored["raw"]) == (0.0, None)
            else:
                assert scored["value"] > 0
    assert judged.rewards["jpeg"].metrics["rewards/jpeg/null"] == 0.0
    assert judged.rewards["ssim"].metrics["rewards/ssim/null"] == 2.0
    advantages = table_of(store, compare_rounds((judged,), mix=mix))["advantage"].to_list()
    assert min(advantages[::2]) > 0 > max(advantages[1::2])


def test_unrated_samples_are_left_out(
    store: ArtifactStore, rollouts: ArtifactRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_name = {"i000001.p0000.s00": 1.0, "i000001.p0000.s01": 0.0}
    monkeypatch.setattr(JpegReward, "score", scoring(by_name.get))
    advantages = compare(score(rollouts))
    table = pl.read_parquet(store.local_files(advantages) / "advantages.parquet")
    assert [value is None for value in table["advantage"]] == [False, False, True, True]
    assert advantages.metrics["advantage/mean"] == pytest.approx(table["advantage"].mean())
    assert advantages.metrics["advantage/std"] == pytest.approx(table["advantage"].std())
    policy = update(base(), rollouts, advantages)
    assert policy.checkpoint.rows == 2
    monkeypatch.setattr(JpegReward, "score", scoring(lambda name: None))
    nothing = compare(score(rollouts))
    assert not [name for name in nothing.metrics if name.startswith("advantage/")]


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
    assert policy.checkpoint.metrics["sampling/sampling_logp_difference/max"] < 1e-4


def test_a_kl_in_the_reward_needs_reference_logprobs(store: ArtifactStore, scored: SamplingRound) -> None:
    with pytest.raises(ValueError, match=r"advantages\.kl_coef needs the reference's log-probs"):
        compare(scored, kl_coef=0.5)
    first = update(base(), scored.rollouts, compare(scored))
    rollouts = collect(first, plan(2), with_reference=True)
    scored = score(rollouts)
    advantages = compare(scored, kl_coef=0.5)
    table = table_of(store, advantages)
    assert advantages.metrics["kl_penalty"] == pytest.approx(table["kl_penalty"].mean())
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


def test_a_later_round_joins_the_first(
    store: ArtifactStore, rollouts: ArtifactRef, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_name = {"i000001.p0000.s00": 1.0, "i000001.d02.p0001.s01": 1.0}
    monkeypatch.setattr(JpegReward, "score", scoring(lambda name: by_name.get(name, 0.0)))
    first, second = rollouts, collect(base(), plan(sampling_round=2))
    rounds = (score(first), score(second, "iteration_000001/round_02"))
    dropped = compare_rounds(rounds, "iteration_000001/round_02", constant_groups="redraw")
    assert (dropped.metrics["groups_kept"], dropped.metrics["groups_dropped"]) == (2.0, 2.0)
    table = table_of(store, dropped)
    assert table.filter(pl.col("advantage").is_null())["group_id"].unique().sort().to_list() == [
        "i000001.d02.p0000",
        "i000001.p0001",
    ]
    policy = update(base(), (first, second), dropped)
    assert policy.checkpoint.rows == 4


def test_without_a_group_the_weights_do_not_change(rollouts: ArtifactRef, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(JpegReward, "score", scoring(lambda name: 0.5))
    policy = update(base(), rollouts, compare(score(rollouts), constant_groups="drop"))
    assert (policy.version, policy.checkpoint.metrics["optimizer_steps"]) == (1, 0.0)
    following = collect(policy, plan(2))
    assert update(policy, following, compare(score(following))).version == 2


CORRECTED = UPDATE.model_copy(update={"mismatch": MismatchSection(mode="truncate")})


def test_rows_of_an_earlier_version_train_within_the_staleness(scored: SamplingRound) -> None:
    rollouts, advantages = scored.rollouts, compare(scored)
    first = update(base(), rollouts, advantages)
    second = update(first, rollouts, advantages, CORRECTED, max_staleness=1)
    assert second.checkpoint.metrics["staleness/max"] == 1.0
    third = update(second, rollouts, advantages, CORRECTED, max_staleness=2)
    with pytest.raises(ValueError, match="all 4 rows are further than 1 versions from version 3"):
        update(third, rollouts, advantages, CORRECTED, max_staleness=1)


def test_a_refreshed_reference_is_kept_and_comes_back(store: ArtifactStore, scored: SamplingRound) -> None:
    section = CORRECTED.model_copy(update={"kl_coef": 0.1, "reference": ReferenceSection(refresh_every=2, mix=1.0)})
    policy, versions, advantages = base(), [], compare(scored)
    for staleness in range(3):
        policy = update(policy, scored.rollouts, advantages, section, max_staleness=staleness)
        versions.append(policy)
    assert ["reference" in version.copies for version in versions] == [False, True, True]
    assert versions[1].copies["reference"] == versions[1].digest
    assert versions[2].copies["reference"] == versions[1].digest
    # Its weights were swapped for those of version 1 in between.
    collect(versions[0], plan(1))
    again = collect(versions[1], plan(3), with_reference=True)
    for row in table_of(store, again).iter_rows(named=True):
        assert row["ref_logprobs"] == pytest.approx(row["rollout_logprobs"], abs=1e-4)
