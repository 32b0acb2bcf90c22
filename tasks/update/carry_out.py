"""One policy update from its artifacts to the files of the next version, in this process or shared with others."""

import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

from grpo_core.optimizer import PolicyOptimizer
from grpo_core.streams import Stream
from grpo_core.update import ProcessGroup
from tasks.execution.memory import peak_memory, reset_peak_memory
from tasks.execution.resources import resource
from tasks.models.files import COPIES, component_folder, copy_digests, weights_digest
from tasks.models.resident import ResidentPolicy
from tasks.runs.layout import OPTIMIZER_FILE, STATE_FILE
from tasks.storage.artifacts.reference import PolicyRef
from tasks.storage.artifacts.store import current_store
from tasks.update.component import ComponentUpdate
from tasks.update.job import UpdateJob, UpdateOutcome
from tasks.update.rows import StoredRows, read_training_rows


def carry_out(
    job: UpdateJob, staged: Path, process_group: ProcessGroup, on_progress: Callable[[int, int], None] | None
) -> UpdateOutcome | None:
    """Read, then check parity, train and write the next version's files, one component after the other.

    Args:
        process_group: the processes that share the update; each takes its part of every minibatch.
        on_progress: called with passes done and the total.

    Returns:
        What was written; None in every process but the first.

    Raises:
        InputError, ParityError, NonFiniteError, StaleReferenceError, ValueError: as the functions that it calls. No
            version is made then, whichever component failed.
    """
    reset_peak_memory()
    with tempfile.TemporaryDirectory() as fetched:
        stored = {stream: _read_rows(job, stream, Path(fetched)) for stream in job.updates}
        resident = resource(ResidentPolicy)
        settings = next(iter(stored.values())).settings
        learner = resident.at(job.policy, job.model, settings, job.placement)
        kept = resident.begin_update(job.policy, job.updates)

        @cache
        def previous() -> Path | None:
            checkpoint = job.policy.checkpoint
            return None if checkpoint is None else current_store().local_files(checkpoint, Path(fetched) / "policy")

        optimizers: dict[Stream, PolicyOptimizer] = {}
        metrics: dict[str, float] = {}
        for place, (stream, rows) in enumerate(stored.items()):
            report = _share_of_progress(place, len(stored), on_progress)
            component = ComponentUpdate(job, stream, learner.components[stream], previous, kept.get(stream), staged)
            result, optimizers[stream] = component.run(rows, process_group, report)
            prefix = f"{stream}/" if place else ""
            metrics |= {f"{prefix}{name}": value for name, value in (result.metrics() | rows.metrics()).items()}
    if process_group.rank:
        return None
    settled = current_store().settle(staged)
    known = {staged / name: sha256 for name, sha256 in settled.items()}
    policy = PolicyRef(version=job.version, digest=weights_digest(staged, known), copies=copy_digests(staged, known))
    _save_state(staged, {stream: optimizer.steps for stream, optimizer in optimizers.items()}, policy)
    moments = [known[component_folder(staged, stream) / OPTIMIZER_FILE] for stream in job.updates]
    checkpoint_digest = _checkpoint_digest(policy, moments, (staged / STATE_FILE).read_text())
    if process_group.count == 1:
        resident.keep_optimizers(checkpoint_digest, job.updates, optimizers)
    return UpdateOutcome(
        policy=policy,
        checkpoint_digest=checkpoint_digest,
        settled=settled,
        rows=len({sample_id for each in stored.values() for sample_id in each.rows.sample_ids}),
        metrics=metrics,
        peak_memory=peak_memory(),
    )


def _read_rows(job: UpdateJob, stream: Stream, fetched: Path) -> StoredRows:
    return read_training_rows(
        current_store(),
        job.rollouts,
        job.advantages,
        job.policy,
        job.model.family,
        fetched,
        stream=stream,
        max_staleness=job.max_staleness,
    )


def _share_of_progress(
    place: int, count: int, on_progress: Callable[[int, int], None] | None
) -> Callable[[int, int], None] | None:
    """Return what reports one component's passes as an equal share of the passes of all components."""
    if on_progress is None:
        return None
    return lambda done, total: on_progress(place * total + done, count * total)


def _save_state(folder: Path, steps: Mapping[Stream, int], policy: PolicyRef) -> None:
    state = {
        "policy_version": policy.version,
        "policy_digest": policy.digest,
        "optimizer_steps": dict(steps),
        # No random state is stored: every random number is derived from its place.
        "randomness": "derived from (run seed, iteration, stage, sample)",
    }
    (folder / STATE_FILE).write_text(json.dumps(state, indent=1, sort_keys=True))


def _checkpoint_digest(policy: PolicyRef, moments: Sequence[str], state: str) -> str:
    """Return the sha256 of what the next update reads.

    Args:
        policy: with the digests of its weights.
        moments: sha256 of each optimizer's file.
        state: the training state.
    """
    weights = " ".join([policy.digest, *(str(policy.copies.get(name)) for name in COPIES)])
    return hashlib.sha256("\n".join([weights, *moments, state]).encode()).hexdigest()
