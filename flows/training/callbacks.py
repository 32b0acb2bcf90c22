"""What follows each iteration: its report, the trackers, policies that nothing needs any more, an early end.

A thread publishes one iteration after the other. The end of an iteration waits for the publication of the one before,
the end of the run for the last, and raises what failed in it. The table of metrics is written last, so a run that was
killed before publishes the iteration when it resumes.
"""

import contextvars
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.context import FlowRunContext
from prefect.exceptions import FlowPauseTimeout
from prefect.flow_runs import apause_flow_run

from configs.rollouts import ImageRolloutSection, RolloutSection
from configs.schema import ReplayConfig, ReplaySection, RunConfig
from flows.pipeline.prefect_ui import artifact_key, artifact_link, folder_link
from flows.pipeline.run import Run
from flows.pipeline.stages import forget_task_runs
from flows.pruning.prune import PolicyKeeper
from flows.tracking import RunTrackers, tracking
from flows.training.history import TrainingHistory, evaluate_now
from flows.training.hooks import call_hook
from grpo_core.policies.denoising.settings import DenoisingSettings
from tasks.metrics import HELDOUT
from tasks.progress import advance_run, log
from tasks.reports.iteration import IterationRecord, iteration_markdown, iteration_table
from tasks.reports.text import duration, reward_origin
from tasks.runs.layout import ROLLOUTS, SIGNS_FILE, STAGES, SamplingRound
from tasks.runs.read_run import read_metrics, write_metrics
from tasks.runs.run_view import EvaluationView, rescoring_of
from tasks.runs.signs import Sign
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.store import ArtifactStore

_SECONDS_BETWEEN_POLLS = 5


class Publisher:
    """Publishes the iterations of one start of a run, on a thread, and knows the id of the last report."""

    def __init__(self, run: Run, thread: ThreadPoolExecutor) -> None:
        self.last_report: UUID | None = None
        self._run, self._thread = run, thread
        self._begun: Future[None] | None = None
        self._progress: UUID | None = None

    def publish(self, history: TrainingHistory, line: str) -> None:
        """Wait for the iteration before, raise what failed in it, and begin to publish the last one of the history."""
        self.finish()
        context = contextvars.copy_context()
        heldout = tuple(history.heldout_rewards.values())
        so_far = (tuple(history.iterations), history.trained_on, tuple(history.signs), heldout)
        self._begun = self._thread.submit(context.run, lambda: self._publish(line, *so_far))

    def finish(self) -> None:
        """Wait for what was begun; raises as `publish`."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.result()

    def _publish(
        self,
        line: str,
        history: Sequence[IterationRecord],
        trained_on: str | None,
        signs: Sequence[Sign],
        heldout: Sequence[float],
    ) -> None:
        store, iterations, record = self._run.store, self._run.config.run.iterations, history[-1]
        # A run that resumes passes its previous iterations, which have been published.
        if not record.stored or record.iteration == iterations:
            title = f"{store.run}, iteration {record.iteration}"
            report = iteration_markdown(store, store.run, history, trained_on, signs, heldout)
            with self._leaving_out_what_is_refused(title):
                self.last_report = self._show("report", "markdown", title, report)
                self._show("metrics", "table", title, json.dumps(iteration_table(record)))
                self._show_progress(100.0 * record.iteration / iterations, line)
        write_metrics(store, record.iteration, record.metrics)

    @contextmanager
    def _leaving_out_what_is_refused(self, title: str) -> Iterator[None]:
        """Log what the server, or a proxy before it, does not take, such as a report that is too long for it."""
        try:
            yield
        except httpx.HTTPStatusError as error:
            if not error.response.is_client_error:
                raise
            status = f"{error.response.status_code} {error.response.reason_phrase}".strip()
            log(f"{title} is not in Prefect's UI, whose server refused it ({status}); the run folder has everything")

    def _show_progress(self, percent: float, line: str) -> None:
        if self._progress is not None:
            get_client(sync_client=True).update_artifact(self._progress, ArtifactUpdate(data=percent, description=line))
            return
        self._progress = self._show("progress", "progress", line, percent)
        if (reports := artifact_link(artifact_key(f"{self._run.store.run}-report"))) is not None:
            log(f"the report of each iteration in Prefect's UI, newest first: {reports}")
        link = folder_link(self._run.store.path())
        self._show("folder", "markdown", f"{self._run.store.run}: its folder", f"[{link}]({link})")

    def _show(self, name: str, kind: str, description: str, data: str | float) -> UUID:
        context = FlowRunContext.get()
        assert context is not None, "a flow publishes"
        request = ArtifactCreate(
            type=kind,
            key=artifact_key(f"{self._run.store.run}-{name}"),
            description=description,
            data=data,
            flow_run_id=context.flow_run.id if context.flow_run else None,
        )
        # The client that the run has opened.
        return get_client(sync_client=True).create_artifact(request).id


LOGGED_METRICS = (("reward", "reward"), ("held-out", HELDOUT), ("KL", "kl"), ("entropy", "entropy"))


@contextmanager
def open_callbacks(run: Run) -> Iterator["Callbacks"]:
    """Open what follows the iterations of a run; at the end, close its trackers and finish its reports."""
    with tracking(run.config, run.store) as trackers, ThreadPoolExecutor(1, thread_name_prefix="publication") as thread:
        publisher = Publisher(run, thread)
        yield Callbacks(run, publisher, trackers, PolicyKeeper(run.store, run.config, run.lock))
        publisher.finish()


@dataclass(frozen=True)
class Callbacks:
    """What one start of a training or a replay does between its iterations."""

    run: Run
    publisher: Publisher
    trackers: RunTrackers
    keeper: PolicyKeeper

    def on_train_begin(self, history: TrainingHistory) -> None:
        """Log the evaluation before the first iteration."""
        first = self.run.config.first_version
        if (evaluation := history.evaluation_of(first)) is not None:
            self.trackers.log(first, None, evaluation)
            if not isinstance(self.run.config, ReplayConfig) and not read_metrics(self.run.store, first + 1):
                log(format_sampling_time(self.run.config, evaluation))
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
        replay = self.run.config.replay if isinstance(self.run.config, ReplayConfig) else None
        log(format_progress_line(record, iterations, pace, replay))
        before = self.run.config.first_version
        advance_run(record.iteration - before, iterations - before, pace)
        for sign in history.take_signs():
            log(f"{sign}")
        # A run that resumes passes iterations whose metrics are stored as they are.
        if changed or record.iteration == iterations:
            line = format_progress_line(record, iterations, replay=replay)
            self.publisher.publish(history, line)
        # After a resume it gets the previous iterations too, so that its decision is that of an undisturbed run.
        reason = await call_hook(record)
        stops = reason is not None and record.iteration < iterations
        if stops:
            self._stop(history, policy, reason)
        self.trackers.log(record.iteration, record, history.evaluation_of(record.iteration))
        self.keeper.delete_unneeded(policy.version, history.heldout_rewards)
        forget_task_runs()
        return await ends_at_sign(self.run, history, policy) or stops

    def _stop(self, history: TrainingHistory, policy: PolicyRef, reason: str | None) -> None:
        if history.evaluation_of(policy.version) is None:
            # An evaluation looks whether its iteration has been reported.
            self.publisher.finish()
            evaluate_now(self.run, policy, history)
        log(f"stopped after iteration {policy.version}: {reason}")


def format_sampling_time(config: RunConfig, evaluation: EvaluationView) -> str:
    """Format the time that a run's samples take at the pace of its first evaluation, which may load the model too.

    Training samples that need more work than held-out ones, such as more denoising steps, take longer by as much.
    """
    rows = evaluation.stages[ROLLOUTS][0].rows
    heldout = rows * sum(config.is_evaluated(iteration) for iteration in range(1, config.run.iterations + 1))
    trained = config.samples_per_iteration * config.run.iterations
    longer = max(1.0, _work_of(config.rollout) / _work_of(config.evaluation_rollout))
    samples, seconds = trained + heldout, duration(evaluation.seconds)
    taken = duration(evaluation.seconds / rows * (trained * longer + heldout))
    known, previews = f"since {rows:,} took {seconds}, with what was loaded", getattr(config.rollout, "previews", None)
    others = "updates and previews" if previews else "updates"
    return f"{samples:,} samples take at most about {taken} in all, {known}; {others} are not counted"


def _work_of(rollout: RolloutSection) -> float:
    """Return the work of a sample in passes over a pixel; 1 for a text, whose settings are the same when held out."""
    if not isinstance(rollout, ImageRolloutSection) or not isinstance(rollout, DenoisingSettings):
        return 1.0
    return rollout.num_inference_steps * (1 + (rollout.guidance_scale > 1)) * rollout.size.pixels


def format_progress_line(
    record: IterationRecord, iterations: int, pace: float | None = None, replay: ReplaySection | None = None
) -> str:
    """Format an iteration as one line of the log, with the time left at a pace in seconds.

    Iterations of a replay are counted, each with that of the source.
    """
    trained_on = rescoring_of(replay.model_dump()) if replay is not None else None
    parts = [
        f"{title}{reward_origin(name, trained_on)} {record.metrics[name]:.3f}"
        for title, name in LOGGED_METRICS
        if name in record.metrics
    ]
    parts += [f"{sum(record.seconds.values()):.1f} s"] if record.seconds else []
    if record.stored:
        parts.append("by an earlier start")
    if record.reused:
        stages = "" if len(record.reused) == len(STAGES) else f"{', '.join(record.reused)} "
        parts.append(f"{stages}reused from run {', '.join(dict.fromkeys(record.reused.values()))}")
    left = iterations - record.iteration
    parts += [f"about {duration(pace * left)} left"] if pace is not None and left else []
    title = f"iteration {record.iteration}/{iterations}"
    if replay is not None:
        done = record.iteration - replay.policy
        title = f"policy {record.iteration} from iteration {replay.iterations[done - 1]} of {replay.source}"
        title += f" ({done}/{len(replay.iterations)})"
    return f"{title}: {', '.join(parts)}"


class NotResumedError(RuntimeError):
    """Nobody resumed a paused run within its timeout."""


async def ends_at_sign(run: Run, history: TrainingHistory, policy: PolicyRef) -> bool:
    """Store which guardrails have fallen at this version, and return whether `guardrails.on_fall` ends the run here.

    A run pauses when a guardrail has newly fallen. Resuming it accepts the sign, which is stored, so that a later start
    does not pause there again; NotResumedError if nobody does within `guardrails.pause_timeout`.
    """
    guardrails, version = run.config.guardrails, policy.version
    if not guardrails.rewards or history.evaluation_of(version) is None:
        return False
    is_last, resumed = version == run.config.run.iterations, _read_resumed(run.store)
    stops = bool(history.fallen) and guardrails.on_fall == "stop" and not is_last
    _write_signs(run.store, history, version, resumed, stops)
    if stops:
        log(f"stopped after iteration {version}, because guardrails.on_fall is stop")
    ask = guardrails.on_fall == "pause" and bool(history.new_fallen) and not is_last
    if ask and policy.digest not in resumed:
        await _wait_for_a_person(policy, guardrails.pause_timeout)
        _write_signs(run.store, history, version, [*resumed, policy.digest], stops)
    return stops


async def _wait_for_a_person(policy: PolicyRef, timeout: int) -> None:
    log(f"paused after iteration {policy.version}, for {timeout:,} s at most: resume it on its page in the UI")
    try:
        # With the key of a pause that was resumed before, a flow run that is retried continues at once.
        await apause_flow_run(timeout=timeout, poll_interval=_SECONDS_BETWEEN_POLLS, key=policy.digest[:16])
    except FlowPauseTimeout as error:
        raise NotResumedError(
            f"nobody resumed the run within {timeout:,} s (guardrails.pause_timeout); the same command asks again, and "
            "with --set guardrails.on_fall=report it continues"
        ) from error
    log(f"resumed after iteration {policy.version}")


def _read_resumed(store: ArtifactStore) -> list[str]:
    try:
        content = json.loads(store.read_file(SIGNS_FILE) or b"{}")
        return [str(digest) for digest in content.get("resumed", [])]
    except (ValueError, AttributeError, TypeError):
        # It is damaged, and the person is asked again.
        return []


def _write_signs(
    store: ArtifactStore, history: TrainingHistory, version: int, resumed: Sequence[str], stops: bool
) -> None:
    """Store the guardrails that have fallen at a version, or that there are none, for reports and later starts."""
    content = {
        "version": version,
        "signs": [str(sign) for sign in history.fallen],
        "stopped": stops,
        "resumed": list(resumed),
    }
    store.write_file(SIGNS_FILE, json.dumps(content, indent=1).encode())
