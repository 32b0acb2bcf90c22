"""What `grpo evaluate` is asked for -> a checked plan, or every mistake at once, before a model loads."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

from pydantic import Field

from configs.loader import validated
from configs.schema import RunConfig
from configs.sections import DataSection, Section
from configs.training import UpdateSection
from flows.pipeline.run import plan_heldout
from flows.preflight.inputs import input_problems, read_prompt_sets
from grpo_core.errors import InputError, InputErrors
from grpo_core.seeds import derive_seed
from tasks.models.files import model_digest
from tasks.models.resident import ModelSpec
from tasks.prompts.curriculum import PromptSet
from tasks.rewards.stored import provenance_json
from tasks.rollouts.plan import RolloutPlan
from tasks.runs.layout import evaluation_folder
from tasks.runs.lookup import find_run
from tasks.runs.records import StoredEvaluation
from tasks.runs.stored import choose_policy, find_evaluation, stored_config
from tasks.storage.artifacts.reference import PolicyRef
from tasks.storage.artifacts.run_description import read_description
from tasks.storage.artifacts.store import ArtifactStore

# Whatever else a run was made with, the evaluation of its policies does not depend on it.
_CHANGEABLE = ("evaluate", "rollout", "rewards", "advantages", "watch", "placement", "storage.cache")

# Of a reward: its provenance says what its settings determine, and the others say how it is computed.
_WITHOUT_EFFECT = {"settings", "max_failures", "batch_size", "processes", "pool"}


class EvaluateRequest(Section):
    """An evaluation of a policy version with fixed seeds."""

    run: str = Field(min_length=1, description="a run under the storage root, or the path of its folder")
    policy: int | None = Field(None, ge=0, description="version; 0: the model as given; null: the last whole one")
    prompts: str | None = Field(None, min_length=1, description="a prompt file in place of the run's held-out prompts")
    overrides: tuple[str, ...] = Field((), description="changes to the run's configuration, as section.key=value")
    root: str = Field("runs", min_length=1, description="where runs are kept, a folder or any fsspec URL")

    @cached_property
    def plan(self) -> "EvaluatePlan":
        """What is done for it.

        Raises:
            InputError, InputErrors: with the option or the key, the value and the hint.
        """
        return plan_evaluate(self)


@dataclass(frozen=True)
class EvaluatePlan:
    """What an evaluation does.

    Attributes:
        store: of the run.
        config: the run's own, with what was changed.
        model: what was trained.
        policy: the version.
        heldout: the prompts.
        draws: their groups, names and seeds, and where the stages are kept.
        stored: the same evaluation where it is whole; nothing is computed then.
        notes: for people: versions that were passed over.
    """

    store: ArtifactStore
    config: RunConfig
    model: ModelSpec
    policy: PolicyRef
    heldout: tuple[PromptSet, ...]
    rounds: RolloutPlan
    stored: StoredEvaluation | None
    notes: tuple[str, ...]


def read_request(values: Mapping[str, Any]) -> EvaluateRequest:
    """The values of a form.

    Raises:
        InputErrors: everything that does not fit.
    """
    return validated(EvaluateRequest, values)


def plan_evaluate(request: EvaluateRequest) -> EvaluatePlan:
    """Find the run, the policy and the prompts, and check that they go together.

    Raises:
        InputError, InputErrors: with the option or the key, the value and the hint.
    """
    _require_changeable(request)
    store = find_run(request.run, request.root)
    described = read_description(store)
    own, config = stored_config(store), stored_config(store, [*_of_prompts(request), *request.overrides])
    if not config.evaluate.sets:
        hint = f"{store.run} has no held-out prompts (evaluate.prompts); name a file of them."
        raise InputErrors([InputError("--prompts", None, hint)])
    _require_inputs(config)
    digest = model_digest(config.policy.model)
    if described.get("model_digest") not in (None, digest):
        hint = f"Its files have changed since {store.run} began ({described['model_digest'][:12]}); put those back."
        raise InputErrors([InputError("policy.model", digest[:12], hint)])
    policy, notes = choose_policy(store, request.policy, digest)
    heldout = read_prompt_sets(config, config.evaluate, "evaluate")
    adapter_seed, reference = derive_seed(config.run.seed, "adapter"), config.reference_placement
    model = ModelSpec(section=config.policy, digest=digest, adapter_seed=adapter_seed, reference=reference)
    texts = [prompt.text for each in heldout for prompt in each.prompts]
    model.family.refuse_prompts(config.policy.model, config.rollout, texts)
    rounds = plan_heldout(config, heldout, policy.version)
    assert rounds is not None, "there are held-out prompts"
    own_place = _scored_alike(own, config) and described.get("evaluation") == _digest_of_own(config, heldout)
    stored = find_evaluation(store, rounds.folder, config, policy) if own_place else None
    if stored is None:
        folder = evaluation_folder(policy.version, _name_of_others(config, rounds))
        rounds = rounds.model_copy(update={"folder": folder})
        stored = find_evaluation(store, folder, config, policy)
    return EvaluatePlan(store, config, model, policy, heldout, rounds, stored, notes)


def _require_changeable(request: EvaluateRequest) -> None:
    problems = []
    for override in request.overrides:
        path = override.partition("=")[0].strip()
        if not any(path == part or path.startswith((f"{part}.", f"{part}_")) for part in _CHANGEABLE):
            hint = f"An evaluation takes the policy as it was trained; {', '.join(_CHANGEABLE[:-1])} may be changed."
            problems.append(InputError("--set", override, hint))
    if problems:
        raise InputErrors(problems)


def _of_prompts(request: EvaluateRequest) -> list[str]:
    """Another file in the place of the run's held-out prompts; how targets are found stays as it is."""
    if request.prompts is None:
        return []
    changed: dict[str, object] = {"prompts": request.prompts, "datasets": [], "prompt_column": None, "limit": None}
    return [f"evaluate.{key}={json.dumps(value)}" for key, value in changed.items()]


def _require_inputs(config: RunConfig) -> None:
    """Refuse what stands in the way of the first three stages; of the training's own prompts nothing is needed."""
    alone = config.placement.model_copy(update={"processes": 1, "sharding": "ddp"})
    changed = {"data": DataSection(), "update": UpdateSection(), "placement": alone}
    problems = list(input_problems(config.model_copy(update=changed)))
    if problems:
        raise InputErrors(problems)


def _sampling(config: RunConfig) -> dict[str, Any]:
    """What determines the samples of an evaluation and their scores, beside the prompts and the policy."""
    mix = [section.model_dump(mode="json", exclude=_WITHOUT_EFFECT) for section in config.rewards]
    return {
        "rollout": config.rollout.model_dump(mode="json", exclude={"prompts_per_iteration", "group_size"}),
        "mix": mix,
        "scores": [
            [section.label, provenance_json(section)] for section in (*config.rewards, *config.watch.guardrails)
        ],
        "advantages": config.advantages.model_dump(mode="json"),
    }


def _scored_alike(own: RunConfig, config: RunConfig) -> bool:
    return _sampling(own) == _sampling(config)


def _digest_of_own(config: RunConfig, heldout: tuple[PromptSet, ...]) -> str:
    """As run.json has it: of the plan of version 0."""
    plan = plan_heldout(config, heldout, 0)
    assert plan is not None, "there are held-out prompts"
    return hashlib.sha256(plan.model_dump_json().encode()).hexdigest()


def _name_of_others(config: RunConfig, rounds: RolloutPlan) -> str:
    """Name a folder for all versions that are evaluated alike; the training may be writing in its own."""
    described = {**_sampling(config), "rounds": rounds.model_dump(mode="json", exclude={"folder", "title"})}
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
    stem = PurePosixPath(config.evaluate.prompts).stem if config.evaluate.prompts else "heldout"
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._")[:60] or "heldout"
    return f"{name}-{digest[:8]}"
