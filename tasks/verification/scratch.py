"""The store of a run that is only read, and the copy of what a stage reads in a scratch root."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from tasks.models.resident import ModelSpec
from tasks.rollouts.plan import RolloutPlan
from tasks.runs.layout import IMAGES, PARTS, STATES, SamplingRound, StoredEvaluation, source_file
from tasks.runs.samples import read_rollouts
from tasks.runs.sources import digests_in
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.restore import copy_artifact
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.files import MAX_SOURCE_BYTES

Reference = ArtifactRef | PolicyRef

UNREAD: Mapping[str, tuple[str, ...]] = {
    "score reward": (STATES,),
    "compute advantages": (IMAGES, STATES),
    "update policy": (IMAGES,),
}
"""Files of rollouts that a stage does not read, by its name."""


class UntouchedStore(ArtifactStore):
    """A run's store that reports damage and moves nothing; it writes neither files nor locks."""

    def clear_place(self, folder: str, *, reason: str | None = None) -> None:
        """Leave a damaged artifact where it is."""

    def quarantine(self, paths: Sequence[str], *, reason: str) -> None:
        """Leave damaged files where they are."""

    @contextlib.contextmanager
    def commit_lock(self, folder: str | None = None) -> Iterator[None]:
        """Take no lock, since nothing is moved."""
        yield


def references_in(value: Any) -> Iterator[ArtifactRef]:
    """Yield the artifacts that a stage's argument refers to."""
    match value:
        case ArtifactRef():
            yield value
        case PolicyRef(checkpoint=ArtifactRef() as checkpoint):
            yield checkpoint
        case ModelSpec(adapter=ArtifactRef() as adapter):
            yield adapter
        case Mapping():
            for each in value.values():
                yield from references_in(each)
        case tuple():
            for each in value:
                yield from references_in(each)
        case SamplingRound() | StoredEvaluation():
            for each in fields(value):
                yield from references_in(getattr(value, each.name))


def with_replaced(value: Any, replaced: Mapping[str, Reference]) -> Any:
    """Return a stage's argument with other artifacts in place of those with these URIs."""
    match value:
        case ArtifactRef():
            return replaced.get(value.uri, value)
        case PolicyRef(checkpoint=ArtifactRef(uri=uri)) if isinstance(other := replaced.get(uri), PolicyRef):
            return {"ema": other.averaged, "old": other.sampler, None: other}[value.copy_name]
        case Mapping():
            return {name: with_replaced(each, replaced) for name, each in value.items()}
        case tuple():
            return tuple(with_replaced(each, replaced) for each in value)
        case SamplingRound() | StoredEvaluation():
            return type(value)(
                **{each.name: with_replaced(getattr(value, each.name), replaced) for each in fields(value)}
            )
    return value


def bring_inputs(store: ArtifactStore, scratch: ArtifactStore, task: str, arguments: Mapping[str, Any]) -> None:
    """Copy what a stage reads to a scratch root, verified: artifacts, and the images in its prompts.

    Raises:
        StaleReferenceError: one is missing or damaged.
        PrunedArtifactError: the files of one were deleted on purpose.
    """
    for reference in references_in(arguments):
        copy_artifact(store, reference, scratch, UNREAD.get(task, ()))
        if sorted(Path(scratch.path_of(reference.uri)).glob(PARTS)):
            rows = read_rollouts([Path(scratch.path_of(reference.uri))], ("sample_id", "sources"))
            _bring_sources(store, scratch, reference.run, digests_in(rows))
    if isinstance(plan := arguments.get("plan"), RolloutPlan):
        _bring_sources(store, scratch, scratch.run, plan.named_sources)


def _bring_sources(store: ArtifactStore, scratch: ArtifactStore, run: str, digests: Mapping[str, str]) -> None:
    for digest in digests:
        name = f"{run}/{source_file(digest)}"
        # The stage says what is missing.
        if (content := store.read_shared(name, limit=MAX_SOURCE_BYTES)) is not None:
            scratch.write_file(name, content, shared=True)
