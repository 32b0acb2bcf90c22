"""The replay flow: train a policy from another run's stored rollouts; no training rollouts are sampled."""

import time
from collections.abc import Mapping

from prefect import flow

from configs.schema import corrected
from configs.training import AnyUpdateSection, MismatchSection
from flows.pipeline.forms import ReplayForm
from flows.pipeline.run import Run, open_run
from flows.pipeline.stages import compute_advantages, named, recording, update_policy
from flows.replaying.plan import ReplayPlan, plan_replay
from flows.training.callbacks import open_callbacks
from flows.training.history import TrainingHistory, evaluate
from flows.training.summary import TrainSummary, publish_summary, summarize
from grpo_core.errors import InputError
from grpo_core.streams import Stream
from tasks.advantages.compute_advantages import copy_advantages_task
from tasks.progress import log
from tasks.runs.layout import RECOMPUTED, iteration_folder
from tasks.runs.records import StoredIteration
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef


class ReplaySummary(TrainSummary):
    """The results of a replay.

    Attributes:
        source_iterations: iterations of the source, one for each update.
        advantages: `stored`, `recomputed`, or the name of a rescoring.
        max_staleness: maximum versions between a row's policy and the policy that was trained.
        staleness: the largest of any row that was trained on.
        rows_left_out: rows of all updates beyond max_staleness.
    """

    source: str
    source_iterations: list[int]
    advantages: str
    max_staleness: int
    staleness: int
    rows_left_out: int


@flow(name="grpo replay", flow_run_name="{request.run_name}")
async def replay(request: ReplayForm) -> ReplaySummary:
    """Train a policy from another run's stored rollouts, one update per iteration, in their order."""
    started = time.perf_counter()
    plan = plan_replay(request)
    with open_run(plan.config) as run:
        history, policy = TrainingHistory.of(run), plan.start or run.base_policy
        log(introduction(plan))
        async with recording(run.store, run.lock):
            with open_callbacks(run) as callbacks:
                evaluate(run, policy, history)
                callbacks.on_train_begin(history)
                for stored in plan.iterations:
                    updates = corrected_updates(run, plan, policy, stored)
                    advantages = reuse_advantages(run, plan, stored, policy.version + 1, history)
                    rollouts = tuple(each.rollouts for each in stored.rounds)
                    title, staleness = f"iteration {policy.version + 1}", plan.config.replay.max_staleness
                    policy = update_policy(run, policy, rollouts, advantages, updates, staleness, title)
                    if run.config.is_evaluated(policy.version):
                        evaluate(run, policy, history)
                    if await callbacks.on_iteration_end(history, policy, stored.rounds, advantages, replayed=True):
                        break
        summary = summarize(run, history, time.perf_counter() - started)
        await publish_summary(run, summary)
    section, metrics = plan.config.replay, [record.metrics for record in history.iterations]
    return ReplaySummary(
        **summary.model_dump(),
        source=section.source,
        source_iterations=list(section.iterations),
        advantages=section.advantages,
        max_staleness=section.max_staleness,
        staleness=int(max(each.get("staleness/max", 0.0) for each in metrics)),
        rows_left_out=int(sum(each.get("rows_left_out", 0.0) for each in metrics)),
    )


def introduction(plan: ReplayPlan) -> str:
    """Describe in one line what is replayed, and how rows of other weights are treated."""
    config, section = plan.config, plan.config.replay
    first, last = section.iterations[0], section.iterations[-1]
    weights = {
        stream: _weight(update.importance_weights(section.correction)) for stream, update in config.updates.items()
    }
    weight = " and ".join(f"{each} ({stream})" if len(weights) > 1 else each for stream, each in weights.items())
    return (
        f"replay of {section.source}, iterations {first} to {last}, {section.advantages} advantages, onto version "
        f"{section.policy}; rows of other weights count {weight}, and not at all beyond {section.max_staleness} "
        "versions"
    )


def _weight(mismatch: MismatchSection | None) -> str:
    if mismatch is None:
        return "fully"
    done = {"truncate": "truncated at", "mask": "left out beyond"}[mismatch.mode]
    return f"by exp(old - rollout) per {mismatch.level}, {done} {mismatch.cap:g}"


def reuse_advantages(
    run: Run, plan: ReplayPlan, stored: StoredIteration, iteration: int, history: TrainingHistory
) -> ArtifactRef:
    """Copy the stored advantages, or compute them from the stored rewards, and add them to the history."""
    folder, title = iteration_folder(iteration), f"iteration {iteration}"
    if plan.config.replay.advantages != RECOMPUTED:
        advantages = named(copy_advantages_task, title, plan.config.placement)(stored.advantages, folder)
    else:
        previous = history.last_advantages or plan.previous_advantages
        advantages = compute_advantages(run, stored.rounds, folder, title, previous)
    history.sampled.append(advantages)
    return advantages


def corrected_updates(
    run: Run, plan: ReplayPlan, policy: PolicyRef, stored: StoredIteration
) -> Mapping[Stream, AnyUpdateSection]:
    """Return the updates' settings, with importance weights if other weights sampled rows of the iteration.

    Raises:
        InputError: other weights sampled rows, and the replay allows no staleness.
    """
    if all(digest == policy.sampler.digest for _, digest in stored.samplers):
        return run.updates
    if plan.config.replay.max_staleness == 0:
        hint = (
            f"No row is left: iteration {stored.number} was sampled by other weights than version {policy.version} "
            "has here, though its number may be the same. Allow at least 1."
        )
        raise InputError("--max-staleness", 0, hint)
    return corrected(run.updates, plan.config.replay.correction)
