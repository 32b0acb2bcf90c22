"""What a run's results were made with, what the next start keeps of them, and how it starts from another run's policy.

A run's identity is kept in run.json: the settings that determine results, the model, the prompts, what the scores come
from, and the code of each stage. A start with another identity makes what is stored the earlier run NAME~1, then NAME~2
and so on: a run like any other, whose stages are found by their keys, as those of every run of the root.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from configs.identity import run_identity
from configs.policy_name import PolicyName
from configs.schema import ReplayConfig, RunConfig
from flows.pipeline.changes import HELDOUT, INPUTS, changed_images, identity_difference, inputs_of, prompt_inputs
from flows.preflight.model import trained_model
from grpo_core.errors import InputError, raise_all
from tasks.execution.caching import accept_code, accepted_fingerprint
from tasks.execution.call import clear_calls
from tasks.execution.fingerprint import code_fingerprint
from tasks.execution.stage import STAGES, stage_named
from tasks.models.resident import ModelSpec
from tasks.progress import log
from tasks.prompts.curriculum import PromptSet
from tasks.reports.text import counted
from tasks.rewards.score_rewards import scores_key
from tasks.runs.layout import is_result
from tasks.runs.lookup import CONFIG_FILE, find_run, read_description
from tasks.runs.reader import RunReader
from tasks.runs.stored import paths_beside_root, stored_config
from tasks.runs.stored_policies import START, choose_policy, chosen_version, stored_start
from tasks.storage.artifacts.reference import PolicyRef
from tasks.storage.artifacts.store import LINEAGE, RUN_FILE, ArtifactStore, open_store
from tasks.storage.files import matching

IDENTITY, ACCEPTED = "identity", "accepted_code"
_BECOMES = ".becomes~"
"""A file of this name and a number in a run's folder: its results are being moved to the earlier run of that number."""


def identify(
    config: RunConfig,
    model: ModelSpec,
    training: Sequence[PromptSet],
    start: PolicyRef | None,
    heldout: Sequence[PromptSet],
) -> dict[str, Any]:
    """Return a run's identity as JSON values; `start` is the policy of another run, or None for the model."""
    settings = run_identity(config)
    if isinstance(config, ReplayConfig):
        # Those of its source, which differ by the folder that it is started in.
        settings = paths_beside_root(settings, open_store(config.storage, config.run.name))
    for section in settings["rewards"].values():
        # An address or a path among them may change; what they determine is in the provenance.
        del section["settings"]
    prompts = [[prompt.prompt_id, dict(prompt.columns)] for each in training for prompt in each.prompts]
    targets = [target and target.sha256 for each in training for target in each.targets]
    losses = {stream: update.custom_loss for stream, update in config.updates.items() if update.custom_loss is not None}
    return {
        "settings": settings,
        "scores": [scores_key(section) for section in config.rewards],
        "model": model.digest,
        **({"start": start.digest} if start else {}),
        **({"losses": losses} if losses else {}),
        "prompts": hashlib.sha256(json.dumps([prompts, targets], sort_keys=True).encode()).hexdigest(),
        "code": {name: accepted_fingerprint(roots) for name, roots in stage_code(config, model).items()},
        INPUTS: inputs_of(config, training),
        HELDOUT: prompt_inputs("evaluate", config.evaluate, heldout),
    }


def lineage_digest(identity: Mapping[str, Any]) -> str:
    """Return the sha256 of an identity."""
    determining = {name: value for name, value in identity.items() if name not in (INPUTS, HELDOUT)}
    return hashlib.sha256(json.dumps(determining, sort_keys=True).encode()).hexdigest()


def stage_code(config: RunConfig, model: ModelSpec) -> dict[str, tuple[str, ...]]:
    """Return where the code of each stage begins, by the stage's name; each reward counts as a separate stage."""
    code = {}
    for name in STAGES:
        if name == "score reward":
            for section in config.rewards:
                code[f"score {section.label}"] = stage_named(name).roots({"section": section})
        else:
            code[name] = stage_named(name).roots({"model": model, "rollout": config.rollout, "updates": config.updates})
    return code


def resolve_code(code: Mapping[str, tuple[str, ...]], described: Mapping[str, Any], *, accept: bool) -> dict[str, str]:
    """Let the keys of this process name the code that the run's results were made with, where a change was accepted.

    Args:
        code: from `stage_code`.
        described: the content of run.json; empty for a new run.
        accept: whether code that differs from the recorded code is accepted from here on.

    Returns:
        For each fingerprint of changed code, the fingerprint that the keys contain; run.json records it.
    """
    accepted: dict[str, str] = dict(described.get(ACCEPTED, {}))
    recorded: Mapping[str, str] = described.get(IDENTITY, {}).get("code", {})
    if accept:
        for name, roots in code.items():
            current, before = code_fingerprint(roots), recorded.get(name)
            if before is not None and accepted.get(current, current) != before:
                accepted[current] = before
                log(f"{name}: changed code is accepted; stored results are kept")
    accept_code(accepted)
    return accepted


def read_valid_description(store: ArtifactStore) -> Mapping[str, Any] | None:
    """Return the content of run.json; None where it is missing or damaged."""
    try:
        return read_description(store) or None
    except InputError:
        return None


class ChangedRunError(InputError):
    """A start has other settings, code or prompts than the policies that the run has stored, as `difference` says."""

    def __init__(self, config: RunConfig, difference: str, iterations: int) -> None:
        """Say what is different, and what can be done."""
        self.config, self.difference, self.iterations, name = config, difference, iterations, config.run.name
        if isinstance(config, ReplayConfig):
            choices = "--run NAME replays in a new run; --set run.on_change=restart starts over"
        else:
            choices = (
                "--run NAME trains in a new run and reuses the stages that are unchanged; --continue-from "
                f"{name} --run NAME trains a new run from its weights; --restart (run.on_change: restart) begins at "
                "iteration 1"
            )
        trained = counted(iterations, "iteration")
        hint = (
            f"It has trained {trained}, and {difference}. Choose: {choices}, and its results become the run {name}~1 "
            "(~2, if there is one)."
        )
        super().__init__("run.name", name, hint)


def find_change(
    config: RunConfig,
    store: ArtifactStore,
    described: Mapping[str, Any] | None,
    identity: Mapping[str, Any],
    training: Sequence[PromptSet],
) -> ChangedRunError | None:
    """Return how a start differs from what made the stored policies; None if it does not, or if there are none."""
    # A restart that was killed while it moved the results is finished by the next start.
    if described is None or described.get(LINEAGE) == lineage_digest(identity) or _earlier_run(store) is not None:
        return None
    trained = len(RunReader(store).policies())
    return ChangedRunError(config, _difference(store, described, identity, training), trained) if trained else None


def _difference(
    store: ArtifactStore, described: Mapping[str, Any], identity: Mapping[str, Any], training: Sequence[PromptSet]
) -> str:
    previous = described.get(IDENTITY, {})
    images = changed_images(store, training) if previous.get("prompts") != identity["prompts"] else ()
    return "; ".join([identity_difference(previous, identity), *images])


def make_earlier_run(
    store: ArtifactStore,
    described: Mapping[str, Any] | None,
    identity: Mapping[str, Any],
    training: Sequence[PromptSet],
) -> Mapping[str, Any] | None:
    """Make what another identity made an earlier run, if there are results; `end_earlier_run` has to follow.

    run.json and config.yaml are copied and stay until they are written again, so a start after a kill knows the same.
    Returned is the description, or None if it is not that of the folder any more.
    """
    if described is not None and described.get(LINEAGE) == lineage_digest(identity):
        return described
    if any(is_result(name) for name in RunReader(store).names()):
        # A worker that picks up a request of the previous configuration finds nothing.
        clear_calls(store)
        missing = f"{RUN_FILE} is missing or damaged, so nothing says how its results were made"
        reason = missing if described is None else _difference(store, described, identity, training)
        earlier = store.earlier_runs()
        number = 1 + int(earlier[0].rpartition("~")[2]) if earlier else 1
        log(f"{store.run}: {reason}; its results are now the run {store.run}~{number}, and what is valid is used again")
        store.write_file(f"{_BECOMES}{number}", reason.encode())
        finish_earlier_run(store)
    return None


def finish_earlier_run(store: ArtifactStore) -> None:
    """Move what is left to the earlier run that a start has begun to make; nothing happens where none has."""
    run = _earlier_run(store)
    if run is None:
        return
    names = [name for name in RunReader(store).names() if not name.startswith(".")]
    store.give_to(run, [name for name in names if name not in (CONFIG_FILE, RUN_FILE)])
    for name in (CONFIG_FILE, RUN_FILE):
        content = store.read_file(name)
        if content is not None and store.read_shared(f"{run}/{name}") is None:
            store.write_file(f"{run}/{name}", content, shared=True)


def end_earlier_run(store: ArtifactStore) -> None:
    """Note that the earlier run is complete, once the run has its own description."""
    for path in matching(store.filesystem, store.path(), f"{_BECOMES}*"):
        store.filesystem.rm_file(path)


def _earlier_run(store: ArtifactStore) -> str | None:
    found = [name for name in RunReader(store).names() if name.startswith(_BECOMES)]
    return f"{store.run}~{found[0].removeprefix(_BECOMES)}" if found else None


_PLACE = "run.continue_from"


def resolve_start(config: RunConfig, described: Mapping[str, Any]) -> tuple[RunConfig, PolicyRef | None]:
    """Find the policy that a run starts from, as version 0 of this run; None if that is the model as given.

    A run that exists continues from where it started, even if the setting names no version or is left out since. The
    configuration that is returned has run and version of that policy.

    Raises:
        InputError: there is no such policy, or it is of another model.
    """
    wanted, start = config.run.continue_from, stored_start(described)
    if start is not None:
        source = str(described[START]["from"])
        if wanted in (None, source, source.partition("@")[0]):
            return _continuing(config, source), start
    if wanted is None:
        return config, None
    named = PolicyName.parse(wanted)
    name = named.run
    if "@" in name or named.version == "0":
        raise InputError(_PLACE, wanted, "Write RUN, RUN@N for its policy version N, from 1, or RUN@best.")
    if "/" in name:
        hint = f"Give the name of a run of storage.root, {config.storage.root}, and no path."
        raise InputError(_PLACE, wanted, hint)
    if name == config.run.name:
        raise InputError(_PLACE, wanted, "A run cannot start from itself; give the new run its own name with --run.")
    try:
        store = find_run(name, config.storage.root)
        found, _ = choose_policy(store, chosen_version(store, named.version), "")
    except InputError as error:
        raise InputError(_PLACE, wanted, error.hint) from error
    if not found.version:
        hint = f"{name} has no such policy that it made itself; leave this out, or name another run or version."
        raise InputError(_PLACE, wanted, hint)
    raise_all(model_problems(store, stored_config(store), config, found.version, "name another policy"))
    # A moving average and an old policy start over, like the optimizer.
    start = found.with_copies("reference").model_copy(update={"version": 0})
    return _continuing(config, f"{store.run}@{found.version}"), start


def _continuing(config: RunConfig, source: str) -> RunConfig:
    return config.model_copy(update={"run": config.run.model_copy(update={"continue_from": source})})


def model_problems(
    store: ArtifactStore, previous: RunConfig, config: RunConfig, version: int, otherwise: str
) -> Iterator[InputError]:
    """Yield what differs of the model and its trained part from those of a version of a run's policy.

    Args:
        version: 0 is the initial model, whose trained part may be another.
        otherwise: what to do instead, for the hint.
    """
    if version:
        trained = {"train", "lora", "denoising_lora", "adapter", "frozen", "dtype"}
        was, now = (each.policy.model_dump(mode="json", include=trained) for each in (previous, config))
        for key in sorted(was):
            if was[key] != now[key]:
                hint = f"Version {version} of {store.run} was trained with {was[key]}; set that, or {otherwise}."
                yield InputError(f"policy.{key}", now[key], hint)
    try:
        known, current = read_description(store).get("model_digest"), trained_model(config).digest
    except InputError as error:
        yield error
        return
    if known not in (None, current):
        hint = f"Its files are not those that {store.run} was trained with ({known[:12]}); restore them."
        yield InputError("policy.model", current[:12], hint)
