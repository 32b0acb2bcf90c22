"""Read stored configurations, iterations and evaluations for flows that use them again; all verified."""

import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from configs.loader import as_config
from configs.schema import RunConfig
from configs.training import change_algorithm
from configs.yaml_files import parse_yaml
from grpo_core.errors import InputError, raise_all
from tasks.prompts.files import find_input, nearest_names
from tasks.runs import layout
from tasks.runs.lookup import CONFIG_FILE, read_config_file, spans
from tasks.runs.reader import RunReader
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.files import is_local
from tasks.storage.parquet import read_columns

_OF_FUNCTIONS = frozenset({"function", "loss"})
_PATHS = frozenset({"model", "adapter", "prompts", "targets", "weights", "head"}) | _OF_FUNCTIONS
"""Keys of a configuration whose values can be paths; a function's is FILE.py:NAME."""


def stored_config(store: ArtifactStore, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the configuration that a run was made with; of a replay, without its replay section.

    Its relative paths lead from the working directory to what they named where the run was started, and storage.root
    to where the run is now. InputError if config.yaml is missing, damaged, or not a configuration.
    """
    place = f"{store.run}/{CONFIG_FILE}"
    values = parse_yaml(read_config_file(store).decode(errors="replace"), place)
    if not isinstance(values, dict):
        raise InputError(place, values, "It has to be a mapping with the sections run, policy, ...")
    values.pop("replay", None)
    if isinstance(policy := values.get("policy"), dict) and policy.get("kind") is None:
        # Otherwise it would be read from the model's files, before anybody has agreed to read what a stranger names.
        raise InputError(f"{place}, policy.kind", None, "A run stores it; add the kind of the model that was trained.")
    # An earlier run has another name than when it was made.
    if "~" in store.run and isinstance(values.get("run"), dict):
        values["run"]["name"] = store.run
    locate_paths(values, store)
    if isinstance(storage := values.setdefault("storage", {}), dict):
        own, local = str(storage.get("root")), is_local(store.filesystem)
        if Path(own).absolute() != Path(store.root) if local else own.rstrip("/") != store.url:
            storage["root"] = os.path.relpath(store.root) if local else store.url
    change_algorithm(values, overrides)
    return as_config(values, overrides)


def locate_paths(values: Any, store: ArtifactStore) -> None:
    """Replace the paths in plain values that lead from where a run was started by those from the working directory."""
    above = _folders_above(values) if is_local(store.filesystem) else ()
    started = os.path.relpath(os.path.join(store.root, *[".."] * len(above)))

    def located(path: str) -> str:
        known = path if os.path.exists(path) else find_input(path, [store])
        there = os.path.normpath(os.path.join(started, path))
        return known or (there if above and os.path.exists(there) else path)

    _replace_paths(values, located)


def portable(settings: dict[str, Any]) -> dict[str, Any]:
    """Replace the absolute paths in plain settings that lead below the working directory by relative ones.

    They stay where the storage root does not lead back to that folder: :func:`locate_paths` could not find it then.
    """
    here = Path.cwd()

    def stored(path: str) -> str:
        return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path

    if _folders_above(settings) or Path(settings["storage"]["root"]).parent == here:
        _replace_paths(settings, stored)
    return settings


def _folders_above(values: Any) -> tuple[str, ...]:
    """Return the folders of a storage root relative to the one that a run was started in: two of out/runs."""
    storage = values.get("storage") if isinstance(values, dict) else None
    root = str(storage.get("root", "")) if isinstance(storage, dict) else ""
    parts = Path(root).parts
    return () if Path(root).is_absolute() or {"..", "~"} & {*parts} or "://" in root else parts


def paths_beside_root(settings: dict[str, Any], store: ArtifactStore) -> dict[str, Any]:
    """Replace the paths in plain settings that :func:`stored_config` found beside the storage root by those stored."""
    folder = Path(store.root).parent

    def stored(path: str) -> str:
        found = os.path.relpath(path, folder)
        return path if Path(path).is_absolute() or found.startswith("..") or not os.path.exists(path) else found

    if is_local(store.filesystem) and Path(os.path.abspath(folder)) != Path.cwd():
        _replace_paths(settings, stored)
    return settings


def _replace_paths(value: Any, replace: Callable[[str], str]) -> None:
    for key, each in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if key in _PATHS and isinstance(each, str):
            file, colon, function = each.partition(".py:")
            if colon:
                value[key] = f"{replace(f'{file}.py')}:{function}"
            elif key not in _OF_FUNCTIONS:
                value[key] = replace(file)
        else:
            _replace_paths(each, replace)


def read_range(text: str) -> tuple[int, int]:
    """Return the first and the last iteration of `A-B` or `A`; InputError for any other text."""
    found = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", text.strip())
    if found:
        first, last = int(found[1]), int(found[2] or found[1])
        if 1 <= first <= last:
            return first, last
    raise InputError("--iterations", text, "Write the first and the last, as in 3-10, or one number; they start at 1.")


def read_iterations(
    store: ArtifactStore, chosen: tuple[int, int] | None, advantages: str
) -> tuple[layout.StoredIteration, ...]:
    """Read the iterations of a run that a policy can be trained on, in order; nothing is changed.

    Chosen are the first and last, or all that have advantages, which are `stored`, `recomputed`, or those of a
    rescoring. InputError if an iteration is missing or damaged, or there are no such advantages.
    """
    reader = RunReader(store)
    rescorings = reader.rescorings()
    known = [layout.STORED, layout.RECOMPUTED, *rescorings]
    if advantages not in known:
        hint = f"{store.run} has {', '.join(known)}. Nearest: {nearest_names(advantages, known)}."
        raise InputError("--advantages", advantages, hint)
    complete = _complete_iterations(reader)
    first, last = chosen or (complete[0], complete[-1])
    numbers = range(first, last + 1)
    if missing := [number for number in numbers if number not in complete]:
        hint = f"{store.run} has no complete iteration {missing[0]}; choose among {spans(complete)}."
        raise InputError("--iterations", f"{first}-{last}", hint)
    if advantages in rescorings:
        _require_rescored(reader, advantages, numbers)
    problems, iterations = [], []
    for number in numbers:
        try:
            iterations.append(_read_iteration(reader, number, advantages))
        except InputError as error:
            problems.append(error)
    raise_all(problems)
    return tuple(iterations)


def _require_rescored(reader: RunReader, name: str, numbers: Sequence[int]) -> None:
    rescored = [
        number
        for number in numbers
        if layout.ADVANTAGES in reader.artifact_names(layout.rescoring_folder(name, layout.iteration_folder(number)))
    ]
    if len(rescored) < len(numbers):
        chosen = f", or choose --iterations among {spans(rescored)}" if rescored else ""
        hint = f"It is not finished: run the same `grpo rescore` again{chosen}."
        value = f"{len(rescored)} of {len(numbers)} iterations"
        raise InputError(f"{reader.store.run}/{layout.rescoring_folder(name)}", value, hint)


def first_iteration(store: ArtifactStore) -> int:
    """Return the first iteration of a run that has advantages; InputError if there is none."""
    return _complete_iterations(RunReader(store))[0]


def _complete_iterations(reader: RunReader) -> list[int]:
    complete = [number for number in reader.iterations() if reader.scored_rounds(layout.iteration_folder(number))]
    if not complete:
        hint = "It has no iteration with stored rollouts and advantages; train it first, or name another run."
        raise InputError("RUN", reader.store.run, hint)
    return complete


def _read_iteration(reader: RunReader, number: int, advantages: str) -> layout.StoredIteration:
    folders = reader.scored_rounds(layout.iteration_folder(number))
    rounds = []
    for folder in folders:
        labels = reader.artifact_names(f"{folder}/{layout.REWARDS}")
        rewards = {label: _require(reader.store, f"{folder}/{layout.REWARDS}/{label}") for label in labels}
        rounds.append(layout.SamplingRound(_require(reader.store, f"{folder}/{layout.ROLLOUTS}"), rewards))
    own = advantages in (layout.STORED, layout.RECOMPUTED)
    scored = folders[-1] if own else layout.rescoring_folder(advantages, layout.iteration_folder(number))
    return layout.StoredIteration(
        number=number,
        rounds=tuple(rounds),
        advantages=_require(reader.store, f"{scored}/{layout.ADVANTAGES}"),
        samplers=read_samplers(reader.store, [each.rollouts for each in rounds]),
    )


def _require(store: ArtifactStore, folder: str) -> ArtifactRef:
    found = store.find(folder)
    if found is None:
        hint = "It is missing, or one of its files was changed; choose other --iterations."
        raise InputError(f"{store.run}/{folder}", None, hint)
    return found


def read_samplers(store: ArtifactStore, rollouts: Sequence[ArtifactRef]) -> frozenset[tuple[int, str]]:
    """Return version and digest of the policies that sampled the rows of these rollouts."""
    found: set[tuple[int, str]] = set()
    for reference in rollouts:
        folder = f"{store.root}/{reference.uri}"
        rows = read_columns(store.filesystem, folder, layout.PARTS, ("policy_version", "policy_digest"))
        found |= set(zip(*(column.to_pylist() for column in rows.columns), strict=True))
    return frozenset(found)


def find_evaluation(
    store: ArtifactStore, folder: str, config: RunConfig, policy: PolicyRef | None = None
) -> layout.StoredEvaluation | None:
    """Find the valid evaluation in a folder, with the configuration's rewards and guardrails, by this policy."""
    rewards = {section.label: f"{layout.REWARDS}/{section.label}" for section in config.rewards}
    guardrails = {section.label: f"{layout.GUARDRAILS}/{section.label}" for section in config.guardrails.rewards}
    valid: dict[str, ArtifactRef] = {}
    for stage in (layout.ROLLOUTS, layout.ADVANTAGES, *rewards.values(), *guardrails.values()):
        found = store.find(f"{folder}/{stage}")
        if found is None:
            return None
        valid[stage] = found
    # Another policy of the same version may have been evaluated here before.
    if policy is not None and read_samplers(store, [valid[layout.ROLLOUTS]]) != {(policy.version, policy.digest)}:
        return None
    return layout.StoredEvaluation(
        rollouts=valid[layout.ROLLOUTS],
        advantages=valid[layout.ADVANTAGES],
        rewards={label: valid[stage] for label, stage in rewards.items()},
        guardrails={label: valid[stage] for label, stage in guardrails.items()},
    )
