"""Choose and read stored policy versions for flows that use them again; all verified."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.policy_name import BEST, PolicyName
from configs.schema import RunConfig
from grpo_core.errors import InputError
from tasks.models.initial import copy_digests, model_digest
from tasks.runs.layout import ADVANTAGES, EVALUATIONS, STATE_FILE, policy_folder
from tasks.runs.lookup import find_run, read_description, spans
from tasks.runs.reader import RunReader
from tasks.runs.stored import stored_config
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.files import scratch_folder

START = "start"
"""Entry of run.json of a run that started from another run's policy: `from`, as RUN@N, and `policy`, the reference."""


def stored_versions(store: ArtifactStore) -> list[int]:
    """Return the policy versions that have a manifest and were not pruned, in order."""
    return [version for version in RunReader(store).policies() if _pruned(store, version) is None]


def last_version(store: ArtifactStore) -> int:
    """Return the last policy version that has a manifest and was not pruned; 0 where there is none."""
    found = reversed(RunReader(store).policies())
    return next((version for version in found if _pruned(store, version) is None), 0)


def _pruned(store: ArtifactStore, version: int) -> Mapping[str, Any] | None:
    """Return who removed the files of a version and when; None for a version that has them."""
    manifest = store.manifest_at(store.path(policy_folder(version)))
    return manifest.pruned if manifest is not None and not manifest.files else None


def heldout_rewards(store: ArtifactStore, folder: str = EVALUATIONS) -> dict[int, float]:
    """Return the mean held-out reward of the evaluations in a folder of the run, by policy version."""
    rewards: dict[int, float] = {}
    for version in RunReader(store).evaluations(folder):
        manifest = store.manifest_at(store.path(f"{folder}/{version:06d}/{ADVANTAGES}"))
        metrics = manifest.described.get("metrics") if manifest else None
        reward = metrics.get("reward") if isinstance(metrics, Mapping) else None
        if isinstance(reward, float):
            rewards[version] = reward
    return rewards


def chosen_version(store: ArtifactStore, chosen: str | None) -> int | None:
    """Return the version that a person chose: a number, `best` by held-out reward, or None for the last valid one."""
    if chosen != BEST:
        return None if chosen is None else int(chosen)
    stored = {0, *stored_versions(store)}
    rewards = {version: reward for version, reward in heldout_rewards(store).items() if version in stored}
    if not rewards:
        numbers = spans(sorted(stored - {0}))
        hint = f"No stored version was evaluated; leave it out, give a version ({numbers}), or run `grpo evaluate`."
        raise InputError("RUN", f"{store.run}@{chosen}", hint)
    return max(rewards, key=rewards.__getitem__)


def choose_policy(store: ArtifactStore, version: int | None, model_digest: str) -> tuple[PolicyRef, tuple[str, ...]]:
    """Return the version, 0 for the model and None for the last valid one, and notes on skipped ones."""
    if version:
        return read_policy(store, version), ()
    notes: list[str] = []
    for each in reversed(RunReader(store).policies() if version is None else []):
        # One manifest after the other: most often the last one is valid.
        if _pruned(store, each) is not None:
            continue
        found = _find_policy(store, each)
        if isinstance(found, PolicyRef):
            return found, tuple(notes)
        notes.append(f"{store.run}: version {each} is skipped: {found}")
    return stored_start(read_description(store)) or PolicyRef(version=0, digest=model_digest), tuple(notes)


def read_policy(store: ArtifactStore, version: int) -> PolicyRef:
    """Return a version of the policy with its optimizer; InputError, with the versions there are, if not valid."""
    pruned = _pruned(store, version)
    # Without a manifest nothing is wrong with it.
    found = (_find_policy(store, version) or None) if pruned is None else None
    if isinstance(found, PolicyRef):
        return found
    # To know which versions there are, the manifest of each is read.
    stored = stored_versions(store)
    if found is not None:
        hint = f"{found}. Choose another version, or start the run again: damaged files are made again."
    else:
        by, on = (pruned or {}).get("by", "grpo prune"), (pruned or {}).get("on", "an earlier day")
        gone = f"Its files were removed by `{by}` on {on}; " if pruned is not None else ""
        hint = f"{gone}{store.run} has policy versions {spans(stored)}. Choose one of these; 0 is the model as given."
    raise InputError("RUN", f"{store.run}@{version}", hint)


def stored_start(described: Mapping[str, Any]) -> PolicyRef | None:
    """Return version 0 of a run that started from another run's policy, by its run.json; None for any other."""
    start = described.get(START)
    return PolicyRef.model_validate(start["policy"]) if start is not None else None


def adapter_version(config: RunConfig) -> ArtifactRef | None:
    """Return the checkpoint that `policy.adapter: RUN@VERSION` means, or None; InputError if there is none."""
    name = config.policy.adapter or ""
    named = PolicyName.parse(name)
    # The best of a run that goes on would be another one tomorrow.
    if not (named.version or "").isdigit() or "/" in named.run or Path(name).expanduser().is_dir():
        return None
    try:
        store = find_run(named.run, config.storage.root)
        version = chosen_version(store, named.version)
        checkpoint = read_policy(store, version).checkpoint if version else None
    except InputError as error:
        raise InputError("policy.adapter", name, error.hint) from error
    if checkpoint is None:
        raise InputError("policy.adapter", name, "Version 0 is the model as it was given; leave policy.adapter out.")
    source, known = stored_config(store).policy, read_description(store).get("model_digest")
    digest = model_digest(config.policy.model, config.policy.revision)
    # That of a run that started from an adapter covers the adapter too.
    if source.adapter is None and known not in (None, digest):
        models = f"{source.model} ({known[:12]}), and policy.model is {config.policy.model} ({digest[:12]})"
        raise InputError("policy.adapter", name, f"It was trained over {models}; set policy.model to that one.")
    return checkpoint


def _find_policy(store: ArtifactStore, version: int) -> PolicyRef | str:
    """Return the version, or what is wrong with its files."""
    reader = RunReader(store)
    found = reader.find(policy_folder(version))
    if found is None or not reader.verify(found):
        return "; ".join(f"{each.place}: {each.reason}" for each in reader.damages)
    with scratch_folder() as fetched:
        folder = reader.local_folder(found.reference, fetched)
        digest = json.loads((folder / STATE_FILE).read_text())["policy_digest"]
        copies = copy_digests(folder)
    return PolicyRef(version=version, digest=digest, checkpoint=found.reference, copies=copies)
