"""Open a stored run to be verified: its configuration, what is known here, and what differs from its own record."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
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
    """

    run: StoredRun
    candidates: tuple[Candidate, ...]
    chosen: str
    checks: bool
    changed: tuple[str, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]


@checked_once
def plan_verify(request: VerifyRequest) -> VerifyPlan:
    """Open the run, and choose what to compute again; an InputError names each option or key. Nothing is written."""
    found, config = requested_config(request, request.overrides, _USED)
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
    training, heldout, notes = _prompts(config, trust=request.trust_code)
    model, problems = _model(config, described)
    folders = trusted_folders(config, trust=request.trust_code)
    # What writes nothing needs no lock.
    unlocked = cast(RunLock, None)
    run = StoredRun(config, store, unlocked, model, training, heldout, stored_start(described), known_folders=folders)
    changed, unknown = recorded_differences(run, described)
    candidates, chosen = choose(request, run)
    checks = request.iterations is None and request.stages is None
    return VerifyPlan(run, candidates, chosen, checks, tuple(changed), (*problems, *unknown), tuple(notes))


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


def _model(config: RunConfig, described: Mapping[str, Any]) -> tuple[ModelSpec, list[str]]:
    """Return the model as the run recorded it, and what is wrong with the one on this machine."""
    recorded = str(described.get("model_digest", ""))
    try:
        model = trained_model(config)
    except InputError as error:
        seed = derive_seed(config.run.seed, "adapter")
        spec = ModelSpec(section=config.policy, digest=recorded, adapter_seed=seed, references=config.references)
        log(f"the model is not here, so what needs it is not tried: {error}")
        return spec, []
    if recorded not in ("", model.digest):
        other = f"policy.model: its files have sha256 {model.digest[:12]}, and the run's had {recorded[:12]}"
        return model.model_copy(update={"digest": recorded}), [other]
    return model, []


def recorded_differences(run: StoredRun, described: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Say how the stored configuration, and prompts and rewards on this machine, differ from what run.json records.

    Returns:
        What differs, settings as `key was -> is`, and why it cannot be said.
    """
    recorded: Mapping[str, Any] = described.get(IDENTITY, {})
    try:
        identity = identify(run.config, run.model, run.training, run.start, run.heldout)
    except InputError as error:
        return [], [f"what the run was made with cannot be compared: {error}"]
    settings = changed_settings(recorded.get("settings", {}), identity["settings"])
    changed = [f"{each} in config.yaml, which is not what made the run" for each in settings]
    changed += [] if not run.training else named_changes(recorded.get(INPUTS, {}), identity[INPUTS])
    changed += [] if not run.heldout else named_changes(recorded.get(HELDOUT, {}), identity[HELDOUT])
    return changed, []


def evidence_of(plan: VerifyPlan) -> Evidence:
    """Gather what is recorded of code, packages, machines, settings and inputs, of the run and here."""
    run = plan.run
    described = read_description(run.store)
    recorded: Mapping[str, str] = described.get(IDENTITY, {}).get("code", {})
    here: Mapping[str, str] = {}
    with suppress(InputError):
        here = identify(run.config, run.model, (), run.start, ())["code"]
    processor = describe_processor(run.config.placement)
    verified_by = Machine(code=code_version(), processor=processor, versions=running_versions())
    return Evidence(run.reader, recorded, here, recorded_machines(run.reader), verified_by, plan.changed, run.problems)
