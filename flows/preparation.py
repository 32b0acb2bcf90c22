"""A configuration -> a run: its inputs checked, its folder opened, its lineage kept apart from any other."""

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from configs.schema import RunConfig
from flows.inputs import PromptSet, compares_with_targets, read_prompt_set, require_inputs
from grpo_core.policies.glm_image.loading import refuse_unusable_prompts
from grpo_core.seeds import derive_seed
from tasks.caching import code_digest, library_versions
from tasks.model_files import model_digest
from tasks.models import ModelSpec
from tasks.plan import RolloutPlan, plan_evaluation, plan_iteration
from tasks.storage.reference import PolicyRef
from tasks.storage.schemas import SCHEMA_VERSION
from tasks.storage.store import SET_ASIDE, ArtifactStore

CONFIG_FILE, RUN_FILE = "config.yaml", "run.json"
# What may change without making another training run of it.
_FREE_SECTIONS = ("evaluate", "placement", "storage")


@dataclass(frozen=True)
class Run:
    """A training run whose inputs have been checked and whose folder is open.

    Attributes:
        config: the resolved configuration.
        store: the run's folder.
        model: what is trained.
        training: the prompts that are trained on.
        heldout: the prompts of the evaluation, if there are any.
    """

    config: RunConfig
    store: ArtifactStore
    model: ModelSpec
    training: PromptSet
    heldout: PromptSet | None

    @property
    def base_policy(self) -> PolicyRef:
        """Version 0: the model as it was given."""
        return PolicyRef(version=0, digest=self.model.digest)

    def plan(self, iteration: int) -> RolloutPlan:
        """What a training iteration draws."""
        rollout = self.config.rollout
        return plan_iteration(
            self.training.prompts,
            self.training.targets,
            seed=self.config.run.seed,
            iteration=iteration,
            count=rollout.prompts_per_iteration,
            group_size=rollout.group_size,
            shared_noise=rollout.shared_noise,
        )

    def evaluation_plan(self, version: int) -> RolloutPlan | None:
        """What the evaluation of a policy version draws; None without held-out prompts."""
        if self.heldout is None:
            return None
        evaluate = self.config.evaluate
        return plan_evaluation(
            self.heldout.prompts,
            self.heldout.targets,
            seed=evaluate.seed,
            version=version,
            samples_per_prompt=evaluate.samples_per_prompt,
            shared_noise=self.config.rollout.shared_noise,
        )


def open_run(config: RunConfig) -> Run:
    """Check the inputs, then open the run's folder; a run of the same name with another configuration is set aside.

    Raises:
        InputErrors: everything that is wrong with the inputs, before anything is written.
    """
    require_inputs(config)
    store = ArtifactStore(config.storage.root, config.run.name)
    with_targets = compares_with_targets(config)
    training = read_prompt_set(config.data, "data", with_targets=with_targets)
    heldout = None
    if config.evaluate.prompts:
        heldout = read_prompt_set(config.evaluate, "evaluate", with_targets=with_targets)
    model = ModelSpec(
        section=config.policy,
        digest=model_digest(config.policy.model),
        adapter_seed=derive_seed(config.run.seed, "adapter"),
        keep_reference=config.update.kl_coef > 0,
    )
    sets = [training] if heldout is None else [training, heldout]
    refuse_unusable_prompts(config.policy.model, [prompt.text for each in sets for prompt in each.prompts])
    run = Run(config, store, model, training, heldout)
    store.clear_abandoned()
    _set_other_lineage_aside(run)
    _set_other_evaluations_aside(run)
    _write_description(run)
    return run


def _determining(config: Mapping[str, Any]) -> dict[str, Any]:
    """What determines the policies and rollouts of a run; more iterations only go on with it."""
    values = {section: content for section, content in config.items() if section not in _FREE_SECTIONS}
    return {**values, "run": {"seed": config.get("run", {}).get("seed")}}


def _lineage(run: Run) -> str:
    described = {
        "config": _determining(run.config.model_dump(mode="json")),
        "model": run.model.digest,
        "prompts": [[prompt.prompt_id, dict(prompt.columns)] for prompt in run.training.prompts],
        "targets": [target and target.sha256 for target in run.training.targets],
        "code": code_digest(),
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _set_other_lineage_aside(run: Run) -> None:
    """Iterations of two configurations never stand side by side; what still fits is brought back by its key."""
    store = run.store
    described = _mapping(store.read_file(RUN_FILE))
    paths = store.filesystem.ls(store.path(), detail=False) if store.filesystem.exists(store.path()) else []
    names = [path.rstrip("/").rsplit("/", 1)[-1] for path in paths]
    kept = [name for name in sorted(names) if not name.startswith(".") and name not in (SET_ASIDE, RUN_FILE)]
    if described is None:
        # Nobody says what these are; anything else in the folder may be a person's own.
        kept = [name for name in kept if name.startswith("iteration_") or name in ("policies", "evaluations")]
        if kept:
            store.set_aside(kept, reason=f"{RUN_FILE} is missing or damaged, so nothing says how these were made")
        return
    if described.get("lineage") == _lineage(run):
        return
    former = _mapping(store.read_file(CONFIG_FILE))
    changes: Sequence[str] = ()
    if former is not None:
        changes = changed_keys(_determining(former), _determining(run.config.model_dump(mode="json")))
    reason = "the configuration changed: " + "; ".join(changes) if changes else "the code, model or prompts changed"
    # run.json goes last: while it stands, the next start goes on with setting aside.
    store.set_aside([*kept, RUN_FILE], reason=reason)


def _set_other_evaluations_aside(run: Run) -> None:
    """Evaluations of other held-out prompts or seeds cannot be compared with those to come."""
    held = run.store.filesystem.exists(run.store.path("evaluations"))
    if held and run.heldout is not None and _former_evaluation(run) not in (None, _evaluation(run)):
        run.store.set_aside(["evaluations"], reason="the held-out prompts, their targets, number or seed changed")


def _evaluation(run: Run) -> str | None:
    """Digest of what the evaluation of a policy draws; that of an earlier start where this one draws none."""
    plan = run.evaluation_plan(0)
    if plan is None:
        return _former_evaluation(run)
    return hashlib.sha256(plan.model_dump_json().encode()).hexdigest()


def _former_evaluation(run: Run) -> str | None:
    described = _mapping(run.store.read_file(RUN_FILE)) or {}
    return described.get("evaluation")


def _mapping(content: bytes | None) -> Mapping[str, Any] | None:
    """A small YAML or JSON file's keys and values; None where it is missing or damaged."""
    try:
        values = yaml.safe_load(content or b"")
    except (yaml.YAMLError, UnicodeDecodeError):
        return None
    return values if isinstance(values, dict) else None


def changed_keys(former: Mapping[str, Any], present: Mapping[str, Any], path: str = "") -> Sequence[str]:
    """`section.key was -> is` for every value that differs."""
    changes: list[str] = []
    for key in sorted({*former, *present}):
        was, now = former.get(key), present.get(key)
        if isinstance(was, Mapping) and isinstance(now, Mapping):
            changes += changed_keys(was, now, f"{path}{key}.")
        elif was != now:
            changes.append(f"{path}{key} {was} -> {now}")
    return changes


def _write_description(run: Run) -> None:
    store = run.store
    config = yaml.safe_dump(run.config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    store.write_file(CONFIG_FILE, config.encode())
    described = {
        "name": run.config.run.name,
        "schema_version": SCHEMA_VERSION,
        "lineage": _lineage(run),
        "evaluation": _evaluation(run),
        "model": run.config.policy.model,
        "model_digest": run.model.digest,
        "code": code_digest(),
        "versions": {"python": platform.python_version(), **library_versions()},
        "prompts": len(run.training.prompts),
        "heldout_prompts": len(run.heldout.prompts) if run.heldout else 0,
    }
    store.write_file(RUN_FILE, json.dumps(described, indent=1).encode())
