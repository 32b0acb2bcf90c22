"""DiffusionNFT over stored rollouts: finished latents are stored and trained on, and the next update goes on."""

from dataclasses import fields, replace
from pathlib import Path

import polars as pl
import pytest
import torch
from safetensors.torch import load_file

from configs.training import NftUpdateSection, UpdateSection
from grpo_core.records import DenoisingBatch
from tasks.execution.resources import run_resources
from tasks.models.resident import ModelSpec
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.tables.schemas import NFT_STEPS
from tasks.update.algorithms import ALGORITHMS
from tasks.update.job import UpdateJob, UpdateOutcome
from tasks.update.rows import read_training_rows
from tests.tasks.update.update_jobs import (
    JOINT,
    advantages_table,
    alone,
    changed,
    commit,
    job_of,
    weights_and_moments,
)

STEPS = 4
DECODER = replace(
    changed(JOINT, train=("decoder",)),
    rollout=JOINT.rollout.model_copy(
        update={"sde_window_size": 0, "guidance_scale": 1.0, "num_inference_steps": STEPS}
    ),
    renderings=(4,),
    window_start=STEPS,
    shared_noise=False,
)
NFT = NftUpdateSection(
    learning_rate=1e-3, minibatch_size=4, micro_batch_size=3, timesteps_per_image=2, kl_coef=1e-4, ema=0.5
)
ADVANTAGES = (1.25, -1.0, -0.25, None)


@pytest.fixture
def job(store: ArtifactStore) -> UpdateJob:
    rollouts = DECODER.collect()
    advantages = advantages_table(
        rollouts,
        {
            (f"g{group}.s{sample:02d}", "denoising"): value
            for group in range(2)
            for sample, value in enumerate(ADVANTAGES)
        },
    )
    return job_of(DECODER, rollouts, advantages, update={"denoising": NFT})


def test_finished_latents_are_stored_and_read(job: UpdateJob, store: ArtifactStore, tmp_path: Path) -> None:
    (rollouts,) = job.rollouts
    folder = store.local_files(rollouts, tmp_path / "rollouts")
    table = pl.concat([pl.read_parquet(path) for path in sorted(folder.glob("*.parquet"))])
    assert table["denoising_logprobs"].to_list() == [[]] * 8
    assert table["window_start"].unique().to_list() == [STEPS]
    family, scratch = ModelSpec.model_validate(job.model).family, tmp_path / "scratch"
    scratch.mkdir()
    stored = read_training_rows(
        store, job.rollouts, job.advantages, job.policy, family, scratch, stream="denoising", max_staleness=0
    )
    assert len(stored.rows) == 6
    assert stored.rows.rollout_logprobs.shape == (6, 0)
    assert stored.settings.sde_window_size == 0
    actions = stored.rows.actions
    assert isinstance(actions, DenoisingBatch)
    assert actions.drafts is not None
    latents = torch.cat(actions.states)
    assert latents.dtype == torch.float16
    assert len(latents.flatten(1).unique(dim=0)) == 6


def test_an_update_trains_stores_its_own_steps_and_the_next_goes_on(
    job: UpdateJob, store: ArtifactStore, tmp_path: Path
) -> None:
    with run_resources():
        outcome = alone(job, tmp_path / "new")
        check(outcome, tmp_path / "new")
        later = job.model_copy(update={"policy": commit(store, job, tmp_path / "new", outcome)})
        second = alone(later, tmp_path / "second")
    with run_resources():
        assert alone(later, tmp_path / "again") == second
    ours, theirs = (weights_and_moments(tmp_path / name) for name in ("second", "again"))
    assert all(torch.equal(value, theirs[name]) for name, value in ours.items())


def check(outcome: UpdateOutcome, folder: Path) -> None:
    assert outcome.rows == 6
    assert outcome.metrics["optimizer_steps"] == 2.0
    assert outcome.metrics["nft/positive_error"] > 0
    assert outcome.metrics["kl"] == pytest.approx(outcome.metrics["nft/velocity_change"] / 2)
    steps = pl.read_parquet(folder / "update_steps.parquet")
    assert steps.columns == NFT_STEPS.names
    assert steps["optimizer_step"].to_list() == [1, 2]
    weights = load_file(folder / "adapter_model.safetensors")
    assert all(value.abs().max() > 0 for name, value in weights.items() if "lora_B" in name)


def test_a_job_for_other_processes_keeps_its_algorithm(job: UpdateJob) -> None:
    passed_on = UpdateJob.model_validate_json(job.model_dump_json())
    assert isinstance(passed_on.updates["denoising"], NftUpdateSection)
    assert passed_on == job
    grpo = job.model_copy(update={"updates": {"denoising": UpdateSection()}})
    assert isinstance(UpdateJob.model_validate_json(grpo.model_dump_json()).updates["denoising"], UpdateSection)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_measurement_has_a_column(name: str) -> None:
    algorithm = ALGORITHMS[name]
    assert {field.name for field in fields(algorithm.metrics)} | {"optimizer_step"} == set(algorithm.steps_schema.names)
