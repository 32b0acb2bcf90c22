"""Plan an evaluation: find the run, the policy and the prompts, and report every mistake before a model loads."""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from configs.schema import RunConfig
from configs.sections import DataSection
from flows.pipeline.requests import EvaluateRequest, refuse_overrides
from flows.pipeline.run import heldout_digest, plan_heldout
from flows.preflight.inputs import PromptFiles, checked_once, refuse_prompt_texts, run_checks, trained_model
from flows.server.reachable import require_server
from grpo_core.errors import InputError, InputErrors
from tasks.models.resident import ModelSpec
from tasks.prompts.curriculum import PromptSet
from tasks.rewards.stored import scores_key
from tasks.rollouts.plan import RolloutPlan
from tasks.runs.layout import evaluation_folder
from tasks.runs.lookup import find_run, read_description
from tasks.runs.records import StoredEvaluation
from tasks.runs.stored import choose_policy, find_evaluation, stored_config
from tasks.storage.artifacts.reference import PolicyRef
from tasks.storage.artifacts.store import ArtifactStore

# The evaluation of a policy does not depend on any other section of its run.
_CHANGEABLE = ("evaluate", "rollout", "rewards", "advantages", "guardrails", "placement", "storage.cache")

# A reward's provenance covers its settings; these fields say how it is computed.
_WITHOUT_EFFECT = {"settings", "max_failures", "batch_size", "processes", "pool"}


@dataclass(frozen=True)
class EvaluatePlan:
    """What an evaluation does.

    Attributes:
        config: the run's configuration with the requested changes.
        rollouts: names and seeds of the samples, and the folder of the evaluation.
        stored: the same evaluation if it is stored and valid; nothing is computed then.
        notes: messages about versions that were skipped and about the prompts.
    """

    store: ArtifactStore
    config: RunConfig
    model: ModelSpec
    policy: PolicyRef
    heldout: tuple[PromptSet, ...]
    rollouts: RolloutPlan
    stored: StoredEvaluation | None
    notes: tuple[str, ...]


@checked_once
def plan_evaluate(request: EvaluateRequest) -> EvaluatePlan:
    """Find the run, the policy and the prompts, and check that they fit together.

    Raises:
        InputError, InputErrors: with the option or the key, the value and the hint.
    """
    refuse_overrides(request.overrides, _hint_against)
    store = find_run(request.run, request.root)
    described = read_description(store)
    own, config = stored_config(store), stored_config(store, [*_prompt_overrides(request), *request.overrides])
    if not config.evaluate.sets:
        hint = f"{store.run} has no held-out prompts (evaluate.prompts); name a file of them."
        raise InputErrors([InputError("--prompts", None, hint)])
    prompts = check_inputs(config)
    heldout = prompts.usable("evaluate")
    model = trained_model(config)
    digest = model.digest
    if described.get("model_digest") not in (None, digest):
        hint = f"Its files have changed since {store.run} began ({described['model_digest'][:12]}); restore them."
        raise InputErrors([InputError("policy.model", digest[:12], hint)])
    chosen, notes = choose_policy(store, request.policy, digest)
    policy = chosen.averaged
    refuse_prompt_texts(config, heldout)
    rollouts = plan_heldout(config, heldout, policy.version)
    assert rollouts is not None, "there are held-out prompts"
    same = _determining(own) == _determining(config) and described.get("evaluation") == heldout_digest(config, heldout)
    stored = find_evaluation(store, rollouts.folder, config, policy) if same else None
    if stored is None:
        folder = evaluation_folder(policy.version, _name_of(config, rollouts))
        rollouts = rollouts.model_copy(update={"folder": folder})
        stored = find_evaluation(store, folder, config, policy)
    require_server()
    return EvaluatePlan(store, config, model, policy, heldout, rollouts, stored, (*notes, *prompts.notes))


def _hint_against(path: str) -> str | None:
    if any(path == part or path.startswith((f"{part}.", f"{part}_")) for part in _CHANGEABLE):
        return None
    return f"An evaluation takes the policy as it was trained; {', '.join(_CHANGEABLE[:-1])} can be changed."


def _prompt_overrides(request: EvaluateRequest) -> list[str]:
    """Replace the run's held-out prompts by the requested file; targets are found in the same way."""
    if request.prompts is None:
        return []
    unset = dict.fromkeys(("split", "subset", "revision", "prompt_column", "columns", "limit"))
    changed: dict[str, object] = {"prompts": request.prompts, "datasets": [], "streaming": False, **unset}
    return [f"evaluate.{key}={json.dumps(value)}" for key, value in changed.items()]


def check_inputs(config: RunConfig) -> PromptFiles:
    """Check what the first three stages need and return the prompts; the update and its prompts are not needed."""
    single = config.placement.model_copy(update={"processes": 1, "sharding": "ddp"})
    changed = {"data": DataSection(), "update": type(config.update)(), "placement": single}
    return run_checks(config.model_copy(update=changed))


def _determining(config: RunConfig) -> dict[str, Any]:
    """Return what determines the samples and scores of an evaluation, except the prompts and the policy."""
    rewards, rollout = (*config.rewards, *config.guardrails.rewards), config.evaluation_rollout
    return {
        "rollout": rollout.model_dump(mode="json", exclude=set(rollout.training_settings)),
        "mix": [section.model_dump(mode="json", exclude=_WITHOUT_EFFECT) for section in config.rewards],
        "scores": [[section.label, scores_key(section)] for section in rewards],
        "advantages": config.advantages.model_dump(mode="json"),
    }


def _name_of(config: RunConfig, rollouts: RolloutPlan) -> str:
    """Name an evaluation that is not the run's own; all versions share the name."""
    described = {
        **_determining(config),
        "plan": rollouts.model_dump(mode="json", exclude={"folder", "title", "iteration"}),
    }
    digest = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()
    stem = PurePosixPath(config.evaluate.prompts).stem if config.evaluate.prompts else "heldout"
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._")[:60] or "heldout"
    return f"{name}-{digest[:8]}"
