"""What follows each iteration: its report, the trackers, policies that nothing needs any more, an early end."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from flows.pipeline.run import Run
from flows.pruning.keep import PolicyKeeper
from flows.tracking.log import RunTrackers, tracking
from flows.training.history import TrainingHistory, evaluate, report_iteration
from flows.training.publication import Publisher, publishing
from flows.training.signs import ends_at_sign
from tasks.progress import log
from tasks.runs.records import SamplingRound
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef


@contextmanager
def open_callbacks(run: Run) -> Iterator["Callbacks"]:
    """Open what follows the iterations of a run; at the end, close its trackers and finish its reports."""
    with tracking(run.config, run.store) as trackers, publishing(run) as publisher:
        yield Callbacks(run, publisher, trackers, PolicyKeeper(run))


@dataclass(frozen=True)
class Callbacks:
    """What one start of a training or a replay does between its iterations."""

    run: Run
    publisher: Publisher
    trackers: RunTrackers
    keeper: PolicyKeeper

    def on_train_begin(self, history: TrainingHistory) -> None:
        """Log the evaluation before the first iteration."""
        if 0 in history.heldout:
            self.trackers.log(0, None, history.heldout[0], history.guardrails.get(0, {}))
        history.lap()

    async def on_iteration_end(
        self,
        history: TrainingHistory,
        policy: PolicyRef,
        rounds: tuple[SamplingRound, ...],
        advantages: ArtifactRef,
        *,
        replayed: bool = False,
    ) -> bool:
        """Report an iteration, whose rounds are another run's if they were `replayed`.

        Returns:
            Whether the run ends here, as the hook of `on_iteration` or `watch.on_sign` says.
        """
        await report_iteration(self.run, history, self.publisher, policy, rounds, advantages, replayed=replayed)
        stops = self._stopped_by_hook(history, policy)
        heldout, guardrails = history.heldout.get(policy.version), history.guardrails.get(policy.version, {})
        self.trackers.log(policy.version, history.iterations[-1], heldout, guardrails)
        self.keeper.delete_unneeded(policy.version, history.heldout)
        return await ends_at_sign(self.run, history, policy) or stops

    def _stopped_by_hook(self, history: TrainingHistory, policy: PolicyRef) -> bool:
        """Whether the hook ends the run before its last iteration, which is logged; its policy is evaluated."""
        if history.stop_reason is None or policy.version == self.run.config.run.iterations:
            return False
        if policy.version not in history.heldout:
            # An evaluation looks whether its iteration has been reported.
            self.publisher.finish()
            evaluate(self.run, policy, history)
        log(f"stopped after iteration {policy.version}: {history.stop_reason}")
        return True
