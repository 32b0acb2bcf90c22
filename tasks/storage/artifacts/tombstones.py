"""Delete files of an artifact under a tombstone, while every reference to the artifact stays valid.

The tombstone is the artifact's manifest without the names of these files; it says what was deleted and why. It is
written first, so a killed process leaves a valid artifact, and pruning again deletes the files that are left.
"""

from collections.abc import Collection, Mapping
from typing import Any

from tasks.storage.artifacts.commit import ArtifactWriter
from tasks.storage.artifacts.reference import ArtifactRef, Manifest, PrunedArtifactError, StaleReferenceError
from tasks.storage.filesystem.failures import translate_remote_errors

LINEAGE = "lineage"
"""Entry of run.json and of tombstones: a digest of what made the run's policies and rollouts."""
IMAGES_REMOVED, STATES_REMOVED = "images", "states"
"""What a tombstone says was deleted from rollouts."""
AND = " and "
"""Between several things that were deleted."""


def removed_by(pruned: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return what was deleted from an artifact, by its tombstone's entries; nothing without a tombstone."""
    return tuple(str(pruned.get("removed", "files")).split(AND)) if pruned is not None else ()


def delete_files(
    store: ArtifactWriter, reference: ArtifactRef, names: Collection[str], *, pruned: Mapping[str, Any]
) -> None:
    """Delete files of an artifact of the run; those that an interrupted deletion left are deleted too.

    Args:
        names: of the files within the artifact's folder.
        pruned: what is deleted and why, as JSON values.

    Raises:
        StaleReferenceError: the artifact there does not match the reference, or one of its other files is damaged.
        StorageError: a disk or a bucket refuses it.
    """
    place = store.path(reference.folder)
    with store.staging() as scratch, translate_remote_errors(store.filesystem, store.root), store.commit_lock():
        manifest = store.matching_manifest(place, reference)
        if isinstance(manifest, str):
            raise StaleReferenceError(f"{reference.uri}: {manifest}")
        kept = {name: sha256 for name, sha256 in manifest.files.items() if name not in names}
        if damage := store.files.damage(place, manifest, kept):
            raise StaleReferenceError(f"{reference.uri}: {damage}")
        if manifest.pruned != pruned or len(kept) < len(manifest.files):
            deleted = {name: sha256 for name, sha256 in manifest.files.items() if name in names}
            manifest = Manifest(manifest.described, kept, pruned, {**manifest.deleted, **deleted})
            store.write_manifest(reference.folder, manifest, scratch)
        for name in left_over(store, reference.folder, manifest):
            store.filesystem.rm_file(f"{place}/{name}")


def left_over(store: ArtifactWriter, folder: str, manifest: Manifest) -> list[str]:
    """Return the deleted files of an artifact that are still there, since the process that deleted them was killed."""
    return [name for name in manifest.deleted if store.filesystem.exists(store.path(f"{folder}/{name}"))]


def pruned_error(store: ArtifactWriter, place: str, reference: ArtifactRef, manifest: Manifest) -> PrunedArtifactError:
    """Make the error for an artifact whose files were deleted, with a hint what to do.

    Args:
        place: the artifact's folder in the filesystem.
    """
    said = {name: value for name, value in (manifest.pruned or {}).items() if name != LINEAGE}
    hint = (
        f"Its files were deleted by `{said.get('by', 'grpo prune')}`. Choose one that is kept; or, to have it made "
        f"again, remove {store.manifest_path(place)} and start the run again."
    )
    return PrunedArtifactError(reference.uri, said, hint)
