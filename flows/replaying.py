"""`grpo replay`: train a policy from another run's stored rollouts; no training rollouts are sampled."""

import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from prefect import flow

from configs.schema import CORRECTION, ReplayConfig, ReplaySection, RunConfig, as_replay, corrected
from configs.training import AnyUpdateSection, MismatchSection, UpdateSection
from configs.yaml_files import override_path, yaml_value
from flows.pipeline.lineage import model_problems
from flows.pipeline.prefect_ui import ReplayForm
from flows.pipeline.run import Run, start_run
from flows.pipeline.stages import as_task, compute_advantages, recording, update_policy
from flows.preflight.files import checked_once
from flows.preflight.inputs import check_inputs
from flows.preflight.trust import trusted_config
from flows.requests import ReplayRequest, refuse_overrides
from flows.training.callbacks import open_callbacks
from flows.training.history import TrainingHistory, evaluate_now
from flows.training.summary import TrainSummary, publish_summary, summarize
from grpo_core.errors import InputError, raise_all
from grpo_core.rollouts.streams import Stream
from grpo_core.update.velocity_settings import MAX_MATCHED_STALENESS, VelocitySettings
from tasks.advantages.compute_advantages import copy_advantages_task
from tasks.progress import log
from tasks.reports.text import counted
from tasks.runs.layout import RECOMPUTED, STORED, StoredIteration, iteration_folder
from tasks.runs.lookup import CONFIG_FILE, find_run, spans
from tasks.runs.stored import first_iteration, read_iterations, read_range, stored_config
from tasks.runs.stored_policies import chosen_version, read_policy
from tasks.storage.artifacts.commit import STATES_REMOVED, removed_by
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.store import ArtifactStore


@dataclass(frozen=True)
class ReplayPlan:
    """What a replay does.

    Attributes:
        start: the source's policy to start from; None for the initial model.
        iterations: the stored iterations to train on, in order.
        previous_advantages: the source's advantages of the iteration before, if rewards need their running moments.
    """

    config: ReplayConfig
    start: PolicyRef | None
    iterations: tuple[StoredIteration, ...]
    previous_advantages: ArtifactRef | None


@checked_once
def plan_replay(request: ReplayRequest) -> ReplayPlan:
    """Find what is stored, and check that it can be used as requested and that the replay could start."""
    refuse_overrides(request.overrides, request.hint_against)
    store = find_run(request.named.run, request.root)
    name, version = request.run_name, chosen_version(store, request.named.version) or 0
    _require_own_folder(store, name)
    chosen = None if request.iterations is None else read_range(request.iterations)
    iterations = read_iterations(store, chosen, request.advantages or STORED)
    own = {
        "run.name": name,
        "run.iterations": version + len(iterations),
        "storage.root": root_of(request.named.run, request.root, store),
    }
    overrides = [*request.overrides, *(f"{key}={yaml_value(value)}" for key, value in own.items())]
    trust, hint_against = request.trust_code, request.hint_against
    previous, config = stored_config(store), trusted_config(store, overrides, trust=trust, hint_against=hint_against)
    start = read_policy(store, version) if version else None
    recompute = config.advantages != previous.advantages or _mix(config) != _mix(previous)
    advantages = request.advantages or (RECOMPUTED if recompute else STORED)
    raise_all(
        [
            *model_problems(store, previous, config, version, f"start from the model with {store.run}@0"),
            *_reward_problems(request, previous, config),
            *_advantages_problems(request, previous, config, advantages, recompute=recompute),
            *correction_problems(request.overrides, config),
            *_staleness_problems(request, version, iterations, config),
            *_states_problems(store, iterations),
        ]
    )
    section = ReplaySection(
        source=store.run,
        policy=version,
        iterations=tuple(iteration.number for iteration in iterations),
        advantages=advantages,
        max_staleness=request.max_staleness,
        correction=CORRECTION,
    )
    plan = ReplayPlan(
        config=as_replay(config, section),
        start=start,
        iterations=iterations,
        previous_advantages=previous_advantages(store, config, iterations),
    )
    check_inputs(plan.config)
    return plan


def _require_own_folder(source: ArtifactStore, name: str) -> None:
    if name == source.run:
        raise InputError("--run", name, "This is the source, which is never changed; give the replay another name.")
    stored = source.read_shared(f"{name}/{CONFIG_FILE}")
    if stored is not None and not re.search(rb"^replay:", stored, re.MULTILINE):
        raise InputError("--run", name, "This is a run that was not replayed; give the replay another name.")


def root_of(source: str, root: str, store: ArtifactStore) -> str:
    """The storage root as the person writes it: no file may contain a path that depends on this machine."""
    if "/" not in source and ArtifactStore(root, source).path() == store.path():
        return root
    parent = source.rstrip("/").rpartition("/")[0]
    return parent or os.path.relpath(store.root)


def _mix(config: RunConfig) -> list[object]:
    return [(section.label, section.weight) for section in config.rewards]


def previous_advantages(
    store: ArtifactStore, config: RunConfig, iterations: Sequence[StoredIteration]
) -> ArtifactRef | None:
    """Return the source's advantages of the iteration before, if rewards need their running moments.

    Only weights can change, and the moments are of unweighted values: the stored moments are still right.
    """
    first = iterations[0].number
    if first <= first_iteration(store) or all(section.normalize != "running" for section in config.rewards):
        return None
    return read_iterations(store, (first - 1, first - 1), STORED)[0].advantages


def _reward_problems(request: ReplayRequest, previous: RunConfig, config: RunConfig) -> Iterator[InputError]:
    stored = {section.label: section for section in previous.rewards}
    for index, section in enumerate(config.rewards):
        known = stored.get(section.label)
        if known is None or section.model_copy(update={"weight": known.weight}) != known:
            hint = (
                f"The source has scores of {', '.join(stored)}, as they were configured; only weights can change. "
                f"Score other rewards first: `grpo rescore {request.named.run} --rewards FILE --name NAME`, and then "
                f"`grpo replay {request.named.run} --advantages NAME`."
            )
            yield InputError(f"rewards.{index}", section.label, hint)


def _advantages_problems(
    request: ReplayRequest, previous: RunConfig, config: RunConfig, advantages: str, *, recompute: bool
) -> Iterator[InputError]:
    if recompute and advantages != RECOMPUTED:
        hint = "The settings that --set changes have no effect on these; give --advantages recomputed, or leave it out."
        yield InputError("--advantages", advantages, hint)
    if advantages == RECOMPUTED and config.advantages.kl_coef and not previous.advantages.kl_coef:
        hint = "The stored rollouts have no log-probs of the reference; set update.kl_coef instead."
        yield InputError("advantages.kl_coef", config.advantages.kl_coef, hint)


def correction_problems(overrides: Sequence[str], config: RunConfig) -> Iterator[InputError]:
    """Yield each correction that overrides set and leave switched off: a replay would use its default instead."""
    given = [override_path(override) for override in overrides]
    for stream, update in config.updates.items():
        place = f"{config.update_path(stream)}.mismatch"
        named = any(path.startswith(place) for path in given)
        if named and isinstance(update, UpdateSection) and update.mismatch.mode == "none":
            hint = "Rows that other weights sampled need their importance weights; set it to truncate or mask."
            yield InputError(f"{place}.mode", "none", hint)


def _states_problems(store: ArtifactStore, iterations: Sequence[StoredIteration]) -> Iterator[InputError]:
    without = [
        each.number
        for each in iterations
        if any(STATES_REMOVED in removed_by(store.pruned_reason(part.rollouts)) for part in each.rounds)
    ]
    if without:
        hint = "Their latents were removed by `grpo prune --states-older-than`; choose --iterations that have theirs."
        yield InputError("--iterations", spans(without), hint)


def _staleness_problems(
    request: ReplayRequest, start: int, iterations: Sequence[StoredIteration], config: RunConfig
) -> Iterator[InputError]:
    matched = [each.algorithm for each in config.updates.values() if isinstance(each, VelocitySettings)]
    if matched and request.max_staleness > MAX_MATCHED_STALENESS:
        most = f"give at most {MAX_MATCHED_STALENESS}"
        hint = f"{matched[0]} has no importance weights for images of older policies; {most}."
        yield InputError("--max-staleness", request.max_staleness, hint)
    for version, iteration in enumerate(iterations, start=start):
        needed = iteration.staleness(version)
        if needed <= request.max_staleness:
            continue
        samplers = sorted({sampler for sampler, _ in iteration.samplers})
        hint = (
            f"No row would be left: those of iteration {iteration.number} were sampled by version "
            f"{', '.join(map(str, samplers))}, and version {version} is trained on them. Allow {needed}, choose other "
            f"--iterations, or start from another version of it."
        )
        yield InputError("--max-staleness", request.max_staleness, hint)
        # The others are as far away; one message is enough.
        return


class ReplaySummary(TrainSummary):
    """The results of a replay.

    Attributes:
        source_iterations: iterations of the source, one for each update.
        advantages: `stored`, `recomputed`, or the name of a rescoring.
        staleness: the largest of any row that was trained on; at most max_staleness versions.
        rows_left_out: rows of all updates beyond that.
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
    with start_run(plan.config) as run:
        history, policy = TrainingHistory.of(run), plan.start or run.base_policy
        log(introduction(plan))
        async with recording(run.store, run.lock):
            with open_callbacks(run) as callbacks:
                evaluate_now(run, policy, history)
                callbacks.on_train_begin(history)
                for stored in plan.iterations:
                    policy, advantages = replay_iteration(run, plan, policy, stored, history)
                    if run.config.is_evaluated(policy.version):
                        evaluate_now(run, policy, history)
                    if await callbacks.on_iteration_end(history, policy, stored.rounds, advantages, replayed=True):
                        break
        summary = summarize(run, history, time.perf_counter() - started)
        summary = await publish_summary(run, summary, callbacks.publisher.last_report)
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


def replay_iteration(
    run: Run, plan: ReplayPlan, policy: PolicyRef, stored: StoredIteration, history: TrainingHistory
) -> tuple[PolicyRef, ArtifactRef]:
    """Train a policy on a stored iteration; return the next one, and the advantages."""
    updates = corrected_updates(run, plan, policy, stored)
    advantages = reuse_advantages(run, plan, stored, policy.version + 1, history)
    rollouts = tuple(each.rollouts for each in stored.rounds)
    title, staleness = f"iteration {policy.version + 1}", plan.config.replay.max_staleness
    return update_policy(run, policy, rollouts, advantages, updates, staleness, title), advantages


def introduction(plan: ReplayPlan) -> str:
    """Describe in one line what is replayed, and how samples of other policy versions are treated."""
    config, section = plan.config, plan.config.replay
    several = "iterations" if len(section.iterations) > 1 else "iteration"
    weights = {
        stream: _weight(update.importance_weights(section.correction)) for stream, update in config.updates.items()
    }
    weight = " and ".join(f"{each} ({stream})" if len(weights) > 1 else each for stream, each in weights.items())
    advantages = {STORED: "stored advantages", RECOMPUTED: "recomputed advantages"}.get(
        section.advantages, f"advantages of the rescoring {section.advantages}"
    )
    return (
        f"replay of {section.source}: {several} {spans(section.iterations)} with the {advantages}, starting from "
        f"policy version {section.policy}; samples of another version are trained with {weight}, and left out if more "
        f"than {counted(section.max_staleness, 'version')} apart"
    )


def _weight(mismatch: MismatchSection | None) -> str:
    if mismatch is None:
        return "no importance weights"
    done = {"truncate": "at most", "mask": "0 above"}[mismatch.mode]
    return f"importance weights per {mismatch.level}, {done} {mismatch.cap:g}"


def reuse_advantages(
    run: Run, plan: ReplayPlan, stored: StoredIteration, iteration: int, history: TrainingHistory
) -> ArtifactRef:
    """Copy the stored advantages, or compute them from the stored rewards, and add them to the history."""
    folder, title = iteration_folder(iteration), f"iteration {iteration}"
    if plan.config.replay.advantages != RECOMPUTED:
        advantages = as_task(copy_advantages_task, title, plan.config.placement)(stored.advantages, folder)
    else:
        previous = history.last_advantages or plan.previous_advantages
        advantages = compute_advantages(run, stored.rounds, folder, title, previous)
    history.add_sampled(run, advantages)
    return advantages


def corrected_updates(
    run: Run, plan: ReplayPlan, policy: PolicyRef, stored: StoredIteration
) -> Mapping[Stream, AnyUpdateSection]:
    """Return the updates, with importance weights where other weights sampled rows, which staleness must allow."""
    if all(digest == policy.sampler.digest for _, digest in stored.samplers):
        return run.updates
    if plan.config.replay.max_staleness == 0:
        hint = f"Other weights than version {policy.version} sampled iteration {stored.number}. Allow at least 1."
        raise InputError("--max-staleness", 0, hint)
    return corrected(run.updates, plan.config.replay.correction)
