"""The update of one component of a policy: from the previous version's files to those of the next one."""

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from grpo_core.optimizer import PolicyOptimizer
from grpo_core.policies.protocol import PolicyComponent
from grpo_core.policies.trained import CopyName
from grpo_core.policies.trained.model import WeightCopy
from grpo_core.seeds import derive_seed
from grpo_core.streams import Stream
from grpo_core.update import ProcessGroup, UpdateResult
from tasks.execution.resources import resource
from tasks.models.files import component_folder, copy_folder
from tasks.models.resident import ResidentPolicy
from tasks.runs.layout import OPTIMIZER_FILE, STATE_FILE
from tasks.storage.tables.parquet import write_table
from tasks.update.algorithms import ALGORITHMS, Algorithm, Training
from tasks.update.job import UpdateJob
from tasks.update.rows import StoredRows


class ComponentUpdate:
    """The update of one component, from the previous version's files to those of the next one."""

    def __init__(
        self,
        job: UpdateJob,
        stream: Stream,
        component: PolicyComponent,
        previous: Callable[[], Path | None],
        kept: PolicyOptimizer | None,
        staged: Path,
    ) -> None:
        """Combine the parts.

        Args:
            previous: returns the local folder of the previous version's checkpoint, verified; None without one.
            kept: the component's optimizer as the previous update left it; None if its state has to be read.
            staged: folder of the next version.
        """
        self.job, self.stream, self.component, self.previous = job, stream, component, previous
        self.settings = job.updates[stream]
        self.kept, self.staged = kept, staged

    def run(
        self, stored: StoredRows, process_group: ProcessGroup, on_progress: Callable[[int, int], None] | None
    ) -> tuple[UpdateResult, PolicyOptimizer]:
        """Train, write the component's files, and return what was measured and the optimizer."""
        job, trained = self.job, self.component.trained
        self._begin_copies()
        process_group.distribute(trained)
        optimizer = self._optimizer(process_group)
        algorithm = ALGORITHMS[self.settings.algorithm]
        result = algorithm.update(
            Training(
                stream=self.stream,
                component=self.component,
                optimizer=optimizer,
                rows=stored.rows,
                settings=self.settings,
                seed=derive_seed(job.seed, job.version, "minibatches"),
                in_fp32=job.model.section.in_fp32,
                process_group=process_group,
                on_progress=on_progress,
            )
        )
        optimizer.zero_grad()  # frees the gradients' memory for the next rollouts
        moments = process_group.state(optimizer)
        process_group.collect(trained)
        if not process_group.rank:
            folder = self._own(self.staged)
            folder.mkdir(parents=True, exist_ok=True)
            self._save_reference(folder)
            self._save_copies(folder)
            self.component.save_weights(folder)
            save_file(moments, folder / OPTIMIZER_FILE)
            _write_steps(folder, optimizer.steps, result, algorithm)
        return result, optimizer

    def _own(self, policy: Path) -> Path:
        """Return the component's folder in that of a policy."""
        return component_folder(policy, self.stream)

    def _optimizer(self, process_group: ProcessGroup) -> PolicyOptimizer:
        parameters = self.component.trainable_parameters()
        if self.kept is not None:
            assert all(self.kept.parameters[name] is each for name, each in parameters.items()), "weights stay in place"
            return self.kept
        # A run that starts from the weights of another begins with its own schedule and without moments.
        previous = None if self.job.policy.version == 0 else self.previous()
        if previous is None:
            return PolicyOptimizer(parameters, self.settings)
        state = json.loads((previous / STATE_FILE).read_text())
        optimizer = PolicyOptimizer(parameters, self.settings, steps=int(state["optimizer_steps"][self.stream]))
        process_group.load_state(optimizer, load_file(previous / self.stream / OPTIMIZER_FILE))
        return optimizer

    def _stored_copy(self, name: CopyName) -> Path | None:
        """Return the folder of a copy that the previous version has of the component's weights; None without one."""
        previous = self.previous() if name in self.job.policy.copies else None
        return previous and copy_folder(self._own(previous), name)

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
        """Write the moving average and the old policy next to the weights, and free their memory."""
        copies = self.component.trained.copies
        if "old" in copies:
            copies["old"].mix(1 - self._old_decay)
        names: tuple[CopyName, ...] = ("ema", "old")
        for name in (name for name in names if name in copies):
            _save_copy(copies.pop(name), folder / name)


def _save_copy(copy: WeightCopy, folder: Path) -> None:
    folder.mkdir()
    copy.save(folder)


def _write_steps(folder: Path, steps: int, result: UpdateResult, algorithm: Algorithm) -> None:
    columns: dict[str, list[Any]] = {"optimizer_step": list(range(steps - len(result.steps) + 1, steps + 1))}
    columns |= {field.name: [getattr(step, field.name) for step in result.steps] for field in fields(algorithm.metrics)}
    write_table(folder / "update_steps.parquet", algorithm.steps_schema, columns)
