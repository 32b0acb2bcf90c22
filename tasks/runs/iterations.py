"""What a run has stored that can be scored again or learned from: rollouts, rewards, advantages and policies."""

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from grpo_core.errors import InputError, InputErrors
from tasks.storage.artifacts.sampling_round import SamplingRound
from tasks.prompts.files import nearest_names
from tasks.models.files import REFERENCE_FOLDER, weights_digest
from tasks.storage.artifacts.reader import ArtifactReader

from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.tables.schemas import SCHEMA_VERSION
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.artifacts.checkpoint_files import STATE_FILE
from tasks.storage.artifacts.run_description import RUN_FILE

STORED, RECOMPUTED = "stored", "recomputed"
RESCORED = "rescored"
POLICIES = "policies"
_DRAW = re.compile(r"round_\d{2,}")


@dataclass(frozen=True)
class StoredIteration:
    """One iteration of the source, every file verified.

    Attributes:
        number: in the source.
        draws: rollouts and their rewards.
        advantages: of the samples of all draws.
        samplers: version and digest of the policies that sampled the rows.
    """

    number: int
    rounds: tuple[SamplingRound, ...]
    advantages: ArtifactRef
    samplers: frozenset[tuple[int, str]]

    def staleness(self, version: int) -> int:
        """Versions between the nearest of its rows and a policy that is trained on them."""
        return min(abs(version - sampler) for sampler, _ in self.samplers)


def read_range(text: str) -> tuple[int, int]:
    """`A-B` or `A` as the first and the last iteration.

    Raises:
        InputError: neither of the two.
    """
    found = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", text.strip())
    if found:
        first, last = int(found[1]), int(found[2] or found[1])
        if 1 <= first <= last:
            return first, last
    raise InputError("--iterations", text, "Write the first and the last, as in 3-10, or one number; they start at 1.")


def read_iterations(
    store: ArtifactStore, chosen: tuple[int, int] | None, advantages: str
) -> tuple[StoredIteration, ...]:
    """The iterations of a run that a policy can be trained on, in order.

    Args:
        store: at the run; nothing in it is changed.
        chosen: first and last; None for all up to the last that is whole.
        advantages: `stored`, `recomputed`, or the name of a rescoring.

    Raises:
        InputErrors: an iteration that is not there or not whole, or no such advantages.
    """
    _require_advantages(store, advantages)
    reader = ArtifactReader(store)
    held = _held(reader)
    first, last = chosen or (held[0], held[-1])
    numbers = range(first, last + 1)
    missing = [number for number in numbers if number not in held]
    if missing:
        found = f"{held[0]} to {held[-1]}" if held == list(range(held[0], held[-1] + 1)) else str(held)[1:-1]
        hint = f"{store.run} has no whole iteration {missing[0]}; whole are {found}. Choose among these."
        raise InputErrors([InputError("--iterations", f"{first}-{last}", hint)])
    problems: list[InputError] = []
    iterations = []
    for number in numbers:
        try:
            iterations.append(_read_iteration(reader, number, advantages))
        except InputError as error:
            problems.append(error)
    if problems:
        raise InputErrors(problems)
    return tuple(iterations)


def first_iteration(store: ArtifactStore) -> int:
    """The first whole iteration of a run.

    Raises:
        InputErrors: there is none.
    """
    return _held(ArtifactReader(store))[0]


def _held(reader: ArtifactReader) -> list[int]:
    held = [number for number in iteration_numbers(reader) if _round_folders(reader, _place(number))]
    if not held:
        hint = "It holds no iteration with stored rollouts and advantages; train it first, or name another run."
        raise InputErrors([InputError("RUN", reader.store.run, hint)])
    return held


def _place(number: int) -> str:
    return f"iteration_{number:06d}"


def _require_advantages(store: ArtifactStore, name: str) -> None:
    if name in (STORED, RECOMPUTED):
        return
    reader = ArtifactReader(store)
    known = [STORED, RECOMPUTED, *reader.names(RESCORED)]
    if name not in known:
        hint = f"{store.run} has {', '.join(known)}. Nearest: {nearest_names(name, known)}."
        raise InputErrors([InputError("--advantages", name, hint)])


def round_names(reader: ArtifactReader, place: str) -> list[str]:
    """Folders of an iteration's later draws, in order."""
    return [name for name in reader.names(place) if _DRAW.fullmatch(name)]


def _round_folders(reader: ArtifactReader, place: str) -> list[str]:
    """Folders of the draws that the last advantages cover; empty where there are none."""
    folders = [place, *(f"{place}/{name}" for name in round_names(reader, place))]
    scored = [index for index, folder in enumerate(folders) if "advantages.manifest.json" in reader.names(folder)]
    return folders[: scored[-1] + 1] if scored else []


def _read_iteration(reader: ArtifactReader, number: int, advantages: str) -> StoredIteration:
    store, folders = reader.store, _round_folders(reader, _place(number))
    rounds = tuple(_read_round(reader, folder) for folder in folders)
    if advantages in (STORED, RECOMPUTED):
        scored = _find(store, f"{folders[-1]}/advantages")
    else:
        rescored = f"{RESCORED}/{advantages}/{_place(number)}"
        scored = _find(store, f"{([rescored, *_round_folders(reader, rescored)])[-1]}/advantages")
    return StoredIteration(number, rounds, scored, samplers(store, [draw.rollouts for draw in rounds]))


def _read_round(reader: ArtifactReader, folder: str) -> SamplingRound:
    labels = reader.artifact_names(f"{folder}/rewards")
    rewards = {label: _find(reader.store, f"{folder}/rewards/{label}") for label in labels}
    return SamplingRound(_find(reader.store, f"{folder}/rollouts"), rewards)


def _find(store: ArtifactStore, folder: str) -> ArtifactRef:
    found, place = store.find(folder), f"{store.run}/{folder}"
    if found is None:
        raise InputError(place, None, "It is missing, or a file of it is changed; choose other --iterations.")
    if found.schema_version != SCHEMA_VERSION:
        hint = f"This program reads version {SCHEMA_VERSION}; use the version that wrote it."
        raise InputError(place, f"schema version {found.schema_version}", hint)
    return found


def samplers(store: ArtifactStore, rollouts: Sequence[ArtifactRef]) -> frozenset[tuple[int, str]]:
    """Number and digest of the policies that sampled the rows."""
    found: set[tuple[int, str]] = set()
    for reference in rollouts:
        for path in sorted(store.filesystem.glob(f"{store.root}/{reference.uri}/*.parquet")):
            with store.filesystem.open(path) as file:
                rows = pq.ParquetFile(file).read(columns=["policy_version", "policy_digest"]).to_pydict()
            found |= set(zip(rows["policy_version"], rows["policy_digest"], strict=True))
    return frozenset(found)


def held_versions(store: ArtifactStore) -> list[int]:
    """Versions of the policy that have a manifest and were not pruned, in order."""
    names = [name for name in ArtifactReader(store).artifact_names(POLICIES) if name.isdigit()]
    return sorted(int(name) for name in names if _pruned(store, int(name)) is None)


def _pruned(store: ArtifactStore, version: int) -> Mapping[str, Any] | None:
    """What was said when the files of a version were taken away; None for one that has them."""
    manifest = store.manifest_at(store.path(f"{POLICIES}/{version:06d}"))
    return manifest.pruned if manifest is not None and not manifest.files else None


def missing_version(store: ArtifactStore, version: int) -> InputError:
    """Says that a version is not there, or not any more, and which are."""
    pruned, held = _pruned(store, version), _in_words(held_versions(store))
    if pruned is not None:
        gone = f"Its files were removed by `{pruned.get('by', 'grpo prune')}`; {store.run} holds {held}"
    else:
        gone = f"{store.run} holds {held}; another was never made, or is damaged"
    return InputError("--policy", version, f"{gone}. Choose one of these; 0 is the model as it was given.")


def _in_words(held: list[int]) -> str:
    if not held:
        return "no policies"
    if len(held) > 2 and held == list(range(held[0], held[-1] + 1)):
        return f"versions {held[0]} to {held[-1]}"
    return f"version{'s' if len(held) > 1 else ''} {', '.join(map(str, held))}"


def read_policy(store: ArtifactStore, version: int) -> PolicyRef:
    """A version of the source's policy with its optimizer, to go on from.

    Raises:
        InputErrors: there is none, or none that is whole.
    """
    found = store.find(f"{POLICIES}/{version:06d}") if version in held_versions(store) else None
    if found is None:
        raise InputErrors([missing_version(store, version)])
    with tempfile.TemporaryDirectory() as fetched:
        folder = store.local_files(found, Path(fetched) / "policy")
        digest = json.loads((folder / STATE_FILE).read_text())["policy_digest"]
        reference = folder / REFERENCE_FOLDER
        reference_digest = weights_digest(reference) if reference.is_dir() else None
    return PolicyRef(version=version, digest=digest, checkpoint=found, reference_digest=reference_digest)


_ITERATION = re.compile(r"iteration_(\d{6,})")


def is_run(reader: ArtifactReader) -> bool:
    """Whether the folder looks like a run's."""
    names = reader.names()
    return RUN_FILE in names or any(_ITERATION.fullmatch(name) for name in names)


def iteration_numbers(reader: ArtifactReader) -> list[int]:
    """Iterations that have a folder, in order."""
    return sorted(int(found[1]) for name in reader.names() if (found := _ITERATION.fullmatch(name)))
