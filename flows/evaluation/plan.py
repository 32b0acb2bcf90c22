"""Plan an evaluation: find the run, the policy and the prompts, and report every mistake before a model loads."""

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from configs.schema import RunConfig
from flows.pipeline.requests import EvaluateRequest, refuse_overrides
from flows.pipeline.run import heldout_digest, plan_heldout
from flows.preflight.inputs import check_evaluation, checked_once
from grpo_core.errors import InputError
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
        InputError: with the option or the key, the value and the hint.
    """
    refuse_overrides(request.overrides, request.hint_against)
    store = find_run(request.run, request.root)
    described = read_description(store)
    own, config = stored_config(store), stored_config(store, request.changes)
    if not config.evaluate.sets:
        hint = f"{store.run} has no held-out prompts (evaluate.prompts); name a file of them."
        raise InputError("--prompts", None, hint)
    inputs = check_evaluation(config)
    heldout, digest = inputs.heldout, inputs.model.digest
    if described.get("model_digest") not in (None, digest):
        hint = f"Its files have changed since {store.run} began ({described['model_digest'][:12]}); restore them."
        raise InputError("policy.model", digest[:12], hint)
    chosen, notes = choose_policy(store, request.policy, digest)
    policy = chosen.averaged
    rollouts = plan_heldout(config, heldout, policy.version)
    assert rollouts is not None, "there are held-out prompts"
    same = _determining(own) == _determining(config) and described.get("evaluation") == heldout_digest(config, heldout)
    stored = find_evaluation(store, rollouts.folder, config, policy) if same else None
    if stored is None:
        folder = evaluation_folder(policy.version, _name_of(config, rollouts))
        rollouts = rollouts.model_copy(update={"folder": folder})
        stored = find_evaluation(store, folder, config, policy)
    return EvaluatePlan(store, config, inputs.model, policy, heldout, rollouts, stored, (*notes, *inputs.notes))


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
