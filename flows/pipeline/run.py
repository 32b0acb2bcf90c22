"""Open a run from a configuration: check the inputs, lock the folder, separate it from other lineages."""

import hashlib
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import yaml

from configs.schema import RunConfig
from configs.sections import ImageRolloutSection
from configs.training import UpdateSection
from flows.pipeline.lineage import (
    ACCEPTED,
    IDENTITY,
    identify,
    lineage_digest,
    move_other_lineage,
    read_valid_description,
    settle_code,
    stage_code,
)
from flows.preflight.inputs import check_inputs
from grpo_core.seeds import derive_seed
from tasks.execution.versions import changed_versions, library_versions
from tasks.models.resident import ModelSpec
from tasks.progress import log
from tasks.prompts.curriculum import DrawnPrompt, PromptSet, PromptStatistics, draw_prompts
from tasks.rollouts.plan import RolloutPlan, plan_evaluation, plan_round
from tasks.runs.layout import EVALUATIONS
from tasks.runs.lookup import require_schema, write_description
from tasks.storage.artifacts.reference import PolicyRef
from tasks.storage.artifacts.replace import LINEAGE
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.locks.run_lock import RunLock, locked
from tasks.storage.tables.schemas import SCHEMA_VERSION


@dataclass(frozen=True)
class Run:
    """A training run whose inputs have been checked and whose folder is open.

    Attributes:
        config: the resolved configuration.
        store: the run's folder.
        lock: this process's lock of the run.
        model: the model that is trained.
        training: the prompts that are trained on.
        heldout: the prompts of the evaluation; empty without one.
    """

    config: RunConfig
    store: ArtifactStore
    lock: RunLock
    model: ModelSpec
    training: tuple[PromptSet, ...]
    heldout: tuple[PromptSet, ...]

    @property
    def base_policy(self) -> PolicyRef:
        """Version 0: the model as it was given."""
        return PolicyRef(version=0, digest=self.model.digest)

    @property
    def needs_reference_while_sampling(self) -> bool:
        """Whether the reward includes a KL to the reference."""
        return self.config.advantages.kl_coef > 0

    @property
    def update(self) -> UpdateSection:
        """The update section with the length of its schedule."""
        return self.config.scheduled_update

    def plan(
        self,
        iteration: int,
        sampling_round: int,
        count: int,
        statistics: PromptStatistics | None = None,
        earlier: Sequence[RolloutPlan] = (),
    ) -> RolloutPlan:
        """Plan a sampling round of a training iteration.

        Args:
            iteration: number, from 1.
            sampling_round: number, from 1; later rounds replace groups without spread.
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
            group_size=config.rollout.group_size,
            shared_noise=_shares_noise(config),
        )

    def evaluation_plan(self, version: int) -> RolloutPlan | None:
        """Plan the evaluation of a policy version; None without held-out prompts."""
        return plan_heldout(self.config, self.heldout, version)


def plan_heldout(config: RunConfig, heldout: Sequence[PromptSet], version: int) -> RolloutPlan | None:
    """Plan the evaluation of a policy version; None without held-out prompts."""
    if not heldout:
        return None
    return plan_evaluation(
        [
            DrawnPrompt(each.name, prompt, target)
            for each in heldout
            for prompt, target in zip(each.prompts, each.targets, strict=True)
        ],
        seed=config.evaluate.seed,
        version=version,
        samples_per_prompt=config.evaluate.samples_per_prompt,
        shared_noise=_shares_noise(config),
    )


def _shares_noise(config: RunConfig) -> bool:
    return isinstance(config.rollout, ImageRolloutSection) and config.rollout.shared_noise


@contextmanager
def open_run(config: RunConfig, *, accept_code: bool = False) -> Iterator[Run]:
    """Check the inputs, then lock and open the run's folder; files of another configuration move to `previous/`.

    Args:
        config: the run's configuration.
        accept_code: resume with stored results that other code made, and record it.

    Raises:
        InputErrors: everything that is wrong with the inputs, before anything is written.
        InputError: another process writes the run.
    """
    inputs = check_inputs(config)
    store = inputs.store
    model = ModelSpec(
        section=config.policy,
        digest=inputs.model_digest,
        adapter_seed=derive_seed(config.run.seed, "adapter"),
        reference=config.reference_placement,
    )
    with locked(store, setting="run.name", value=config.run.name) as lock:
        require_schema(store)
        run = Run(config, store, lock, model, inputs.training, inputs.heldout)
        store.clear_abandoned()
        previous = read_valid_description(store)
        accepted = settle_code(stage_code(config, model), previous or {}, accept=accept_code)
        identity = identify(config, model, inputs.training)
        move_other_lineage(store, previous, identity)
        _move_other_evaluations(run)
        _write_description(run, identity, accepted, previous or {})
        yield run


def _move_other_evaluations(run: Run) -> None:
    """Move away evaluations of other held-out prompts or seeds, which cannot be compared with later ones."""
    exists = run.store.filesystem.exists(run.store.path(EVALUATIONS))
    if exists and run.heldout and _previous_evaluation(run) not in (None, _evaluation(run)):
        run.store.move_to_previous([EVALUATIONS], reason="the held-out prompts, their targets, number or seed changed")


def _evaluation(run: Run) -> str | None:
    """Return the digest of the evaluation's plan; without held-out prompts, the digest that run.json records."""
    plan = run.evaluation_plan(0)
    if plan is None:
        return _previous_evaluation(run)
    return hashlib.sha256(plan.model_dump_json().encode()).hexdigest()


def _previous_evaluation(run: Run) -> str | None:
    return (read_valid_description(run.store) or {}).get("evaluation")


def _write_description(
    run: Run, identity: Mapping[str, Any], accepted: Mapping[str, str], previous: Mapping[str, Any]
) -> None:
    store, versions = run.store, {"python": platform.python_version(), **library_versions()}
    if changed := changed_versions(previous.get("versions", versions), versions):
        log(f"library versions changed since the last start: {', '.join(changed)}; results are kept")
    config = yaml.safe_dump(run.config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    described = {
        "name": run.config.run.name,
        "schema_version": SCHEMA_VERSION,
        LINEAGE: lineage_digest(identity),
        IDENTITY: identity,
        "evaluation": _evaluation(run),
        "model": run.config.policy.model,
        "model_digest": run.model.digest,
        ACCEPTED: accepted,
        "versions": versions,
        "prompts": sum(len(each.prompts) for each in run.training),
        "heldout_prompts": sum(len(each.prompts) for each in run.heldout),
    }
    write_description(store, described, config.encode())
