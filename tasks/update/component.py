"""One policy update: each component from the previous version's files to those of the next one."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from configs.training import AnyUpdateSection
from grpo_core.policies.protocol import PolicyComponent
from grpo_core.policies.trained.model import WeightCopy
from grpo_core.policies.trained.settings import CopyName
from grpo_core.rollouts.streams import Stream
from grpo_core.seeds import derive_seed
from grpo_core.update.optimizer import PolicyOptimizer
from grpo_core.update.process_group import ProcessGroup
from grpo_core.update.step import UpdateResult
from tasks.execution.resources import peak_memory, reset_peak_memory, resource
from tasks.metrics import offload_metrics
from tasks.models.initial import COPIES, OPTIMIZER_FILE, component_folder, copy_digests, copy_folder, weights_digest
from tasks.models.resident import ResidentPolicy
from tasks.progress import log
from tasks.runs.layout import STATE_FILE
from tasks.storage.artifacts.commit import hash_staged
from tasks.storage.artifacts.reference import PolicyRef
from tasks.storage.artifacts.store import current_store
from tasks.storage.parquet import write_table
from tasks.update.job import UpdateJob, UpdateOutcome, refuse_unequal_sources
from tasks.update.rows import ALGORITHMS, StoredRows, Training, read_training_rows


class ComponentUpdate:
    """The update of a component, from the verified `previous` files to the next ones, with the `kept` optimizer."""

    def __init__(
        self,
        job: UpdateJob,
        stream: Stream,
        component: PolicyComponent,
        previous: Callable[[], Path | None],
        kept: PolicyOptimizer | None,
        staged: Path,
    ) -> None:
        self.job, self.stream, self.component, self.previous = job, stream, component, previous
        self.settings = job.updates[stream]
        self.kept, self.staged = kept, staged

    def run(
        self, stored: StoredRows, process_group: ProcessGroup, on_progress: Callable[[int, int], None] | None
    ) -> tuple[UpdateResult, PolicyOptimizer]:
        """Train, write the component's files, and return what was measured and the optimizer."""
        job, trained = self.job, self.component.trained
        shares_prompts = trained.shares_prompts
        self._begin_copies()
        # Of weights that are elsewhere there is nothing to compare.
        with self.component.in_use():
            process_group.distribute(trained)
        if shares_prompts and not trained.shares_prompts and not process_group.rank:
            log("in this update each row computes its prompt: processes have shares of the layers")
        optimizer = self._optimizer(process_group)
        settings = self._with_steps(process_group)
        algorithm = ALGORITHMS[self.settings.algorithm]
        result = algorithm.update(
            Training(
                stream=self.stream,
                component=self.component,
                optimizer=optimizer,
                rows=stored.rows,
                settings=settings,
                seed=derive_seed(job.seed, job.version, "minibatches"),
                in_fp32=job.model.section.in_fp32,
                process_group=process_group,
                on_progress=on_progress,
                engines=stored.engines,
            )
        )
        optimizer.zero_grad()  # frees the gradients' memory for the next rollouts
        moments = process_group.state(optimizer)
        process_group.collect(trained)
        if not process_group.rank:
            folder = component_folder(self.staged, self.stream)
            folder.mkdir(parents=True, exist_ok=True)
            self._save_reference(folder)
            self._save_copies(folder)
            self.component.save_weights(folder)
            save_file(moments, folder / OPTIMIZER_FILE)
            steps = range(optimizer.steps - len(result.steps) + 1, optimizer.steps + 1)
            names = algorithm.steps_schema.names[1:]
            measured = {name: [getattr(step, name) for step in result.steps] for name in names}
            columns: dict[str, list[Any]] = {"optimizer_step": [*steps], **measured}
            write_table(folder / "update_steps.parquet", algorithm.steps_schema, columns)
        return result, optimizer

    def _optimizer(self, process_group: ProcessGroup) -> PolicyOptimizer:
        parameters = self.component.trainable_parameters()
        undecayed = self.component.trained.undecayed_parameters()
        if self.kept is not None:
            assert all(self.kept.parameters[name] is each for name, each in parameters.items()), "weights stay in place"
            return self.kept
        # A run that starts from the weights of another begins with its own schedule and without moments.
        previous = None if self.job.policy.version == 0 else self.previous()
        if previous is None:
            return PolicyOptimizer(parameters, self.settings, undecayed=undecayed)
        state = json.loads((previous / STATE_FILE).read_text())
        steps = int(state["optimizer_steps"][self.stream])
        optimizer = PolicyOptimizer(parameters, self.settings, steps=steps, undecayed=undecayed)
        process_group.load_state(optimizer, load_file(previous / self.stream / OPTIMIZER_FILE))
        return optimizer

    def _with_steps(self, process_group: ProcessGroup) -> AnyUpdateSection:
        """Return the section with the choice whether denoising steps are gone back one by one, where it leaves one."""
        settings, parameters = self.settings, self.component.trainable_parameters()
        if not settings.chooses_steps:
            return settings
        device = next(iter(parameters.values())).device
        # The passes of all processes are alike.
        one_by_one = bool(process_group.from_first(self.job.model.steps_one_by_one(device)))
        if one_by_one and not process_group.rank:
            log(f"update of {self.stream}: a backward pass for each step, since this GPU is too small for the window's")
        return settings.with_steps(one_by_one)

    def _stored_copy(self, name: CopyName) -> Path | None:
        """Return the folder of a copy that the previous version has of the component's weights; None without one."""
        previous = self.previous() if name in self.job.policy.copies else None
        return previous and copy_folder(component_folder(previous, self.stream), name)

    def _begin_copies(self) -> None:
        """Continue the version's moving average and its old policy, or begin them with its weights."""
        trained = self.component.trained
        kept: dict[CopyName, bool] = {"ema": self.settings.ema is not None, "old": self._old_decay > 0}
        for name, is_kept in kept.items():
            # One may be left of an update that failed.
            trained.copies.pop(name, None)
            if is_kept:
                trained.keep(name, self._stored_copy(name))

    @property
    def _old_decay(self) -> float:
        return self.settings.old_policy_decay(self.job.version)

    def _save_reference(self, folder: Path) -> None:
        """Refresh the reference when due, and write it next to the weights unless it is the initial one."""
        every, trained = self.settings.reference.refresh_every, self.component.trained
        if every > 0 and self.job.version % every == 0:
            resource(ResidentPolicy).begin_reference_refresh()
            trained.reference_copy().mix(self.settings.reference.mix)
        elif self._stored_copy("reference") is None:
            return
        _save_copy(trained.reference_copy(), folder / "reference")

    def _save_copies(self, folder: Path) -> None:
        copies = self.component.trained.copies
        if "old" in copies:
            copies["old"].mix(1 - self._old_decay)
        names: tuple[CopyName, ...] = ("ema", "old")
        for name in (name for name in names if name in copies):
            _save_copy(copies.pop(name), folder / name)


def _save_copy(copy: WeightCopy, folder: Path) -> None:
    folder.mkdir()
    copy.save(folder)


def carry_out(
    job: UpdateJob, staged: Path, process_group: ProcessGroup, on_progress: Callable[[int, int], None] | None
) -> UpdateOutcome | None:
    """Read, then check parity, train and write the next version's files, one component after the other.

    Each process takes its part of every minibatch. `on_progress` is called with passes done and the total. Only the
    first process returns what was written. Where a function that it calls raises, no version is made.
    """
    reset_peak_memory()
    with current_store().scratch() as fetched:
        stored = {stream: _read_rows(job, stream, fetched) for stream in job.updates}
        for stream, read in stored.items():
            refuse_unequal_sources(job.placement, (stream,), map(len, read.rows.actions.sources or ()))
        resident = resource(ResidentPolicy)
        settings = next(iter(stored.values())).settings
        learner = resident.at(job.policy, job.model, settings, job.placement)
        kept = resident.begin_update(job.policy, job.updates)

        @cache
        def previous() -> Path | None:
            checkpoint = job.policy.checkpoint
            return None if checkpoint is None else current_store().local_files(checkpoint, fetched / "policy")

        keeps = process_group.count == 1 and resident.keeps_optimizers(job.updates)
        optimizers: dict[Stream, PolicyOptimizer] = {}
        steps: dict[Stream, int] = {}
        metrics: dict[str, float] = {}
        for place, (stream, rows) in enumerate(stored.items()):
            report = _share_of_progress(place, len(stored), on_progress)
            component = ComponentUpdate(job, stream, learner.components[stream], previous, kept.get(stream), staged)
            result, optimizer = component.run(rows, process_group, report)
            steps[stream] = optimizer.steps
            if keeps:
                optimizers[stream] = optimizer
            # Else its moments would take the next component's memory.
            del optimizer
            prefix = f"{stream}/" if place else ""
            metrics |= {f"{prefix}{name}": value for name, value in (result.metrics() | rows.metrics()).items()}
    if process_group.rank:
        return None
    synced = hash_staged(current_store(), staged)
    known = {staged / name: sha256 for name, sha256 in synced.items()}
    policy = PolicyRef(version=job.version, digest=weights_digest(staged, known), copies=copy_digests(staged, known))
    _save_state(staged, steps, policy)
    moments = [known[component_folder(staged, stream) / OPTIMIZER_FILE] for stream in job.updates]
    checkpoint_digest = _checkpoint_digest(policy, moments, (staged / STATE_FILE).read_text())
    if keeps:
        resident.keep_optimizers(checkpoint_digest, job.updates, optimizers)
    return UpdateOutcome(
        policy=policy,
        checkpoint_digest=checkpoint_digest,
        synced=synced,
        rows=len({sample_id for each in stored.values() for sample_id in each.rows.sample_ids}),
        metrics=metrics | offload_metrics("update", learner.offload.take_moved()),
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
    """Return the sha256 of what the next update reads: weights, optimizers' files by sha256, training state."""
    weights = " ".join([policy.digest, *(str(policy.copies.get(name)) for name in COPIES)])
    return hashlib.sha256("\n".join([weights, *moments, state]).encode()).hexdigest()
