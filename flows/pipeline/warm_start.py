"""Start a run from another run's policy: its weights, with a new optimizer."""

from collections.abc import Iterator, Mapping
from typing import Any

from configs.schema import RunConfig
from flows.preflight.model import trained_model
from grpo_core.errors import InputError, raise_all
from tasks.runs.lookup import find_run, read_description
from tasks.runs.stored import START, choose_policy, stored_config, stored_start
from tasks.storage.artifacts.reference import PolicyRef
from tasks.storage.artifacts.store import ArtifactStore

_PLACE = "run.continue_from"


def settle_start(config: RunConfig, described: Mapping[str, Any]) -> tuple[RunConfig, PolicyRef | None]:
    """Find the policy that a run starts from; None if that is the model as given.

    A run that exists goes on from where it started, even if the setting names no version or is left out since.

    Args:
        described: the content of run.json; empty for a new run.

    Returns:
        The configuration with run and version of that policy, and the policy as version 0 of this run.

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
    name, at, version = wanted.partition("@")
    if at and not (version.isdigit() and int(version)):
        raise InputError(_PLACE, wanted, "Write RUN, or RUN@N for its policy version N, from 1.")
    if "/" in name:
        hint = f"Give the name of a run of storage.root, {config.storage.root}, and no path."
        raise InputError(_PLACE, wanted, hint)
    if name == config.run.name:
        raise InputError(_PLACE, wanted, "A run cannot start from itself; give the new run its own name with --run.")
    try:
        store = find_run(name, config.storage.root)
        found, _ = choose_policy(store, int(version) if at else None, "")
    except InputError as error:
        raise InputError(_PLACE, wanted, error.hint) from error
    if not found.version:
        raise InputError(_PLACE, wanted, f"{name} has no valid policy yet; leave this out, or name another run.")
    raise_all(model_problems(store, stored_config(store), config, found.version, "name another policy"))
    # A moving average and an old policy begin anew, like the optimizer.
    start = found.with_copies("reference").model_copy(update={"version": 0})
    return _continuing(config, f"{store.run}@{found.version}"), start


def _continuing(config: RunConfig, source: str) -> RunConfig:
    return config.model_copy(update={"run": config.run.model_copy(update={"continue_from": source})})


def model_problems(
    store: ArtifactStore, previous: RunConfig, config: RunConfig, version: int, otherwise: str
) -> Iterator[InputError]:
    """Yield what differs of the model and its trained part from those of a run's policy.

    Args:
        previous: configuration of the run in the store.
        version: version of its policy; 0 is the initial model, whose trained part may be another.
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
