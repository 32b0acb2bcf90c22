"""Open a stored run to be verified: its configuration, what is known here, and what differs from its own record."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from configs.identity import changed_settings
from configs.schema import RunConfig, as_replay
from flows.pipeline.changes import HELDOUT, INPUTS, named_changes
from flows.pipeline.lineage import IDENTITY, identify
from flows.preflight.files import checked_once, prepare_hub, read_files
from flows.preflight.model import trained_model
from flows.preflight.trust import requested_config, trusted_folders
from flows.requests import VerifyRequest
from flows.verification.causes import Evidence
from flows.verification.choice import Candidate, choose
from flows.verification.stored_stages import StoredRun
from flows.verification.trusted import refusal, unknown_uses
from grpo_core.errors import InputError
from grpo_core.seeds import derive_seed
from tasks.execution.fingerprint import running_versions
from tasks.models.devices import describe_processor
from tasks.models.resident import ModelSpec
from tasks.process import code_version
from tasks.progress import log
from tasks.prompts.curriculum import PromptSet
from tasks.runs.lookup import read_description
from tasks.runs.origin import origin_of
from tasks.runs.stored_policies import stored_start
from tasks.runs.trust import remember, uses_of
from tasks.storage.artifacts.store import LINEAGE
from tasks.storage.run_lock import RunLock, is_locked
from tasks.verification.card import recorded_machines
from tasks.verification.records import Machine
from tasks.verification.scratch import UntouchedStore

_USED = ("policy", "rollout", "rewards", "advantages", "update", "guardrails", "placement")
"""The sections that stages are computed with; prompts are in the rows."""


@dataclass(frozen=True)
class VerifyPlan:
    """What a verification does.

    Attributes:
        run: opened with the configuration that it stores; its prompts are those that are on this machine.
        candidates: what is computed again, in the order of the run.
        chosen: the same in words.
        checks: whether every file of the run is looked at.
        changed: settings in config.yaml, and inputs on this machine, that are not those that the run recorded.
        problems: what else the recorded inputs showed.
        notes: what cannot be tried.
        recorded: fingerprints of the stages' code when the run was made, `here` those of this checkout.
    """

    run: StoredRun
    candidates: tuple[Candidate, ...]
    chosen: str
    checks: bool
    changed: tuple[str, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]
    recorded: Mapping[str, str]
    here: Mapping[str, str]


@checked_once
def plan_verify(request: VerifyRequest) -> VerifyPlan:
    """Open the run, and choose what to compute again; an InputError names each option or key. Nothing is written."""
    # What a stage names is asked about where it is computed: the others go on.
    found, config = requested_config(request, request.overrides, ())
    if is_locked(found):
        raise InputError("RUN", request.named.run, "It is being written. Verify it when that has ended.")
    store = UntouchedStore(config.storage.root, found.run)
    store.refuse_links()
    described = read_description(store)
    if described.get(LINEAGE) is None:
        raise InputError("RUN", store.run, "It has no run.json, so nothing says what it was made with.")
    if (origin := origin_of(store, config)).replay is not None:
        config = as_replay(config, origin.replay)
    config = config.model_copy(update={"placement": config.placement.here()})
    unknown = unknown_uses(uses_of(config, within=_USED), trust=request.trust_code)
    training, heldout, notes = _prompts(config, trust=request.trust_code)
    model, problems = _model(config, described, known=not any(use.place.startswith("policy.") for use in unknown))
    folders = trusted_folders(config, trust=request.trust_code)
    # What writes nothing needs no lock.
    unlocked = cast(RunLock, None)
    run = StoredRun(config, store, unlocked, model, training, heldout, stored_start(described), known_folders=folders)
    candidates, chosen = choose(request, run)
    checks = request.iterations in (None, "all") and request.stages is None
    plan = VerifyPlan(run, candidates, chosen, checks, (), tuple(problems), tuple(notes), recorded(described), {})
    if unknown:
        # An identity needs the code of rewards and losses, and the model.
        return replace(plan, notes=(*notes, f"settings and code are not compared with run.json: {refusal(unknown[0])}"))
    return with_identity(plan, described)


def _prompts(config: RunConfig, *, trust: bool) -> tuple[tuple[PromptSet, ...], tuple[PromptSet, ...], list[str]]:
    """Return the training and held-out prompts; of files that are not here, or that the person does not know, none."""
    uses = uses_of(config, within=("data", "evaluate"))
    if trust:
        remember(uses)
    unread = [use for use in uses if use.is_missing or not use.is_known]
    if unread:
        named = f"{unread[0].place} ({unread[0].value})"
        return (), (), [f"the rows' prompts are not compared with {named}: it is not here, or needs --trust-code"]
    prepare_hub(config)
    files = read_files(config)
    notes = [f"the rows' prompts are not compared: {problem}" for problem in files.problems]
    complete = {name: all(each is not None for each in sets) for name, sets in files.sets.items()}
    training, heldout = (files.usable(name) if complete.get(name) else () for name in ("data", "evaluate"))
    return training, heldout, notes


def _model(config: RunConfig, described: Mapping[str, Any], *, known: bool) -> tuple[ModelSpec, list[str]]:
    """Return the model as the run recorded it, and what is wrong with the one on this machine, which is only read if
    the person knows it.
    """
    recorded, seed = str(described.get("model_digest", "")), derive_seed(config.run.seed, "adapter")
    unread = ModelSpec(section=config.policy, digest=recorded, adapter_seed=seed, references=config.references)
    if not known:
        return unread, []
    try:
        model = trained_model(config)
    except InputError as error:
        log(f"the model is not here, so what needs it is not tried: {error}")
        return unread, []
    if recorded not in ("", model.digest):
        other = f"policy.model: its files have sha256 {model.digest[:12]}, and the run's had {recorded[:12]}"
        return model.model_copy(update={"digest": recorded}), [other]
    return model, []


def recorded(described: Mapping[str, Any]) -> Mapping[str, str]:
    """Return the fingerprints of the stages' code that run.json records."""
    found: Mapping[str, str] = described.get(IDENTITY, {}).get("code", {})
    return found


def with_identity(plan: VerifyPlan, described: Mapping[str, Any]) -> VerifyPlan:
    """Add how the configuration, and prompts, rewards and code on this machine, differ from what run.json records."""
    run, before = plan.run, described.get(IDENTITY, {})
    try:
        identity = identify(run.config, run.model, run.training, run.start, run.heldout)
    except InputError as error:
        return replace(plan, notes=(*plan.notes, f"what the run was made with cannot be compared: {error}"))
    settings = changed_settings(before.get("settings", {}), identity["settings"])
    changed = [f"{each} in config.yaml, which is not what made the run" for each in settings]
    changed += [] if not run.training else named_changes(before.get(INPUTS, {}), identity[INPUTS])
    changed += [] if not run.heldout else named_changes(before.get(HELDOUT, {}), identity[HELDOUT])
    return replace(plan, changed=tuple(changed), here=identity["code"])


def evidence_of(plan: VerifyPlan) -> Evidence:
    """Gather what is recorded of code, packages, machines, settings and inputs, of the run and here."""
    run = plan.run
    processor = describe_processor(run.config.placement)
    verified_by = Machine(code=code_version(), processor=processor, versions=running_versions())
    made_by = recorded_machines(run.reader)
    return Evidence(run.reader, plan.recorded, plan.here, made_by, verified_by, plan.changed, run.problems)
