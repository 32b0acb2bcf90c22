"""Stage 4: stored rollouts and advantages -> the next policy version, with everything the next update needs."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

from configs.placement import PlacementSection
from configs.training import AnyUpdateSection
from grpo_core.policies.protocol import family_module
from grpo_core.rollouts.streams import Stream
from grpo_core.update.process_group import SINGLE_PROCESS
from grpo_core.update.settings import BackwardPerStep
from grpo_core.user_code.files import code_kept
from tasks.execution.caching import stage_task
from tasks.execution.resources import halve_on_out_of_memory, resource, retry_on_out_of_memory
from tasks.models.resident import ModelSpec, ResidentPolicy
from tasks.progress import progress_of
from tasks.runs.layout import policy_folder
from tasks.runs.reader import refuse_lost
from tasks.storage.artifacts.commit import STATES_REMOVED, commit_artifact
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.store import ArtifactStore, current_store
from tasks.update.component import carry_out
from tasks.update.job import UpdateJob, UpdateOutcome
from tasks.update.process import carry_out_together

STAGE = "update policy"
_NAMES = ("model", "revision", "adapter")


def _describe(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    policy: PolicyRef = inputs["policy"]
    model: ModelSpec = inputs["model"]
    return {
        "policy": policy.digest,
        "checkpoint": policy.checkpoint.digest if policy.checkpoint else None,
        "version": policy.version,
        "model": model.digest,
        "adapter_seed": model.adapter_seed,
        # The digest identifies the model and its adapter; their folders do not change results.
        "trained": {name: value for name, value in model.section.result_settings().items() if name not in _NAMES},
        "reference": policy.copies.get("reference"),
        "rollouts": [rollouts.digest for rollouts in inputs["rollouts"]],
        "max_staleness": inputs["max_staleness"],
        "advantages": inputs["advantages"].digest,
        "updates": {
            stream: {"update": update.result_settings(), "custom_loss": update.custom_loss}
            for stream, update in inputs["updates"].items()
        },
        "seed": inputs["seed"],
    }


def _modules(inputs: Mapping[str, Any]) -> tuple[str, ...]:
    # A handler of child processes is found by its name.
    return family_module(inputs["model"].section.kind), "tasks.update.process"


def _losses(updates: Mapping[Stream, AnyUpdateSection]) -> tuple[str, ...]:
    return tuple(update.objective for update in updates.values() if update.custom_loss is not None)


@stage_task(
    STAGE,
    _describe,
    kind="update",
    modules=_modules,
    functions=lambda arguments: _losses(arguments.get("updates", {})),
    uses_policy=lambda arguments: True,
)
def update_policy_task(
    policy: PolicyRef,
    rollouts: tuple[ArtifactRef, ...],
    advantages: ArtifactRef,
    model: ModelSpec,
    updates: Mapping[Stream, AnyUpdateSection],
    seed: int,
    max_staleness: int,
    title: str,
    placement: PlacementSection,
) -> PolicyRef:
    """Check parity, train every component on its stored rollouts, and commit the next version."""
    job = UpdateJob(
        policy=policy,
        rollouts=rollouts,
        advantages=advantages,
        model=model,
        updates=updates,
        seed=seed,
        max_staleness=max_staleness,
        placement=placement,
    )

    largest = max(update.micro_batch_size for update in updates.values())

    name, run = f"{title}: {STAGE}", current_store().run

    def by_size(size: int) -> PolicyRef:
        sized = {
            stream: update.model_copy(update={"micro_batch_size": max(1, update.micro_batch_size * size // largest)})
            for stream, update in updates.items()
        }

        def by_steps(steps: BackwardPerStep) -> PolicyRef:
            chosen = {stream: update.with_steps(steps) for stream, update in sized.items()}
            return _update(job.model_copy(update={"updates": chosen}), title)

        chooses = any(update.chooses_steps for update in sized.values())
        setting, begin = "update.backward_per_step", cast(BackwardPerStep, "auto")
        return retry_on_out_of_memory(name, run, setting, begin, lambda steps: chooses or steps, by_steps)

    # Steps one by one come before it: they take as many operations.
    return halve_on_out_of_memory(name, run, "update.micro_batch_size", largest, by_size)


def _update(job: UpdateJob, title: str) -> PolicyRef:
    started = time.perf_counter()
    store = current_store()
    rows = job.advantages.rows
    if "denoising" in job.updates:
        for rollouts in job.rollouts:
            refuse_lost(store, rollouts, policy_folder(job.version), STATES_REMOVED)
    report_progress = progress_of(f"{title}: {STAGE}", rows)
    with store.staging() as staged:
        with code_kept("update.loss", _losses(job.updates)):
            # The update counts passes over microbatches, several for each sample.
            outcome = _carry_out(job, store, staged, lambda done, passes: report_progress(done * rows // passes))
        checkpoint = commit_artifact(
            store,
            staged,
            policy_folder(job.version),
            digest=outcome.checkpoint_digest,
            rows=outcome.rows,
            seconds=time.perf_counter() - started,
            metrics=outcome.metrics,
            peak_memory=outcome.peak_memory,
            synced=outcome.synced,
        )
    return outcome.policy.model_copy(update={"checkpoint": checkpoint})


def _carry_out(
    job: UpdateJob, store: ArtifactStore, staged: Path, report_progress: Callable[[int, int], None]
) -> UpdateOutcome:
    if job.placement.in_processes:
        return carry_out_together(job, store, staged, report_progress)
    outcome = carry_out(job, staged, SINGLE_PROCESS, report_progress)
    assert outcome is not None, "the first process has one"
    resource(ResidentPolicy).commit_weights(outcome.policy.digest, outcome.policy.copies.get("reference"))
    return outcome
