"""What follows each iteration: its report, the trackers, policies that nothing needs any more, an early end."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from flows.pipeline.run import Run
from flows.pruning.keep import PolicyKeeper
from flows.tracking.log import RunTrackers, tracking
from flows.training.history import TrainingHistory, evaluate
from flows.training.hooks import call_hook
from flows.training.publication import Publisher, publishing
from flows.training.signs import ends_at_sign
from tasks.metrics.names import HELDOUT
from tasks.progress import advance_run, log
from tasks.reports.iteration import IterationRecord
from tasks.reports.text import duration
from tasks.runs.layout import STAGES
from tasks.runs.records import SamplingRound
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef

LOGGED_METRICS = (("reward", "reward"), ("held-out", HELDOUT), ("KL", "kl"), ("entropy", "entropy"))


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
        if (evaluation := history.evaluation_of(0)) is not None:
            self.trackers.log(0, None, evaluation)
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
        """Add an iteration to the history, log one line, begin to publish it, and do what follows it.

        Rounds that were `replayed` are those of another run.

        Returns:
            Whether the run ends here, as the hook of `on_iteration` or `guardrails.on_fall` says.
        """
        update = policy.checkpoint
        assert update is not None
        history.reach(policy)
        record, changed = history.add_iteration(
            self.run.store, policy.version, rounds, advantages, update, replayed=replayed
        )
        iterations, pace = self.run.config.run.iterations, history.pace
        advance_run(record.iteration, iterations, pace)
        log(format_progress_line(record, iterations, pace))
        # A run that resumes passes iterations whose metrics are stored as they are.
        if changed or record.iteration == iterations:
            self.publisher.publish(history.iterations, format_progress_line(record, iterations))
        # After a resume it gets the previous iterations too, so that its decision is that of an undisturbed run.
        reason = await call_hook(record)
        stops = reason is not None and record.iteration < iterations
        if stops:
            self._stop(history, policy, reason)
        self.trackers.log(record.iteration, record, history.evaluation_of(record.iteration))
        self.keeper.delete_unneeded(policy.version, history.heldout_rewards)
        return await ends_at_sign(self.run, history, policy) or stops

    def _stop(self, history: TrainingHistory, policy: PolicyRef, reason: str | None) -> None:
        """Evaluate the policy after which the hook ends the run, and log why."""
        if history.evaluation_of(policy.version) is None:
            # An evaluation looks whether its iteration has been reported.
            self.publisher.finish()
            evaluate(self.run, policy, history)
        log(f"stopped after iteration {policy.version}: {reason}")


def format_progress_line(record: IterationRecord, iterations: int, pace: float | None = None) -> str:
    """Format an iteration as one line of the log.

    Args:
        pace: seconds per iteration, for the time that is left; None if it is not known.
    """
    parts = [f"{title} {record.metrics[name]:.3f}" for title, name in LOGGED_METRICS if name in record.metrics]
    parts += [f"{sum(record.seconds.values()):.1f} s"] if record.seconds else []
    if record.reused:
        stages = "" if len(record.reused) == len(STAGES) else f"{', '.join(record.reused)} "
        parts.append(f"{stages}reused from run {', '.join(dict.fromkeys(record.reused.values()))}")
    left = iterations - record.iteration
    parts += [f"about {duration(pace * left)} left"] if pace is not None and left else []
    return f"iteration {record.iteration}/{iterations}: {', '.join(parts)}"
