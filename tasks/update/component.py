"""The update of one component of a policy: from the previous version's files to those of the next one."""

import json
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file, save_file

from grpo_core.optimizer import PolicyOptimizer
from grpo_core.policies.protocol import PolicyComponent
from grpo_core.seeds import derive_seed
from grpo_core.streams import Stream
from grpo_core.update import ProcessGroup, UpdateResult
from tasks.execution.resources import resource
from tasks.models.files import EMA_FOLDER, OLD_FOLDER, REFERENCE_FOLDER, stored_reference
from tasks.models.resident import ResidentPolicy
from tasks.runs.layout import OPTIMIZER_FILE, STATE_FILE
from tasks.storage.tables.parquet import write_table
from tasks.update.algorithms import ALGORITHMS, Algorithm, Training
from tasks.update.rows import StoredRows

if TYPE_CHECKING:
    from tasks.update.job import UpdateJob


class ComponentUpdate:
    """The update of one component, from the previous version's files to those of the next one."""

    def __init__(
        self,
        job: "UpdateJob",
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
            self._keep_reference()
            self._keep_copies()
            folder = self._made(self.staged)
            self.component.save_weights(folder)
            save_file(moments, folder / OPTIMIZER_FILE)
            _write_steps(folder, optimizer.steps, result, algorithm)
        return result, optimizer

    def _made(self, policy: Path) -> Path:
        """Make the component's folder in that of a policy, and return it."""
        folder = policy / self.stream
        folder.mkdir(parents=True, exist_ok=True)
        return folder

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

    def _keep_reference(self) -> None:
        """Refresh the reference when due, and write it next to the weights unless it is the initial one."""
        every, trained, version = self.settings.reference.refresh_every, self.component.trained, self.job.policy
        if every > 0 and self.job.version % every == 0:
            resource(ResidentPolicy).begin_reference_refresh()
            trained.refresh_reference(self.settings.reference.mix)
        else:
            previous = None if version.reference_digest is None else self.previous()
            if stored_reference(previous, version, self.stream) is None:
                return
        trained.save_reference(self._made(self.staged / REFERENCE_FOLDER))

    def _begin_copies(self) -> None:
        """Continue the version's moving average and its old policy, or begin them with its weights."""
        policy, trained = self.job.policy, self.component.trained
        if self.settings.ema is not None:
            trained.begin_average(self._copy(EMA_FOLDER, policy.ema_digest))
        if self._old_decay:
            trained.keep_old(self._copy(OLD_FOLDER, policy.old_digest))
        else:
            # That of an update which failed.
            trained.drop_old()

    def _copy(self, name: str, digest: str | None) -> Path | None:
        """Return the component's folder of a copy that the previous version has; None where it has none."""
        previous = None if digest is None else self.previous()
        return None if previous is None else previous / name / self.stream

    @property
    def _old_decay(self) -> float:
        return self.settings.old_policy_decay(self.job.version)

    def _keep_copies(self) -> None:
        """Write the moving average and the old policy next to the weights, if one is kept of any component.

        Their folders are policies of their own, so a component without such a copy has its weights there too.
        """
        updates, trained = self.job.updates.values(), self.component.trained
        if any(update.ema is not None for update in updates):
            write = self.component.save_weights if self.settings.ema is None else trained.end_average
            write(self._made(self.staged / EMA_FOLDER))
        if any(update.old_policy_decay(self.job.version) for update in updates):
            mix = 1 - self._old_decay
            write = self.component.save_weights if mix == 1 else partial(trained.end_old, mix=mix)
            write(self._made(self.staged / OLD_FOLDER))


def _write_steps(folder: Path, steps: int, result: UpdateResult, algorithm: Algorithm) -> None:
    columns: dict[str, list[Any]] = {"optimizer_step": list(range(steps - len(result.steps) + 1, steps + 1))}
    columns |= {field.name: [getattr(step, field.name) for step in result.steps] for field in fields(algorithm.metrics)}
    write_table(folder / "update_steps.parquet", algorithm.steps_schema, columns)
