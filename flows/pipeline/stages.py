"""How flows call the four stages: each is one Prefect task, with a record in the run's folder; events for automations.

The resource of both is `grpo.run.NAME`; Prefect adds the flow run, its deployment and its tags as related resources. An
event is sent once, when its policy version is evaluated; a run that was killed at that moment sends it again.

policy, plan      --collect_rollouts-->    rollouts
rollouts          --score_rewards-->       one table per reward
rollouts, scores  --compute_advantages-->  advantages
all of these      --update_policy-->       the next policy
"""

import inspect
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import asdict, replace
from typing import Any, ParamSpec, TypeVar
from uuid import UUID

from prefect import Task
from prefect.context import FlowRunContext, SyncClientContext
from prefect.events import emit_event
from prefect.futures import PrefectFuture, wait

from configs.placement import PlacementSection
from configs.rollouts import ImageRolloutSection, RolloutSection
from configs.scoring import RewardSection
from configs.training import AnyUpdateSection
from flows.pipeline.prefect_ui import shown_in_ui
from flows.pipeline.run import Run
from flows.server.temporary import require_not_lost
from grpo_core.rollouts.streams import Stream
from tasks.advantages.compute_advantages import compute_advantages_task
from tasks.execution.caching import with_quoted_arguments, with_retries
from tasks.execution.resources import resource, run_resources
from tasks.execution.stage import clear_shards
from tasks.execution.stopping import Cancellable, StopSignals, stages_cancelled_on_interrupt, stopping_after_stage
from tasks.progress import listen, listener
from tasks.rewards.score_rewards import failed_scores, score_reward_task
from tasks.rollouts.collect_rollouts import collect_rollouts_task, draw_baseline_task
from tasks.rollouts.plan import RolloutPlan
from tasks.rollouts.previews import keep_seeds
from tasks.runs.hacking import HackingSign
from tasks.runs.layout import (
    BASELINES,
    GUARDRAILS,
    REWARDS,
    Baseline,
    SamplingRound,
    StoredEvaluation,
    baseline_folder,
)
from tasks.runs.sources import store_sources
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.store import ArtifactStore, StageContext, current_store, stage_context, use_stage_context
from tasks.storage.prefect_results import registered_records
from tasks.storage.run_lock import RunLock
from tasks.update.update_policy import update_policy_task

EVALUATED, HACKING_SIGN = "grpo.evaluated", "grpo.hacking-sign"


def emit_evaluated(run: str, policy: PolicyRef, done: StoredEvaluation) -> None:
    """Report the means of an evaluation: held-out reward, rewards, guardrails; null where no sample has a score."""
    figures = {
        "heldout_reward": done.advantages.metrics.get("reward"),
        "rewards": {label: scores.metrics.get(f"rewards/{label}/mean") for label, scores in done.rewards.items()},
        "guardrails": {label: scores.metrics.get(f"rewards/{label}/mean") for label, scores in done.guardrails.items()},
        "samples": done.rollouts.rows,
    }
    _emit(EVALUATED, run, policy, figures)


def emit_hacking_sign(run: str, policy: PolicyRef, sign: HackingSign) -> None:
    """Report a guardrail that has fallen while the reward rose: its levels, and the sign in words."""
    _emit(HACKING_SIGN, run, policy, {**asdict(sign), "message": str(sign)})


def _emit(event: str, run: str, policy: PolicyRef, figures: Mapping[str, Any]) -> None:
    resource = {"prefect.resource.id": f"grpo.run.{run}", "prefect.resource.name": run}
    described = {"run": run, "policy": policy.version, "policy_digest": policy.digest}
    emit_event(event, resource=resource, payload={**described, **figures})


P = ParamSpec("P")
R = TypeVar("R", ArtifactRef, PolicyRef)

StageCaller = Callable[[Task[..., Any], str, Mapping[str, Any]], Any]
"""Returns the reference of a stage, given its task, the task run's name and its arguments by name."""

_CALLER: ContextVar[StageCaller | None] = ContextVar("stage_caller", default=None)


@contextmanager
def calling_stages(caller: StageCaller) -> Iterator[None]:
    """Let a function answer the calls of stages in this block, in place of their Prefect tasks."""
    token = _CALLER.set(caller)
    try:
        yield
    finally:
        _CALLER.reset(token)


def collect_rollouts(run: Run, policy: PolicyRef, plan: RolloutPlan, rollout: RolloutSection) -> ArtifactRef:
    """Sample every group of a plan with a policy, by these settings: stage 1."""
    config, stage = run.config, as_task(collect_rollouts_task, plan.title, run.config.placement)
    store_sources(run.store, plan.named_sources, run.source_references, run.stored_sources)
    with_reference = config.advantages.kl_coef > 0
    rollouts = stage(policy, plan, run.model, rollout, with_reference, config.placement)
    if config.placement.shards_of(config.placement.rollouts) > 1:
        clear_shards(run.store, plan.folder)
    return rollouts


def score_rewards(
    run: Run, rollouts: ArtifactRef, plan: RolloutPlan, rewards: Sequence[RewardSection], place: str
) -> Mapping[str, ArtifactRef]:
    """Score rollouts with every reward: stage 2. Returns one table per reward, by its label, in a place of the plan."""
    folder, config = f"{plan.folder}/{place}", run.config
    if config.placement.rewards.pool is None:
        rewards = [each if each.pool else each.with_device(run.model.reward_device) for each in rewards]
    return score_concurrently(rollouts, rewards, folder, plan.title, config.placement, folders=run.target_folders)


def compute_advantages(
    run: Run,
    rounds: tuple[SamplingRound, ...],
    folder: str,
    title: str,
    earlier: ArtifactRef | None = None,
    mix: tuple[RewardSection, ...] | None = None,
) -> ArtifactRef:
    """Mix the rewards of all sampling rounds and compute advantages, continuing the `earlier` statistics: stage 3."""
    config, stage = run.config, as_task(compute_advantages_task, title, run.config.placement)
    mixed = config.rewards if mix is None else mix
    return stage(rounds, config.streams, mixed, config.advantages, folder, title, earlier, config.placement)


def update_policy(
    run: Run,
    policy: PolicyRef,
    rollouts: tuple[ArtifactRef, ...],
    advantages: ArtifactRef,
    updates: Mapping[Stream, AnyUpdateSection],
    max_staleness: int,
    title: str,
) -> PolicyRef:
    """Train a policy on the rollouts of all sampling rounds, without rows of older policies: stage 4."""
    config, stage = run.config, as_task(update_policy_task, title, run.config.placement)
    return stage(
        policy, rollouts, advantages, run.model, updates, config.run.seed, max_staleness, title, config.placement
    )


def evaluate_policy(run: Run, policy: PolicyRef, plan: RolloutPlan) -> StoredEvaluation:
    """Run the first three stages on held-out prompts, and score the guardrails on the same samples."""
    done = _sample_and_rate(run, policy, plan, run.config.evaluation_rollout, run.config.rewards)
    guardrails = score_rewards(run, done.rollouts, plan, run.config.guardrails.rewards, GUARDRAILS)
    return replace(done, guardrails=guardrails)


def choose_seeds(run: Run, policy: PolicyRef, plan: RolloutPlan) -> tuple[RolloutPlan, StoredEvaluation | None]:
    """Return a plan of the seeds whose previews are best and worst, and the previews; without any the plan itself.

    Rewards that are only measured do not score previews.
    """
    rollout = run.config.rollout
    if not isinstance(rollout, ImageRolloutSection) or rollout.previews is None:
        return plan, None
    previews = plan.previews(rollout.previews.per_prompt)
    rated = _sample_and_rate(run, policy, previews, rollout.for_previews(), run.config.counted_rewards)
    return keep_seeds(run.store, plan, previews, rated.advantages, rollout.keep), rated


def _sample_and_rate(
    run: Run, policy: PolicyRef, plan: RolloutPlan, rollout: RolloutSection, mix: tuple[RewardSection, ...]
) -> StoredEvaluation:
    rollouts = collect_rollouts(run, policy, plan, rollout)
    rewards = score_rewards(run, rollouts, plan, mix, REWARDS)
    advantages = compute_advantages(run, (SamplingRound(rollouts, rewards),), plan.folder, plan.title, mix=mix)
    return StoredEvaluation(rollouts, advantages, rewards, guardrails={})


def evaluate_baselines(run: Run, plan: RolloutPlan) -> Mapping[Baseline, ArtifactRef]:
    """Score blank images and the targets, of held-out prompts with targets; return the advantages, with the means."""
    if all(group.target_uri is None for group in plan.groups):
        return {}
    done: dict[Baseline, ArtifactRef] = {}
    for baseline in BASELINES:
        title = f"baseline {baseline}"
        own = plan.model_copy(update={"folder": baseline_folder(baseline), "title": title})
        images = as_task(draw_baseline_task, title, run.config.placement)(baseline, own, run.config.placement)
        rewards = score_rewards(run, images, own, run.config.rewards, REWARDS)
        done[baseline] = compute_advantages(run, (SamplingRound(images, rewards),), own.folder, title)
    return done


def score_concurrently(
    rollouts: ArtifactRef,
    rewards: Sequence[RewardSection],
    folder: str,
    title: str,
    placement: PlacementSection,
    earlier: Mapping[str, tuple[ArtifactRef, ...]] | None = None,
    folders: tuple[str, ...] = (),
) -> Mapping[str, ArtifactRef]:
    """Run one task per reward, all at once; when one fails, the others still finish, and their scores are kept.

    Tables of `earlier` already have some of a reward's scores, by its label. Target images are read from `folders`.
    """
    if (caller := _CALLER.get()) is not None:
        common = {"rollouts": rollouts, "folder": folder, "title": title, "placement": placement, "folders": folders}
        return {
            section.label: caller(score_reward_task, f"{title}: score {section.label}", {**common, "section": section})
            for section in rewards
        }
    _require_lock_and_server()
    futures = {}
    scored = f"{title}: score {', '.join(section.label for section in rewards) or 'rewards'}"
    with resource(StopSignals).stage(scored), stages_cancelled_on_interrupt():
        for section in rewards:
            known = (earlier or {}).get(section.label, ())
            stage = with_retries(score_reward_task, f"{title}: score {section.label}", placement)
            # Scores that failed are tried again.
            stage.refresh_cache = any(failed_scores(each) for each in known)
            arguments = with_quoted_arguments([rollouts, section, folder, title, placement, known, None, folders])
            futures[section.label] = stage.submit(*arguments)
        wait(list(futures.values()))
    _forget_submitted(futures.values())
    made = {label: future.result() for label, future in futures.items()}
    if placement.shards_of(placement.rewards) > 1:
        clear_shards(current_store(), folder.rpartition("/")[0])
    return made


def forget_task_runs() -> None:
    """Drop what Prefect remembers of this flow run's tasks for its graph, which otherwise grows with the run.

    Arguments are references, so only the entries of references that still exist can be found again.
    """
    context = FlowRunContext.get()
    assert context is not None, "stages belong to a flow run"
    for known, (_, _, reference) in list(context.run_results.items()):
        if reference is None or reference() is None:
            context.run_results.pop(known, None)
    # No stage declares assets.
    for task_run in [each for each, assets in list(context.task_run_assets.items()) if not assets]:
        context.task_run_assets.pop(task_run, None)


def _forget_submitted(futures: Iterable[PrefectFuture[Any]]) -> None:
    """Drop the events with which Prefect's task runner could have cancelled these tasks; it never does."""
    context = FlowRunContext.get()
    events: dict[UUID, object] = getattr(context and context.task_runner, "_cancel_events", {})
    for future in futures:
        events.pop(future.task_run_id, None)


def _require_lock_and_server() -> None:
    require_held = stage_context().require_held
    assert require_held is not None, "who calls a stage has a lock"
    require_not_lost()
    require_held()


def as_task(stage: Task[P, R], title: str, placement: PlacementSection) -> Callable[P, R]:
    """Return the stage's task under a name that says which iteration it belongs to, with the placement's retries."""
    name, caller = f"{title}: {stage.name}", _CALLER.get()

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        given = inspect.signature(stage.fn).bind(*args, **kwargs).arguments
        reference: R = run_task(stage, name, placement, given) if caller is None else caller(stage, name, given)
        return reference

    return run


def run_task(stage: Task[..., R], name: str, placement: PlacementSection, arguments: Mapping[str, Any]) -> R:
    """Run a stage's Prefect task under this name, with the placement's retries, or return its stored result."""
    _require_lock_and_server()
    task = with_retries(stage, name, placement)
    with resource(StopSignals).stage(name):
        reference: R = task(**dict(zip(arguments, with_quoted_arguments(arguments.values()), strict=True)))
    return reference


@asynccontextmanager
async def recording(store: ArtifactStore, lock: RunLock) -> AsyncIterator[None]:
    """Have the stages of this context write to a run's folder; the memory that they keep is released at the end."""
    use_stage_context(StageContext(store, lock.require_held, await registered_records()))
    # Without a client for the whole run each task opens its own, and a TLS context takes longer than the task.
    client = SyncClientContext.get_or_create()
    with run_resources(), client as opened:
        # Prefect's client waits for a server that went away only if it has reached it once.
        opened.client.hello()
        with shown_in_ui(store.run), stopping_after_stage():
            listen(Cancellable(listener(), resource(StopSignals)))
            yield
