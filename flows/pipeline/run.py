"""Open a run from a configuration: check the inputs, lock the folder, separate it from other lineages."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from configs.rollouts import ImageRolloutSection, RolloutSection
from configs.schema import RunConfig
from configs.training import AnyUpdateSection
from flows.pipeline.changes import HELDOUT, named_changes
from flows.pipeline.lineage import (
    ACCEPTED,
    IDENTITY,
    ChangedRunError,
    end_earlier_run,
    find_change,
    finish_earlier_run,
    identify,
    lineage_digest,
    make_earlier_run,
    read_valid_description,
    resolve_code,
    resolve_start,
    stage_code,
)
from flows.preflight.inputs import check_inputs
from grpo_core.errors import InputError
from grpo_core.hub import cached_folder
from grpo_core.rollouts.streams import Stream
from tasks.execution.fingerprint import changed_versions, running_versions
from tasks.models.devices import describe_processor
from tasks.models.resident import ModelSpec
from tasks.progress import Silence, listen, log
from tasks.prompts.curriculum import PromptSet, PromptStatistics, draw_prompts
from tasks.prompts.source_images import SourceReference
from tasks.rollouts.plan import RolloutPlan, plan_evaluation, plan_round
from tasks.runs.layout import EVALUATIONS
from tasks.runs.lookup import record_start, require_schema, write_description
from tasks.runs.stored import portable
from tasks.runs.stored_policies import START
from tasks.runs.trust import remember, uses_of
from tasks.storage.artifacts.reference import PolicyRef
from tasks.storage.artifacts.store import LINEAGE, RUN_FILE, ArtifactStore, open_store
from tasks.storage.run_lock import RunLock, locked
from tasks.storage.schemas import SCHEMA_VERSION


@dataclass(frozen=True)
class Run:
    """A training run with checked inputs, in a folder locked by this process; `start` is another run's policy."""

    config: RunConfig
    store: ArtifactStore
    lock: RunLock
    model: ModelSpec
    training: tuple[PromptSet, ...]
    heldout: tuple[PromptSet, ...]
    start: PolicyRef | None = None

    @cached_property
    def source_references(self) -> Mapping[str, SourceReference]:
        """The images in all prompts, by digest."""
        prompts = (prompt for each in (*self.training, *self.heldout) for prompt in each.prompts)
        return {source.digest: source for prompt in prompts for source in prompt.sources}

    @cached_property
    def stored_sources(self) -> set[str]:
        """Digests of the images that this start has stored or verified."""
        return set()

    @property
    def target_folders(self) -> tuple[str, ...]:
        """The folders of target images that rewards may read."""
        return self.config.target_folders

    @property
    def base_policy(self) -> PolicyRef:
        """Version 0: the policy that the run starts from, or the model as it was given."""
        return self.start or PolicyRef(version=0, digest=self.model.digest)

    @property
    def updates(self) -> Mapping[Stream, AnyUpdateSection]:
        """The update of each trained stream, with the length of its schedule."""
        return self.config.scheduled_updates

    def plan(
        self,
        iteration: int,
        sampling_round: int,
        count: int,
        statistics: PromptStatistics | None = None,
        earlier: Sequence[RolloutPlan] = (),
    ) -> RolloutPlan:
        """Plan a sampling round of a training iteration; both numbers are from 1.

        Args:
            count: number of prompts.
            statistics: rewards of earlier iterations; None with a uniform curriculum.
            earlier: previous rounds of this iteration, whose prompts are avoided while there are others.
        """
        config = self.config
        prompts = draw_prompts(
            self.training,
            seed=config.run.seed,
            iteration=iteration,
            sampling_round=sampling_round,
            count=count,
            curriculum=config.data.curriculum,
            statistics=statistics,
            avoided={(group.dataset, group.prompt_id) for plan in earlier for group in plan.groups},
        )
        return plan_round(
            prompts,
            seed=config.run.seed,
            iteration=iteration,
            sampling_round=sampling_round,
            images_of_samples=config.images_of_samples,
            shared_noise=shares_noise(config.rollout),
            window_start=config.window_start(iteration),
        )


def plan_heldout(config: RunConfig, heldout: Sequence[PromptSet], version: int) -> RolloutPlan | None:
    """Plan the evaluation of a policy version; None without held-out prompts."""
    if not heldout:
        return None
    return plan_evaluation(
        [each.drawn(index) for each in heldout for index in range(len(each.prompts))],
        seed=config.evaluate.seed,
        version=version,
        samples_per_prompt=config.evaluate.samples_per_prompt,
        shared_noise=shares_noise(config.evaluation_rollout),
    )


def heldout_digest(config: RunConfig, heldout: Sequence[PromptSet]) -> str | None:
    """Return the sha256 of the plan for version 0, which run.json records; None without held-out prompts."""
    plan = plan_heldout(config, heldout, 0)
    if plan is None:
        return None
    # A target is known by its bytes, wherever it is.
    named = plan.model_dump_json(exclude={"groups": {"__all__": {"target_uri"}}})
    return hashlib.sha256(named.encode()).hexdigest()


def shares_noise(rollout: RolloutSection) -> bool:
    """Return whether siblings share the decoder's first noise."""
    return isinstance(rollout, ImageRolloutSection) and rollout.shared_noise


def changed_run(config: RunConfig, *, accept_code: bool = False) -> ChangedRunError | None:
    """Return why `start_run` would refuse what is stored; None if this start can use it or replaces it."""
    inputs = check_inputs(config)
    require_schema(inputs.store)
    described = read_valid_description(inputs.store)

    def find() -> ChangedRunError | None:
        # start_run logs the same again.
        listen(Silence())
        _, start = resolve_start(config, described or {})
        if described is None or config.run.on_change != "refuse":
            return None
        resolve_code(stage_code(config, inputs.model), described, accept=accept_code)
        identity = identify(config, inputs.model, inputs.training, start, inputs.heldout)
        return find_change(config, inputs.store, described, identity, inputs.training)

    return copy_context().run(find)


def start_problems(config: RunConfig) -> tuple[InputError, ...]:
    """Return what a start would refuse of stored runs; nothing while the model, which identifies them, is not here."""
    model = config.policy.model
    if not Path(model).expanduser().is_dir() and cached_folder(model, config.policy.revision) is None:
        return ()
    try:
        store = open_store(config.storage, config.run.name)
        if config.run.continue_from is None and store.read_file(RUN_FILE) is None:
            return ()
        change = changed_run(config)
    except InputError as error:
        return error.errors
    return () if change is None else (change,)


@contextmanager
def start_run(config: RunConfig, *, accept_code: bool = False) -> Iterator[Run]:
    """Check the inputs, then lock and open the run's folder; results of another configuration become an earlier run.

    With `accept_code`, stored results that other code made are kept, and run.json records it.

    Raises:
        InputError: all that is wrong with the inputs, before anything is written; another process writes the run.
        ChangedRunError: its policies were made with something else, and `run.on_change` is refuse.
    """
    inputs = check_inputs(config)
    store, model = inputs.store, inputs.model
    with locked(store, setting="run.name", value=config.run.name) as lock:
        require_schema(store)
        finish_earlier_run(store)
        previous = read_valid_description(store)
        config, start = resolve_start(config, previous or {})
        run = Run(config, store, lock, model, inputs.training, inputs.heldout, start)
        store.clear_abandoned()
        remember(uses_of(config))
        for note in (*inputs.notes, *inputs.ahead):
            log(note)
        accepted = resolve_code(stage_code(config, model), previous or {}, accept=accept_code)
        identity = identify(config, model, inputs.training, start, inputs.heldout)
        if config.run.on_change == "refuse":
            change = find_change(config, store, previous, identity, inputs.training)
            if change is not None:
                raise change
        recorded = (make_earlier_run(store, previous, identity, inputs.training) or {}).get("evaluation")
        evaluation = heldout_digest(config, inputs.heldout) or recorded
        if recorded not in (None, evaluation) and store.filesystem.exists(store.path(EVALUATIONS)):
            # They cannot be compared with later ones.
            changes = named_changes((previous or {}).get(IDENTITY, {}).get(HELDOUT, {}), identity[HELDOUT])
            reason = "; ".join(changes) or "evaluate names other prompts, another number of samples or another seed"
            store.quarantine([EVALUATIONS], reason=reason)
        described, settings = describe(run, identity, accepted, evaluation)
        versions = described["versions"]
        if changed := changed_versions((previous or {}).get("versions", versions), versions):
            log(f"library versions changed since the last start: {', '.join(changed)}; results are kept")
        write_description(store, described, settings)
        end_earlier_run(store)
        record_start(store, describe_processor(config.placement), versions)
        yield run


def describe(
    run: Run, identity: Mapping[str, Any], accepted: Mapping[str, str], evaluation: str | None
) -> tuple[dict[str, Any], bytes]:
    """Return the content of run.json and of config.yaml."""
    # What to do with earlier results is a decision of one start, not of the run.
    settings = portable(run.config.model_dump(mode="json", exclude={"run": {"on_change"}}))
    config = yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
    described = {
        "name": run.config.run.name,
        "schema_version": SCHEMA_VERSION,
        LINEAGE: lineage_digest(identity),
        IDENTITY: identity,
        "evaluation": evaluation,
        "model": run.config.policy.model,
        "model_digest": run.model.digest,
        ACCEPTED: accepted,
        **({START: {"from": run.config.run.continue_from, "policy": run.start.model_dump()}} if run.start else {}),
        "versions": running_versions(),
        "prompts": sum(len(each.prompts) for each in run.training),
        "heldout_prompts": sum(len(each.prompts) for each in run.heldout),
    }
    return described, config.encode()
