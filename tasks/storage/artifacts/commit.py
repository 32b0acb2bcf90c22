"""Write artifacts: files are staged and moved, the manifest is last; delete files of one under a tombstone.

The tombstone is the artifact's manifest without the names of these files; it says what was deleted and why. It is
written first, so a killed process leaves a valid artifact, and pruning again deletes the files that are left.

A bucket has no lock for this: its files are uploaded first, and the manifest is created on the condition that there is
none. Where two processes write one stage at once, the content decides: files of the other one do not match the
manifest, so whoever reads them makes the stage run again.
"""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from tasks.process import in_threads
from tasks.storage.artifacts.reference import ArtifactRef, Manifest, StaleReferenceError
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.files import files_below, fsync_folder, hashes_of, is_local, move_folder
from tasks.storage.roots import translate_remote_errors
from tasks.storage.schemas import SCHEMA_VERSION


def commit_artifact(
    store: ArtifactStore,
    staged: Path,
    folder: str,
    *,
    digest: str,
    rows: int,
    seconds: float,
    metrics: dict[str, float],
    peak_memory: int | None = None,
    synced: Mapping[str, str] | None = None,
    schema_version: int = SCHEMA_VERSION,
) -> ArtifactRef:
    """Move staged files to their place and then write the manifest that makes them an artifact.

    An artifact in that place is moved away, or kept and returned if another writer was first with the same result.
    StorageError if a disk or a bucket refuses it, StaleReferenceError if the run does not request it any more.
    """
    if store.requested is not None and store.read_file(store.requested) is None:
        reason = "the run has its result or continues with another configuration, so the request is withdrawn"
        raise StaleReferenceError(f"{store.run}/{folder}: {reason}")
    described: dict[str, Any] = {
        "digest": digest,
        "schema_version": schema_version,
        "rows": rows,
        "seconds": seconds,
        "metrics": metrics,
    }
    if peak_memory is not None:
        described["peak_memory"] = peak_memory
    manifest = Manifest(described, hash_staged(store, staged, synced))
    assert manifest.content, "a metric that is not finite is refused before anything is moved"
    with translate_remote_errors(store.filesystem, store.root), store.commit_lock(folder):
        place, is_written = store.path(folder), False
        standing: Manifest | None
        is_free: bool
        while not is_written:
            # Questions to a bucket that do not need each other's answers are asked at once.
            standing, is_free = in_threads(partial(store.manifest_at, place), partial(store.is_free, folder))
            if standing is not None and standing.equals_in_result(manifest):
                if store.files.damage(place, standing) is None:
                    return standing.reference(f"{store.run}/{folder}")
                # References to it stay valid if only its files have to be written again.
                manifest = standing if standing.files == manifest.files else manifest
            if not is_free:
                store.clear_place(folder)
            notes = _put_files(store, staged, place, manifest)
            write = partial(store.write_manifest, folder, manifest, staged.parent, create=True)
            is_written = in_threads(write, *notes)[0]
    return manifest.reference(f"{store.run}/{folder}")


def hash_staged(store: ArtifactStore, staged: Path, synced: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the sha256 of every staged file by its name, on the disk then below a local root; `synced` are known."""
    return (fsync_folder if is_local(store.filesystem) else hashes_of)(staged, synced or {})


def _put_files(store: ArtifactStore, staged: Path, place: str, manifest: Manifest) -> list[Callable[[], object]]:
    """Put the files in their place, and return what notes that this process knows them."""
    if is_local(store.filesystem):
        move_folder(staged, Path(place))
        return []
    files = files_below(staged)
    in_threads(*(partial(store.filesystem.put_file, str(file), f"{place}/{name}") for name, file in files.items()))
    return [partial(store.files.keep, f"{place}/{name}", file, manifest.files[name]) for name, file in files.items()]


IMAGES_REMOVED, STATES_REMOVED = "images", "states"  # what a tombstone says was deleted from rollouts
AND = " and "  # between several things that were deleted


def removed_by(pruned: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Return what was deleted from an artifact, by its tombstone's entries; nothing without a tombstone."""
    return tuple(str(pruned.get("removed", "files")).split(AND)) if pruned is not None else ()


def delete_files(
    store: ArtifactStore, reference: ArtifactRef, names: Collection[str], *, pruned: Mapping[str, Any]
) -> None:
    """Delete an artifact's files, also left ones; StaleReferenceError if it is another, or others are damaged."""
    place = store.path(reference.folder)
    with store.staging() as scratch, translate_remote_errors(store.filesystem, store.root), store.commit_lock():
        manifest = store.inspect(place, reference, only=())
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


def left_over(store: ArtifactStore, folder: str, manifest: Manifest) -> list[str]:
    """Return the deleted files of an artifact that are still there, since the process that deleted them was killed."""
    return [name for name in manifest.deleted if store.filesystem.exists(store.path(f"{folder}/{name}"))]
