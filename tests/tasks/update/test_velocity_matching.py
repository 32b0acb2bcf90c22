"""Velocities matched on stored rollouts: finished latents are stored and trained on, and the next update goes on."""

from dataclasses import fields, replace
from pathlib import Path

import polars as pl
import pytest
import torch
from safetensors.torch import load_file

from configs.training import AwmUpdateSection, NftUpdateSection
from tasks.execution.resources import resource, run_resources
from tasks.models.initial import weights_digest
from tasks.models.resident import ModelSpec, ResidentPolicy
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.schemas import NFT_STEPS, VELOCITY_STEPS
from tasks.update.job import UpdateJob
from tasks.update.rows import ALGORITHMS, read_training_rows
from tests.tasks.update.update_jobs import (
    JOINT,
    UPDATE,
    advantages_table,
    alone,
    changed,
    commit,
    job_of,
    trained_advantages,
    weights_and_moments,
)

ADAPTER = "adapter_model.safetensors"
STEPS = 4
DECODER = replace(
    changed(JOINT, train=("denoising",)),
    rollout=JOINT.rollout.model_copy(
        update={"sde_window_size": 0, "guidance_scale": 1.0, "num_inference_steps": STEPS}
    ),
    images_of_samples=(4,),
    window_start=STEPS,
    shared_noise=False,
)
BOTH = replace(JOINT, rollout=DECODER.rollout, window_start=STEPS, shared_noise=False)
NFT = NftUpdateSection(
    learning_rate=1e-3,
    minibatch_size=4,
    micro_batch_size=4,
    timesteps_per_image=2,
    kl_coef=1e-4,
    ema=0.5,
    old_decay_step=0.25,
)
ADVANTAGES = (1.25, -1.0, -0.25, None)


def nft_job() -> UpdateJob:
    rollouts = DECODER.collect()
    return job_of(DECODER, rollouts, advantages(rollouts), update={"denoising": NFT})


def advantages(rollouts: ArtifactRef) -> ArtifactRef:
    return advantages_table(
        rollouts,
        {
            (f"g{group}.s{sample:02d}", "denoising"): value
            for group in range(2)
            for sample, value in enumerate(ADVANTAGES)
        },
    )


def test_finished_latents_are_stored_and_read(store: ArtifactStore, tmp_path: Path) -> None:
    job = nft_job()
    (rollouts,) = job.rollouts
    folder = store.local_files(rollouts, tmp_path / "rollouts")
    table = pl.concat([pl.read_parquet(path) for path in sorted(folder.glob("part-*.parquet"))])
    assert table["denoising_logprobs"].to_list() == [[]] * 8
    assert table["window_start"].unique().to_list() == [STEPS]
    family, scratch = ModelSpec.model_validate(job.model).family, tmp_path / "scratch"
    scratch.mkdir()
    stored = read_training_rows(
        store, job.rollouts, job.advantages, job.policy, family, scratch, stream="denoising", max_staleness=0
    )
    assert len(stored.rows) == 6
    assert stored.rows.rollout_logprobs.lengths.tolist() == [0] * 6
    assert stored.settings.sde_window_size == 0
    actions = stored.rows.actions
    assert actions.drafts is not None
    latents = torch.cat(actions.states)
    assert latents.dtype == torch.float16
    assert len(latents.flatten(1).unique(dim=0)) == 6


def test_an_update_goes_on_from_what_is_stored_and_the_old_policy_follows(store: ArtifactStore, tmp_path: Path) -> None:
    with run_resources():
        job = nft_job()
        outcome = alone(job, tmp_path / "first")
        policy = commit(store, job, tmp_path / "first", outcome)
        rollouts = DECODER.collect(policy.sampler)
        later = job_of(DECODER, rollouts, advantages(rollouts), policy=policy, update={"denoising": NFT})
        later = later.model_copy(update={"max_staleness": 0})
        second = alone(later, tmp_path / "second")
    with run_resources():
        assert alone(later, tmp_path / "again") == second
        sampler = resource(ResidentPolicy).at(policy.sampler, later.model, DECODER.rollout, later.placement)
        sampler.components["denoising"].save_weights(tmp_path / "sampler")
    ours, theirs = (weights_and_moments(tmp_path / name) for name in ("second", "again"))
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())
    first = Path(store.path("policies/000001"))
    (policy_1, old_1), (policy_2, old_2) = (
        [load_file(folder / ADAPTER) for folder in (version / "denoising", version / "denoising" / "old")]
        for version in (first, tmp_path / "second")
    )
    assert outcome.rows == 6
    assert outcome.metrics["optimizer_steps"] == 2.0
    assert outcome.metrics["nft/positive_error"] > 0
    assert outcome.metrics["kl"] == pytest.approx(outcome.metrics["nft/velocity_change"] / 2)
    steps = pl.read_parquet(first / "denoising" / "update_steps.parquet")
    assert steps.columns == NFT_STEPS.names
    assert steps["optimizer_step"].to_list() == [1, 2]
    # Adapters begin at zero.
    assert all(value.abs().max() > 0 for name, value in policy_1.items() if "lora_B" in name)
    assert all(torch.equal(old_1[name], 0.75 * value) for name, value in policy_1.items() if "lora_B" in name)
    assert all(torch.equal(old_2[name], 0.5 * value + 0.5 * old_1[name]) for name, value in policy_2.items())
    # They are what sampled, and what the first step is measured from.
    old = first / "denoising" / "old"
    assert policy.copies["old"] == weights_digest(old) != policy.digest
    assert (tmp_path / "sampler" / ADAPTER).read_bytes() == (old / ADAPTER).read_bytes()
    steps = pl.read_parquet(tmp_path / "second" / "denoising" / "update_steps.parquet")
    assert steps["velocity_change"][0] > 0


def test_a_method_without_an_old_policy_stores_none_and_trains_what_nft_sampled(
    store: ArtifactStore, tmp_path: Path
) -> None:
    awm = AwmUpdateSection(minibatch_size=4, micro_batch_size=4, timesteps_per_image=2, kl_coef=0.3)
    with run_resources():
        job = nft_job()
        policy = commit(store, job, tmp_path / "first", alone(job, tmp_path / "first"))
        # Its images are by the old policy of version 1, which is another than the version itself.
        rollouts = DECODER.collect(policy.sampler)
        later = job_of(DECODER, rollouts, advantages(rollouts), policy=policy, update={"denoising": awm})
        outcome = alone(later, tmp_path / "second")
    assert policy.copies["old"] != policy.digest
    assert not (tmp_path / "second" / "denoising" / "old").exists()
    assert "old" not in outcome.policy.copies
    steps = pl.read_parquet(tmp_path / "second" / "denoising" / "update_steps.parquet")
    assert steps.columns == VELOCITY_STEPS.names
    assert outcome.metrics["velocity/error"] == pytest.approx(steps["velocity_error"].mean())
    assert steps["kl"].to_list()[1] > 0


@pytest.mark.slow
def test_the_old_policy_of_one_component_is_kept_apart_from_the_other(store: ArtifactStore, tmp_path: Path) -> None:
    tokens = UPDATE.model_copy(update={"epochs": 1, "minibatch_size": None, "micro_batch_size": 8})

    def both(policy: PolicyRef | None) -> UpdateJob:
        rollouts = BOTH.collect(policy and policy.sampler)
        updates = {"tokens": tokens, "denoising": NFT.model_copy(update={"ema": None})}
        return job_of(BOTH, rollouts, trained_advantages(BOTH, rollouts), policy=policy, update=updates)

    job = both(None)
    policy = commit(store, job, tmp_path / "first", alone(job, tmp_path / "first"))
    folder = Path(store.path("policies/000001"))
    assert [path.parent.name for path in folder.glob("*/old")] == ["denoising"]
    assert policy.sampler.digest == weights_digest(folder, copy="old") != policy.digest
    # The gate compares what the tokens were sampled with.
    second = alone(both(policy).model_copy(update={"max_staleness": 0}), tmp_path / "second")
    assert second.metrics["sampling/sampling_logp_difference/max"] < 1e-4


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_measurement_has_a_column(name: str) -> None:
    algorithm = ALGORITHMS[name]
    # The norm is a metric of the iteration alone: a column of it would need another version of all stored tables.
    measured = {field.name for field in fields(algorithm.metrics)} - {"velocity_norm"}
    assert measured | {"optimizer_step"} == set(algorithm.steps_schema.names)
