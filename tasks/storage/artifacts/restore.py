"""Restore artifacts: from `quarantine/`, from another run, or from what earlier configurations of a run made.

Those are the runs `NAME~1`, `NAME~2`. A copy in another root has links to the files where the disk is the same.
"""

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from tasks.storage.artifacts.reference import ArtifactRef, Manifest, StaleReferenceError
from tasks.storage.artifacts.run_folder import QUARANTINE
from tasks.storage.artifacts.store import LINEAGE, ArtifactStore, lineage_of
from tasks.storage.files import fsync_folder, is_local, link_or_copy, matching, move_folder
from tasks.storage.roots import translate_remote_errors


def restore_artifact(store: ArtifactStore, reference: ArtifactRef) -> ArtifactRef:
    """Return the same artifact in its place in this run, copied from elsewhere below the root if need be.

    A pruned artifact counts as present while its tombstone is there. It is restored only from an earlier run of
    this one, if this one has the lineage that it was pruned with: another one may need the deleted files.
    StaleReferenceError if there is no valid copy; damaged files are moved to `quarantine/` first.
    """
    home = reference.model_copy(update={"uri": f"{store.run}/{reference.folder}"})
    if reference.run != store.run:
        store.copied[reference.folder] = reference.run
    with translate_remote_errors(store.filesystem, store.root):
        found = store.inspect(store.path(home.folder), home)
        if not isinstance(found, str):
            return home
        for run, place in _other_places(store, reference):
            manifest = store.inspect(place, reference, only=())
            if isinstance(manifest, str) or not _may_restore(store, run, manifest, home.folder):
                continue
            if store.files.damage(place, manifest) is None:
                _copy(store, place, manifest, home.folder, found)
                return home
        with store.commit_lock():
            # A valid one belongs to another configuration; the stage that replaces it moves it.
            if isinstance(store.inspect(store.path(home.folder)), str):
                store.clear_place(home.folder, reason=found)
    raise StaleReferenceError(f"{reference.uri}: {found}")


def _other_places(store: ArtifactStore, reference: ArtifactRef) -> Iterator[tuple[str, str]]:
    """Yield where the artifact may be, as a run and a folder in the filesystem."""
    yield reference.run, f"{store.root}/{reference.uri}"
    runs = list(dict.fromkeys([store.run, reference.run]))
    for run in (earlier for name in runs for earlier in store.earlier_runs(name)):
        yield run, f"{store.root}/{run}/{reference.folder}"
    for run in runs:
        for place in reversed(matching(store.filesystem, f"{store.root}/{run}/{QUARANTINE}", "*")):
            yield run, f"{place}/{reference.folder}"


def _may_restore(store: ArtifactStore, run: str, manifest: Manifest, folder: str) -> bool:
    if manifest.pruned is None:
        return True
    lineage = manifest.pruned.get(LINEAGE)
    return run in store.earlier_runs() and lineage is not None and lineage == lineage_of(store, folder)


def _copy(store: ArtifactStore, source: str, manifest: Manifest, folder: str, damage: str) -> None:
    place = store.path(folder)
    with store.staging() as staged, store.commit_lock():
        store.clear_place(folder, reason=damage if isinstance(store.inspect(place), str) else None)
        for name, sha256 in manifest.files.items():
            if is_local(store.filesystem):
                (staged / name).parent.mkdir(parents=True, exist_ok=True)
                store.filesystem.get_file(f"{source}/{name}", str(staged / name))
            else:
                store.filesystem.cp_file(f"{source}/{name}", f"{place}/{name}")
                store.files.note_copy(f"{source}/{name}", f"{place}/{name}", sha256)
        if is_local(store.filesystem):
            fsync_folder(staged)
            move_folder(staged, Path(place))
        store.write_manifest(folder, manifest, staged.parent)


def copy_artifact(source: ArtifactStore, reference: ArtifactRef, target: ArtifactStore, without: Sequence[str]) -> None:
    """Copy an artifact of a root to the same place of a local root, verified, without files of these patterns.

    Raises as :meth:`ArtifactStore.local_files`.
    """
    place = Path(target.path_of(reference.uri))
    if target.manifest_at(str(place)) is not None:
        return
    found = source.local_files(reference, place, without=without)
    manifest = source.inspect(source.place_of(reference), reference, only=())
    assert isinstance(manifest, Manifest), "it has just been verified"
    names = [name for name in manifest.files if not any(fnmatchcase(name, each) for each in without)]
    for name in names if found != place else ():
        link_or_copy(found / name, place / name)
    path = Path(target.manifest_path(str(place)))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(manifest.content)
