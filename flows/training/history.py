"""The history of a training flow: its evaluations, and the report of each iteration.

The evaluations watch for reward hacking: a guardrail that falls while the reward rises.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from uuid import UUID

from prefect.artifacts import (
    acreate_link_artifact,
    acreate_markdown_artifact,
    acreate_progress_artifact,
    acreate_table_artifact,
    aupdate_progress_artifact,
)

from configs.schema import RunConfig
from flows.evaluation.evaluate import evaluate_baselines, evaluate_policy
from flows.pipeline.events import emit_evaluated, emit_hacking_sign
from flows.pipeline.flow_run_page import artifact_key, folder_link
from flows.pipeline.run import Run, plan_heldout
from grpo_core.rewards.hacking import HackingSign, hacking_signs
from tasks.progress import log
from tasks.prompts.curriculum import PromptStatistics, read_statistics
from tasks.reports.iteration import IterationRecord, iteration_markdown, iteration_table
from tasks.runs.layout import WATCH_PLOT, Baseline
from tasks.runs.metrics_table import gather_metrics, has_metrics, write_metrics
from tasks.runs.records import SamplingRound
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.store import ArtifactStore

LOGGED_METRICS = (("reward", "reward"), ("held-out", "heldout_reward"), ("KL", "kl"), ("entropy", "entropy"))

Guardrails = Mapping[int, Mapping[str, ArtifactRef]]
"""Scores of the held-out samples, by policy version and label."""


@dataclass
class TrainingHistory:
    """The finished iterations and evaluations of a training flow.

    Attributes:
        iterations: one record per finished iteration.
        sampled: advantages of the sampled iterations, which may be ahead of the finished ones.
        heldout: held-out advantages by policy version.
        baselines: advantages of the images that no policy made.
        guardrails: scores of the held-out samples by policy version and guardrail.
        signs: guardrails that had fallen at the last evaluation while the reward rose.
        new_signs: those that had not fallen at the evaluation before.
        progress: the artifact in Prefect's UI that shows how far the run is; None before this start's first report.
    """

    iterations: list[IterationRecord] = field(default_factory=list)
    sampled: list[ArtifactRef] = field(default_factory=list)
    heldout: dict[int, ArtifactRef] = field(default_factory=dict)
    baselines: Mapping[Baseline, ArtifactRef] = field(default_factory=dict)
    guardrails: dict[int, Mapping[str, ArtifactRef]] = field(default_factory=dict)
    signs: list[HackingSign] = field(default_factory=list)
    new_signs: list[HackingSign] = field(default_factory=list)
    progress: UUID | None = None

    @property
    def last_advantages(self) -> ArtifactRef | None:
        """Advantages of the iteration that was sampled last; None before the first."""
        return self.sampled[-1] if self.sampled else None

    def stopped_by(self, config: RunConfig, version: int) -> bool:
        """Whether the watch ends the run at this policy version, before its last iteration."""
        return bool(self.signs) and config.watch.on_sign == "stop" and version < config.run.iterations

    def statistics(self, run: Run) -> PromptStatistics | None:
        """Rewards of the prompts within the curriculum's window; None when the curriculum is uniform."""
        curriculum = run.config.data.curriculum
        if curriculum.kind == "uniform":
            return None
        return read_statistics(run.store, self.sampled[-curriculum.window :])


def is_evaluated(config: RunConfig, iteration: int) -> bool:
    """Whether the policy that this iteration makes is evaluated."""
    every = config.evaluate.every
    return iteration == config.run.iterations or (every > 0 and iteration % every == 0)


def evaluate(run: Run, policy: PolicyRef, history: TrainingHistory) -> None:
    """Evaluate a policy on the held-out prompts, if there are any, and look for guardrails that have fallen."""
    plan = plan_heldout(run.config, run.heldout, policy.version)
    if plan is None:
        return
    # A run that resumes passes its previous evaluations, whose events were sent.
    is_new = not has_metrics(run.store, max(policy.version, 1))
    if policy.version == 0:
        history.baselines = evaluate_baselines(run, plan)
    done, section = evaluate_policy(run, policy, plan), run.config.watch
    history.heldout[policy.version], history.guardrails[policy.version] = done.advantages, done.guardrails
    if is_new:
        emit_evaluated(run.config.run.name, policy, done)
    if section.guardrails:
        known = {sign.guardrail for sign in history.signs}
        history.signs = list(hacking_signs(*held_out_series(history.heldout, history.guardrails), section))
        history.new_signs = [sign for sign in history.signs if sign.guardrail not in known]
        for sign in history.new_signs if is_new else ():
            emit_hacking_sign(run.config.run.name, policy, sign)


def held_out_series(
    heldout: Mapping[int, ArtifactRef], guardrails: Guardrails
) -> tuple[list[int], list[float | None], dict[str, list[float | None]]]:
    """Return the evaluated versions, the mean reward of each, and the mean of each guardrail by label."""
    versions = sorted(version for version in heldout if guardrails.get(version))
    labels = list(guardrails[versions[0]]) if versions else []
    rewards = [heldout[version].metrics.get("reward") for version in versions]
    levels = {
        label: [guardrails[version][label].metrics.get(f"rewards/{label}/mean") for version in versions]
        for label in labels
    }
    return versions, rewards, levels


def write_watch_plot(store: ArtifactStore, heldout: Mapping[int, ArtifactRef], guardrails: Guardrails) -> str:
    """Plot the held-out reward above the guardrails and return the path of the image."""
    # The plotting library takes a second to import, which a run without guardrails does not need.
    from tasks.reports.reward_plots import plot_watch

    store.write_file(WATCH_PLOT, plot_watch(*held_out_series(heldout, guardrails)))
    return store.path(WATCH_PLOT)


async def report_iteration(
    run: Run,
    history: TrainingHistory,
    policy: PolicyRef,
    rounds: tuple[SamplingRound, ...],
    advantages: ArtifactRef,
    *,
    replayed: bool = False,
) -> None:
    """Gather the metrics of an iteration, log one line, show them once in Prefect's UI, and store them.

    Rounds that were `replayed` are those of another run, which counts their metrics.
    """
    assert policy.checkpoint is not None
    iteration, iterations = policy.version, run.config.run.iterations
    heldout, guardrails = history.heldout.get(iteration), history.guardrails.get(iteration)
    previous = history.iterations[-1].metrics if history.iterations else None
    metrics = gather_metrics(() if replayed else rounds, advantages, policy.checkpoint, heldout, guardrails, previous)
    record = IterationRecord(
        iteration=iteration,
        rounds=rounds,
        advantages=advantages,
        metrics=metrics,
        heldout=heldout.metrics.get("reward") if heldout else None,
    )
    history.iterations.append(record)
    log(format_progress_line(record, iterations))
    # A run that resumes passes its previous iterations, which have been reported.
    if not has_metrics(run.store, iteration) or iteration == iterations:
        await publish(run, history)
    write_metrics(run.store, iteration, metrics)


def format_progress_line(record: IterationRecord, iterations: int) -> str:
    """Format an iteration as one line of the log."""
    parts = [f"{title} {record.metrics[name]:.3f}" for title, name in LOGGED_METRICS if name in record.metrics]
    return f"iteration {record.iteration}/{iterations}: {', '.join(parts)}, {record.metrics['step_time']:.1f} s"


async def publish(run: Run, history: TrainingHistory) -> None:
    """Show the last iteration's report and table in Prefect's UI, and how far the run is."""
    name, record = run.config.run.name, history.iterations[-1]
    title = f"{name}, iteration {record.iteration}"
    markdown = iteration_markdown(run.store, name, history.iterations)
    await acreate_markdown_artifact(markdown, key=artifact_key(f"{name}-report"), description=title)
    await acreate_table_artifact(iteration_table(record), key=artifact_key(f"{name}-metrics"), description=title)
    await _publish_progress(run, history, record)


async def _publish_progress(run: Run, history: TrainingHistory, record: IterationRecord) -> None:
    name, iterations = run.config.run.name, run.config.run.iterations
    percent, line = 100.0 * record.iteration / iterations, format_progress_line(record, iterations)
    if history.progress is not None:
        await aupdate_progress_artifact(history.progress, percent, description=line)
        return
    history.progress = await acreate_progress_artifact(percent, key=artifact_key(f"{name}-progress"), description=line)
    link = folder_link(run.store.path())
    key, title = artifact_key(f"{name}-folder"), f"{name}: its folder"
    await acreate_link_artifact(link, link_text=link, key=key, description=title)
