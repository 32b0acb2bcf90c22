"""Replace or delete files of an artifact under a tombstone, while every reference to the artifact stays valid.

The tombstone is a manifest that names what it replaced, what was deleted and why. It is written first and accepts each
replaced file in its old and its new form, so a killed process leaves a valid artifact and pruning again finishes
the work. A copy is kept, since nothing else records that the files were deleted on purpose.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.storage.artifacts.commit import ArtifactWriter
from tasks.storage.artifacts.reference import (
    ArtifactRef,
    Manifest,
    PrunedArtifactError,
    StaleReferenceError,
    read_manifest,
)
from tasks.storage.artifacts.run_folder import PREVIOUS
from tasks.storage.filesystem.failures import translate_remote_errors
from tasks.storage.filesystem.files import files_below

LINEAGE = "lineage"
IMAGES_REMOVED, STATES_REMOVED = "images", "states"
"""What a tombstone says was deleted from rollouts."""
AND = " and "
"""Between several things that were deleted."""
_COPIES = ".pruned"
"""Folder of a run with a copy of each tombstone."""


def removed_by(pruned: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return what was deleted from an artifact, by its tombstone's entries; nothing without a tombstone."""
    return tuple(str(pruned.get("removed", "files")).split(AND)) if pruned is not None else ()


def replace_artifact(
    store: ArtifactWriter, reference: ArtifactRef, staged: Path | None, *, pruned: Mapping[str, Any]
) -> ArtifactRef:
    """Replace the files of an artifact of the run by fewer or smaller ones.

    Args:
        reference: the artifact, or one that it replaced.
        staged: the remaining files under their previous names, in a folder of `staging`; None for no files.
        pruned: what is deleted and why, as JSON values.

    Raises:
        StaleReferenceError: the artifact there does not match the reference.
        ValueError: a file that the artifact never had.
        StorageError: a disk or a bucket refuses it.
    """
    files, hashes = (files_below(staged), store.settle(staged)) if staged is not None else ({}, {})
    place = store.path(reference.folder)
    with store.staging() as scratch, translate_remote_errors(store.filesystem, store.root), store.commit_lock():
        manifest = store.matching_manifest(place, reference)
        if isinstance(manifest, str):
            raise StaleReferenceError(f"{reference.uri}: {manifest}")
        if damage := store.files.damage(place, manifest):
            raise StaleReferenceError(f"{reference.uri}: {damage}")
        if unknown := sorted(set(hashes) - set(manifest.files)):
            raise ValueError(f"{reference.uri} has no {unknown[0]}; what replaces it has its files or fewer")
        current = {name: store.files.sha256(f"{place}/{name}") for name in manifest.files}
        if manifest.pruned != pruned or manifest.files != hashes:
            replaced = {**manifest.replaced, **current}
            replaced = {name: sha256 for name, sha256 in replaced.items() if sha256 != hashes.get(name)}
            previous = (manifest.sha256, *manifest.previous)
            manifest = Manifest(manifest.described, hashes, previous, pruned, replaced)
            store.write_file(_copy_of(reference), manifest.content)
            store.write_manifest(reference.folder, manifest, scratch)
        for name, file in files.items():
            if current[name] != hashes[name]:
                store.put_file(file, f"{place}/{name}", hashes[name])
        for name in _left_over(store, place, manifest):
            store.filesystem.rm_file(f"{place}/{name}")
    return manifest.reference(f"{store.run}/{reference.folder}")


def is_half_pruned(store: ArtifactWriter, folder: str, manifest: Manifest) -> bool:
    """Return whether a process was killed while it pruned the artifact in this folder of the run."""
    if manifest.pruned is None:
        return False
    place = store.path(folder)
    if _left_over(store, place, manifest):
        return True
    replaced = [name for name in manifest.replaced if name in manifest.files]
    return any(store.files.sha256(f"{place}/{name}") == manifest.replaced[name] for name in replaced)


def restored_tombstone(store: ArtifactWriter, reference: ArtifactRef) -> Manifest | None:
    """Restore the damaged manifest of a pruned artifact of this run from its copy; None if that is impossible.

    A missing manifest is not restored: people remove it to have the artifact made again.
    """
    path, place = store.manifest_path(reference.folder), store.path(reference.folder)
    if reference.run != store.run or not _is_damaged(store.read_file(path)):
        return None
    try:
        manifest = read_manifest(store.read_file(_copy_of(reference)) or b"")
    except (ValueError, TypeError):
        return None
    if not manifest.matches(reference) or store.files.damage(place, manifest) is not None:
        return None
    with store.staging() as scratch, store.commit_lock():
        if _is_damaged(store.read_file(path)):
            store.quarantine([path], reason=f"{path} is damaged; {_copy_of(reference)} took its place", copy=True)
            store.write_manifest(reference.folder, manifest, scratch)
    return manifest


def pruned_error(store: ArtifactWriter, reference: ArtifactRef, manifest: Manifest) -> PrunedArtifactError:
    """Make the error for an artifact whose files were deleted, with a hint what to do."""
    # One in previous/ would be restored.
    folders = sorted(store.filesystem.glob(f"{store.root}/{reference.run}/{PREVIOUS}/*"))
    places = [f"{store.root}/{reference.uri}", *(f"{folder}/{reference.folder}" for folder in folders)]
    manifests = [
        store.manifest_path(place)
        for place in places
        if isinstance(store.matching_manifest(place, reference), Manifest)
    ]
    by = (manifest.pruned or {}).get("by", "grpo prune")
    hint = (
        f"Its files were deleted by `{by}`. Choose one that is kept; or, to have it made again, remove "
        f"{' and '.join(manifests)} and start the run again."
    )
    said = {name: value for name, value in (manifest.pruned or {}).items() if name != LINEAGE}
    return PrunedArtifactError(reference.uri, said, hint)


def _is_damaged(content: bytes | None) -> bool:
    try:
        return content is not None and not read_manifest(content)
    except (ValueError, TypeError):
        return True


def _left_over(store: ArtifactWriter, place: str, manifest: Manifest) -> set[str]:
    """Return names of files that are still there although the tombstone says that they are deleted."""
    found = store.filesystem.find(place) if store.filesystem.exists(place) else []
    names = {str(path).removeprefix(f"{place}/") for path in found}
    return names & (set(manifest.replaced) - set(manifest.files))


def _copy_of(reference: ArtifactRef) -> str:
    return f"{_COPIES}/{reference.folder}.json"
