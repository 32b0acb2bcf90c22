"""Files of an artifact replaced or removed while everything that refers to it stays right.

The manifest goes first and names the files both as they are to be and as they were, so a reader finds a whole artifact
at every moment in between; when all is done, a last manifest names what is left, of which a copy is kept. A process
that is killed amid that is made up for by doing it again.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec

from grpo_core.errors import InputError
from tasks.storage.artifacts.commit import upload, write_manifest
from tasks.storage.artifacts.lineage import LINEAGE
from tasks.storage.artifacts.manifest import Manifest, read_manifest, written
from tasks.storage.artifacts.reference import ArtifactRef, StaleReferenceError
from tasks.storage.artifacts.verified_folder import ValidFolder
from tasks.storage.filesystem.files import files_below, fsync_path, is_local, settle_folder, sha256_of
from tasks.storage.filesystem.run_folder import SET_ASIDE

COPIES = ".pruned"
"""Folder of a run with a copy of the manifest of each artifact that lost files."""


class PrunedArtifactError(InputError):
    """What is asked for was taken away on purpose; the command line ends with exit code 2."""


def pruned_error(store: ValidFolder, reference: ArtifactRef, manifest: Manifest) -> PrunedArtifactError:
    """Says that the artifact's files are gone, and what can be done."""
    # One that was set aside would come back.
    aside = sorted(store.filesystem.glob(f"{store.root}/{reference.run}/{SET_ASIDE}/*"))
    places = [f"{each}/{reference.folder}" for each in aside]
    matching_manifest = [place for place in places if isinstance(store.matching_manifest(place, reference), Manifest)]
    manifests = [store.manifest_path(place) for place in (f"{store.root}/{reference.uri}", *matching_manifest)]
    hint = (
        "Its files were removed by `grpo prune`. Ask for one that is kept; or, to have it made again, remove "
        f"{' and '.join(manifests)} and start the run again."
    )
    said = {name: value for name, value in (manifest.pruned or {}).items() if name != LINEAGE}
    return PrunedArtifactError(reference.uri, said, hint)


def replace_folder(
    store: ValidFolder, reference: ArtifactRef, staged: Path | None, pruned: Mapping[str, Any], scratch: Path
) -> Manifest:
    """Put the staged files in the place of the artifact's; the manifest that stands afterwards.

    Args:
        store: the run of the artifact.
        reference: to it, or to one that it succeeded.
        staged: the files that are left, each by its previous name; None leaves none.
        pruned: what was taken away and why, as JSON values.
        scratch: folder of this process on the root's disk.

    Raises:
        StaleReferenceError: what stands there is not what the reference says.
        ValueError: a file that the artifact never had.
    """
    files = files_below(staged) if staged is not None else {}
    local = fsspec.filesystem("file")
    hashes = {name: sha256_of(local, str(file)) for name, file in files.items()}
    if staged is not None and is_local(store.filesystem):
        settle_folder(staged)
    place = store.path(reference.folder)
    with store.alone():
        present, found = _present(store, place, reference)
        if present.leaving is None and dict(present.files) == hashes and present.pruned == pruned:
            return present
        if unknown := sorted(set(hashes) - set(found)):
            raise ValueError(f"{reference.uri} has no {unknown[0]}; what succeeds it has its files or fewer")
        leaving = {**(present.leaving or {}), **found}
        kept = written(present.described, hashes)
        amid = kept.succeeding(present, pruned=pruned, leaving=leaving)
        write_manifest(store, reference.folder, amid, scratch)
        for name, file in files.items():
            _replace(store, file, f"{place}/{name}")
        for name in sorted(set(leaving) - set(hashes)):
            _remove(store, f"{place}/{name}")
        done = kept.succeeding(amid, pruned=pruned)
        store.write_file(_copy_of(reference), done.content)
        write_manifest(store, reference.folder, done, scratch)
    return done


def _copy_of(reference: ArtifactRef) -> str:
    return f"{COPIES}/{reference.folder}.json"


def restored_manifest(store: ValidFolder, reference: ArtifactRef) -> Manifest | None:
    """The manifest of a pruned artifact of this run, put back in its place where it was damaged; None if it is not.

    Without it nothing would say that the artifact is lacking files on purpose, and what is gone cannot be made again.
    A manifest that is missing stays so: whoever removes it wants the artifact to be made again.
    """
    path = store.manifest_path(reference.folder)
    if reference.run != store.run or not _is_damaged(store.read_file(path)):
        return None
    try:
        manifest = read_manifest(store.read_file(_copy_of(reference)) or b"")
    except (ValueError, TypeError):
        return None
    place = store.path(reference.folder)
    if not manifest.answers(reference) or store.files.damage(place, manifest) is not None:
        return None
    with store.staging() as scratch, store.alone():
        if _is_damaged(store.read_file(path)):
            store.set_aside([path], reason=f"{path} is damaged; {_copy_of(reference)} took its place", kept_names=True)
            write_manifest(store, reference.folder, manifest, scratch)
    return manifest


def _is_damaged(content: bytes | None) -> bool:
    if content is None:
        return False
    try:
        read_manifest(content)
    except (ValueError, TypeError):
        return True
    return False


def _present(store: ValidFolder, place: str, reference: ArtifactRef) -> tuple[Manifest, dict[str, str]]:
    """The manifest in the place and the sha256 of its files as they are: amid a succession they may be of either."""
    manifest = store.matching_manifest(place, reference)
    if isinstance(manifest, str):
        raise StaleReferenceError(f"{reference.uri}: {manifest}")
    if damage := store.files.damage(place, manifest):
        raise StaleReferenceError(f"{reference.uri}: {damage}")
    return manifest, {name: store.files.sha256(f"{place}/{name}") for name in manifest.files}


def _replace(store: ValidFolder, file: Path, path: str) -> None:
    if not is_local(store.filesystem):
        upload(store, file, path)
        return
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    file.replace(target)
    fsync_path(target.parent)


def _remove(store: ValidFolder, path: str) -> None:
    if store.filesystem.exists(path):
        store.filesystem.rm_file(path)
