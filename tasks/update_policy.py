"""Stage 4: stored rollouts and advantages -> the next policy version, with all that is needed to go on from it."""

import hashlib
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import polars as pl
import torch
from safetensors.torch import load_file, save_file

from configs.schema import PlacementSection, UpdateSection
from grpo_core.optimizer import OptimizerSettings, PolicyOptimizer
from grpo_core.parity import ParityTolerance
from grpo_core.policies.glm_image.policy import GlmImageSettings
from grpo_core.records import TokenBatch, TrainingRows
from grpo_core.seeds import derive_seed
from grpo_core.update import StepMetrics, UpdateResult, UpdateSettings, update_policy
from tasks.caching import stage_task
from tasks.models import ModelSpec, policy_at, weights_became, weights_digest, weights_in_between
from tasks.progress import progress_of
from tasks.storage.reference import ArtifactRef, PolicyRef
from tasks.storage.schemas import SCHEMA_VERSION, UPDATE_STEPS
from tasks.storage.store import current_store
from tasks.storage.tables import write_table

STAGE = "update policy"
# Sampling with a cache and scoring in one pass round differently: 7e-6 nats at most in fp32 on a tiny GLM-Image, 1.6e-2
# at most and 2.7e-3 in the mean in bf16. Deeper models differ more, in single tokens far more.
PARITY_IN_FP32 = ParityTolerance(max_difference=1e-3, mean_difference=1e-4)
PARITY_IN_16_BITS = ParityTolerance(max_difference=1.0, mean_difference=0.05)
OPTIMIZER_FILE = "optimizer.safetensors"
STATE_FILE = "training_state.json"
_READ = ["sample_id", "prompt", "token_ids", "loss_mask", "rollout_logprobs", "temperature", "height", "width"]


def _describe(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    policy: PolicyRef = inputs["policy"]
    return {
        "policy": policy.digest,
        "checkpoint": policy.checkpoint.digest if policy.checkpoint else None,
        "version": policy.version,
        # The digest says which model it is; where its folder lies changes no result.
        "model": inputs["model"].model_dump(mode="json", exclude={"section": {"model"}}),
        "rollouts": inputs["rollouts"].digest,
        "advantages": inputs["advantages"].digest,
        "update": inputs["update"].model_dump(mode="json"),
        "seed": inputs["seed"],
    }


@stage_task(STAGE, _describe)
def update_policy_task(
    policy: PolicyRef,
    rollouts: ArtifactRef,
    advantages: ArtifactRef,
    model: ModelSpec,
    update: UpdateSection,
    seed: int,
    title: str,
    placement: PlacementSection,
) -> PolicyRef:
    """Check parity, train on the stored rollouts, and keep the version that comes of it."""
    started = time.perf_counter()
    store = current_store()
    version = policy.version + 1
    with tempfile.TemporaryDirectory() as fetched, store.staging() as staged:
        drawn = store.local_files(rollouts, Path(fetched) / "rollouts")
        scored = store.local_files(advantages, Path(fetched) / "advantages")
        rows, drawing = read_training_rows(drawn, scored, policy)
        learner = policy_at(policy, model, drawing, placement)
        optimizer = _optimizer(policy, learner.trainable_parameters(), update, Path(fetched))
        weights_in_between()
        result = update_policy(
            learner,
            optimizer,
            rows,
            update_settings(update, len(rows), model.section.dtype),
            seed=derive_seed(seed, version, "minibatches"),
            on_progress=progress_of(f"{title}: {STAGE}", len(rows)),
        )
        optimizer.zero_grad()  # or the gradients would be held through the next rollouts
        learner.save_weights(staged)
        digest = weights_digest(staged)
        _save_state(staged, optimizer, result, version, digest)
        weights_became(digest)
        checkpoint = store.commit(
            staged,
            f"policies/{version:06d}",
            digest=_checkpoint_digest(staged),
            schema_version=SCHEMA_VERSION,
            rows=len(rows),
            seconds=time.perf_counter() - started,
            metrics=result.metrics(),
        )
    return PolicyRef(version=version, digest=digest, checkpoint=checkpoint)


def read_training_rows(rollouts: Path, advantages: Path, policy: PolicyRef) -> tuple[TrainingRows, GlmImageSettings]:
    """Stored rollouts joined with their advantages; rows without one teach nothing and are left out.

    Raises:
        ValueError: the rollouts were sampled by other weights than the policy's, or no sample has an advantage.
    """
    files = sorted(rollouts.glob("*.parquet"))
    table = pl.read_parquet(files, columns=[*_READ, "policy_digest", "num_inference_steps", "guidance_scale"])
    scored = pl.read_parquet(sorted(advantages.glob("*.parquet")), columns=["sample_id", "advantage"])
    table = table.join(scored, on="sample_id", how="inner", validate="1:1", maintain_order="left")
    samplers = set(table["policy_digest"].unique())
    if samplers != {policy.digest}:
        raise ValueError(
            f"the rollouts were sampled by policy {sorted(d[:12] for d in samplers)}, not by version {policy.version} "
            f"({policy.digest[:12]}); collect rollouts with this version"
        )
    table = table.filter(pl.col("advantage").is_not_null())
    if table.is_empty():
        raise ValueError(
            "every reward of every sample is null, so there is nothing to learn from; look at the rewards' tables, "
            "and give the prompts what their rewards need (target pictures, for example)"
        )
    first = table.row(0, named=True)
    tokens = TokenBatch(
        prompts=tuple(table["prompt"]),
        token_ids=_padded(table["token_ids"].to_list(), torch.long),
        loss_mask=_padded(table["loss_mask"].to_list(), torch.bool),
        temperature=first["temperature"],
    )
    rows = TrainingRows(
        sample_ids=tuple(table["sample_id"]),
        tokens=tokens,
        rollout_logprobs=_padded(table["rollout_logprobs"].to_list(), torch.float32),
        advantages=torch.tensor(table["advantage"].to_list(), dtype=torch.float32),
    )
    return rows, GlmImageSettings(first["height"], first["width"], temperature=first["temperature"])


def _padded(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> torch.Tensor:
    tensors = [torch.tensor(row, dtype=dtype) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True)


def update_settings(update: UpdateSection, rows: int, dtype: str) -> UpdateSettings:
    """The section with everything that it leaves open decided."""
    default = PARITY_IN_FP32 if dtype == "float32" else PARITY_IN_16_BITS
    parity = update.parity
    return UpdateSettings(
        epochs=update.epochs,
        minibatch_size=update.minibatch_size or rows,
        micro_batch_size=update.micro_batch_size,
        clip_range=update.clip_range,
        clip_range_high=update.clip_range if update.clip_range_high is None else update.clip_range_high,
        kl_coef=update.kl_coef,
        max_grad_norm=update.max_grad_norm,
        parity=ParityTolerance(
            parity.max_difference or default.max_difference, parity.mean_difference or default.mean_difference
        ),
    )


def _optimizer(
    policy: PolicyRef, parameters: dict[str, torch.nn.Parameter], update: UpdateSection, fetched: Path
) -> PolicyOptimizer:
    settings = OptimizerSettings(
        learning_rate=update.learning_rate,
        betas=update.betas,
        eps=update.eps,
        weight_decay=update.weight_decay,
        lr_scheduler=update.lr_scheduler,
        warmup_steps=update.warmup_steps,
    )
    if policy.checkpoint is None:
        return PolicyOptimizer(parameters, settings)
    folder = current_store().local_files(policy.checkpoint, fetched / "policy")
    state = json.loads((folder / STATE_FILE).read_text())
    optimizer = PolicyOptimizer(parameters, settings, steps=state["optimizer_steps"])
    optimizer.load_state(load_file(folder / OPTIMIZER_FILE))
    return optimizer


def _save_state(folder: Path, optimizer: PolicyOptimizer, result: UpdateResult, version: int, digest: str) -> None:
    save_file(optimizer.state(), folder / OPTIMIZER_FILE)
    state = {
        "policy_version": version,
        "policy_digest": digest,
        "optimizer_steps": optimizer.steps,
        # Nothing random is carried over: every draw is derived from its place.
        "randomness": "derived from (run seed, iteration, stage, sample)",
    }
    (folder / STATE_FILE).write_text(json.dumps(state, indent=1, sort_keys=True))
    first = optimizer.steps - len(result.steps) + 1
    columns: dict[str, list[Any]] = {"optimizer_step": list(range(first, optimizer.steps + 1))}
    for field in StepMetrics.__dataclass_fields__:
        columns[field] = [asdict(step)[field] for step in result.steps]
    write_table(folder / "update_steps.parquet", UPDATE_STEPS, columns)


def _checkpoint_digest(folder: Path) -> str:
    """sha256 of what the next update reads: weights, moments, step count."""
    digest = hashlib.sha256(weights_digest(folder).encode())
    for name in (OPTIMIZER_FILE, STATE_FILE):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()
