"""One of the processes that share the updates of a run: the handler `update` of `tasks.execution.child_main`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_core.update.accelerated import AcceleratedProcessGroup, ShardedProcessGroup
from tasks.execution.resources import resource
from tasks.models.resident import ResidentPolicy, configure_torch
from tasks.progress import listener
from tasks.storage.artifacts.store import open_store, use_store
from tasks.storage.filesystem.failures import translate_storage_errors
from tasks.update.carry_out import carry_out
from tasks.update.job import SharedJob, UpdateOutcome


def update_handler() -> Callable[[dict[str, Any]], dict[str, Any] | None]:
    """Return what takes part in one update after another; only the first process has an outcome."""

    def handle(payload: dict[str, Any]) -> dict[str, Any] | None:
        outcome = take_part(SharedJob.model_validate_json(json.dumps(payload)))
        return None if outcome is None else outcome.model_dump(mode="json")

    return handle


def take_part(shared: SharedJob) -> UpdateOutcome | None:
    """Join the other processes unless that is done, and run the update; every process has to call this.

    The policy stays in CPU memory for the next update. On a GPU its memory is needed for the next rollouts, and a
    sharded model cannot take other weights; there the next update loads the model again.

    Returns:
        What was written; None in every process but the first.

    Raises:
        Exception: any error of the update.
    """
    job = shared.job
    store = open_store(shared.storage, shared.run)
    use_store(store)
    is_sharded = job.placement.sharding == "fsdp2"
    process_group = (ShardedProcessGroup if is_sharded else AcceleratedProcessGroup)(configure_torch(job.placement))
    is_first = process_group.rank == 0

    def report(done: int, total: int) -> None:
        listener().advance("update policy", done, total)

    with translate_storage_errors(store.filesystem, store.root):
        outcome = carry_out(job, Path(shared.staged), process_group, report if is_first else None)
    resident = resource(ResidentPolicy)
    if is_sharded or process_group.device.type != "cpu":
        resident.close()
        return outcome
    digest = process_group.from_first(None if outcome is None else outcome.policy.digest)
    # The first process alone has refreshed the reference; the others read the new one when they need it.
    resident.commit_weights(digest, (job.policy if outcome is None else outcome.policy).copies.get("reference"))
    return outcome
