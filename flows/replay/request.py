"""What `grpo replay` is asked for -> a checked plan, or every mistake at once, before a model loads."""

import json
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, InstanceOf

from configs.loader import read_config
from configs.schema import CORRECTION, ReplayConfig, ReplaySection, RunConfig, as_replay
from grpo_core.errors import InputError, InputErrors
from tasks.models.files import model_digest
from tasks.runs.lookup import find_run
from tasks.runs.records import StoredIteration
from tasks.runs.stored import (
    RECOMPUTED,
    STORED,
    first_iteration,
    read_iterations,
    read_policy,
    read_range,
)
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.run_description import CONFIG_FILE, read_config_file, read_description
from tasks.storage.artifacts.store import ArtifactStore

MAX_STALENESS = 4
"""Versions; as many as systems allow that sample while they train (Fu et al., 2025, AReaL, arXiv:2505.24298)."""

# What they decide is in the stored rollouts, or is asked for by an option.
_FIXED = {
    "data": "Prompts are those of the stored rollouts; leave it out.",
    "storage": "A replay is kept beside its source; name that root with --root.",
    "replay": "Give it as an option; see grpo replay --help.",
    "run.name": "Name the replay with --run.",
    "run.iterations": "A replay makes one update for each of the source's --iterations.",
    "policy.kind": "The stored rollouts are of the source's model; leave it out.",
    "policy.model": "The stored rollouts are of the source's model; leave it out.",
}


@dataclass(frozen=True)
class ReplayRequest:
    """The options as they were given.

    Attributes:
        source: a run under the root, or the path of its folder.
        root: where runs are kept.
        name: of the replay; None for `<source>-replay`.
        advantages: `stored`, `recomputed` or a rescoring's name; None for stored, unless an override changes them.
        iterations: `A-B` or `A`; None for all.
        policy: version of the source to start from.
        max_staleness: versions.
        overrides: `section.key=value`.
    """

    source: str
    root: str = "runs"
    name: str | None = None
    advantages: str | None = None
    iterations: str | None = None
    policy: int = 0
    max_staleness: int = MAX_STALENESS
    overrides: tuple[str, ...] = ()


class ReplayPlan(BaseModel):
    """What a replay does. Prefect's server is told the configuration alone: all stored iterations may be too much.

    Attributes:
        config: of the replay.
        start: the source's policy that is trained; None for the model as it was given.
        iterations: what it is trained on, in order.
        before: the source's advantages of the iteration before these, which hold the running moments so far; None at
            the first, and where no reward asks for them.
    """

    model_config = ConfigDict(frozen=True)

    config: ReplayConfig
    start: PolicyRef | None
    iterations: tuple[InstanceOf[StoredIteration], ...] = Field(exclude=True)
    before: ArtifactRef | None = Field(exclude=True)


def plan_replay(request: ReplayRequest) -> ReplayPlan:
    """Find what is stored, and check that it can be used as asked.

    Raises:
        InputError, InputErrors: with the option or the key, the value and the hint.
    """
    _require_options(request)
    store = find_run(request.source, request.root)
    name = request.name or f"{store.run}-replay"
    _require_own_place(store, name)
    chosen = None if request.iterations is None else read_range(request.iterations)
    iterations = read_iterations(store, chosen, request.advantages or STORED)
    previous, config = _configurations(request, store, name, updates=len(iterations))
    start = read_policy(store, request.policy) if request.policy else None
    advantages = _advantages(request, previous, config)
    problems = [
        *_policy_problems(store, previous, config, start),
        *_advantages_problems(request, previous, config),
        *_staleness_problems(request, iterations),
    ]
    if problems:
        raise InputErrors(problems)
    section = ReplaySection(
        source=store.run,
        policy=request.policy,
        iterations=tuple(iteration.number for iteration in iterations),
        advantages=advantages,
        max_staleness=request.max_staleness,
        correction=CORRECTION,
    )
    return ReplayPlan(
        config=as_replay(config, section),
        start=start,
        iterations=iterations,
        before=_advantages_before(store, config, iterations),
    )


def _require_options(request: ReplayRequest) -> None:
    problems = [
        InputError(place, value, "Give 0 or more.")
        for place, value in (("--policy", request.policy), ("--max-staleness", request.max_staleness))
        if value < 0
    ]
    for override in request.overrides:
        path = override.partition("=")[0].strip()
        hint = next((hint for key, hint in _FIXED.items() if path == key or path.startswith(f"{key}.")), None)
        if hint:
            problems.append(InputError("--set", override, hint))
    if problems:
        raise InputErrors(problems)


def _require_own_place(source: ArtifactStore, name: str) -> None:
    if name == source.run:
        raise InputError("--run", name, "It is the source, which is never changed; give the replay another name.")
    held = source.read_shared(f"{name}/{CONFIG_FILE}")
    if held is not None and not re.search(rb"^replay:", held, re.MULTILINE):
        raise InputError("--run", name, "This is a run that was not replayed; give the replay another name.")


def _configurations(
    request: ReplayRequest, store: ArtifactStore, name: str, *, updates: int
) -> tuple[RunConfig, RunConfig]:
    """The source's configuration, and the same as it is asked for."""
    content = read_config_file(store)
    own = {
        "run.name": name,
        "run.iterations": request.policy + updates,
        "storage.root": root_of(request.source, request.root, store),
    }
    with tempfile.TemporaryDirectory() as fetched:
        path = Path(fetched) / f"{store.run}.yaml"
        path.write_bytes(content)
        requested = [*request.overrides, *(f"{key}={json.dumps(value)}" for key, value in own.items())]
        return read_config(path), read_config(path, requested)


def root_of(source: str, root: str, store: ArtifactStore) -> str:
    """The storage root as the person writes it: a path that depends on this machine shall not get into files."""
    if "/" not in source and ArtifactStore(root, source).path() == store.path():
        return root
    parent = source.rstrip("/").rpartition("/")[0]
    return parent or os.path.relpath(store.root)


def _mix(config: RunConfig) -> list[object]:
    return [(section.label, section.weight) for section in config.rewards]


def _advantages(request: ReplayRequest, previous: RunConfig, config: RunConfig) -> str:
    if request.advantages is not None:
        return request.advantages
    changed = config.advantages != previous.advantages or _mix(config) != _mix(previous)
    return RECOMPUTED if changed else STORED


def _advantages_before(
    store: ArtifactStore, config: RunConfig, iterations: Sequence[StoredIteration]
) -> ArtifactRef | None:
    """Weights alone can change, and the moments are of scaled values: those that the source stored are these."""
    first = iterations[0].number
    if first <= first_iteration(store) or all(section.normalize != "running" for section in config.rewards):
        return None
    return read_iterations(store, (first - 1, first - 1), STORED)[0].advantages


def _policy_problems(
    store: ArtifactStore, previous: RunConfig, config: RunConfig, start: PolicyRef | None
) -> Iterator[InputError]:
    trained = {"lora", "frozen", "dtype"}
    if start is not None:
        was, now = (each.policy.model_dump(include=trained) for each in (previous, config))
        for key in sorted(trained):
            if was[key] != now[key]:
                hint = f"Version {start.version} was trained with {was[key]}; start from the model with --policy 0."
                yield InputError(f"policy.{key}", now[key], hint)
    try:
        known, present = _model_of(store), model_digest(config.policy.model)
    except InputError as error:
        yield error
        return
    if known not in (None, present):
        hint = f"Its files have changed since the source sampled with it ({known[:12]}); put those back."
        yield InputError("policy.model", present[:12], hint)


def _model_of(store: ArtifactStore) -> str | None:
    """Digest of the model that the source began with; None where nothing says it."""
    return read_description(store).get("model_digest")


def _advantages_problems(request: ReplayRequest, previous: RunConfig, config: RunConfig) -> Iterator[InputError]:
    chosen = _advantages(request, previous, config)
    stored = {section.label: section for section in previous.rewards}
    for index, section in enumerate(config.rewards):
        known = stored.get(section.label)
        if known is None or section.model_copy(update={"weight": known.weight}) != known:
            hint = f"The source has scores of {', '.join(stored)}, as they were configured; weights alone can change."
            yield InputError(f"rewards.{index}", section.label, hint)
    changed = config.advantages != previous.advantages or _mix(config) != _mix(previous)
    if changed and chosen != RECOMPUTED:
        hint = "The settings that --set changes have no effect on these; give --advantages recomputed, or leave it out."
        yield InputError("--advantages", chosen, hint)
    if chosen == RECOMPUTED and config.advantages.kl_coef and not previous.advantages.kl_coef:
        hint = "The stored rollouts hold no log-probs of the reference; set update.kl_coef in its place."
        yield InputError("advantages.kl_coef", config.advantages.kl_coef, hint)
    named = any(override.startswith("update.mismatch.mode") for override in request.overrides)
    if named and config.update.mismatch.mode == "none" and request.max_staleness:
        hint = "Rows that other weights sampled need their importance weights; set it to truncate or mask."
        yield InputError("update.mismatch.mode", "none", hint)


def _staleness_problems(request: ReplayRequest, iterations: Sequence[StoredIteration]) -> Iterator[InputError]:
    for done, iteration in enumerate(iterations):
        version = request.policy + done
        needed = iteration.staleness(version)
        if needed <= request.max_staleness:
            continue
        samplers = sorted({sampler for sampler, _ in iteration.samplers})
        hint = (
            f"No row would be left: those of iteration {iteration.number} were sampled by version "
            f"{', '.join(map(str, samplers))}, and version {version} is trained on them. Allow {needed}, choose other "
            f"--iterations, or start from another --policy."
        )
        yield InputError("--max-staleness", request.max_staleness, hint)
        # The others are as far away; one says it.
        return
