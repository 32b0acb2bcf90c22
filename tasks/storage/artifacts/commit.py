"""The step that makes staged files an artifact: files first, then the manifest, which only one writer can make.

On a local disk one process at a time takes it. A bucket has no lock: whoever finds that another wrote the same place
meanwhile takes the other's artifact for its own where both hold the same result, and looks once more after the manifest
is there, since a slower writer may have put its files over these.
"""

import random
import time
from collections.abc import Mapping
from pathlib import Path

from tasks.storage.artifacts.files import PART
from tasks.storage.artifacts.manifest import Manifest
from tasks.storage.artifacts.verified_folder import ValidFolder
from tasks.storage.filesystem.failures import UnreachableStorageError, is_conflict
from tasks.storage.filesystem.files import files_below, is_local, move_folder, settle_folder, write_whole

_ATTEMPTS = 6
_FIRST_WAIT = 0.1


def commit_folder(store: ValidFolder, staged: Path, folder: str, manifest: Manifest) -> Manifest:
    """Make an artifact of the staged files; the manifest that stands afterwards.

    It is another writer's where that one was first and has the same result; anything else in the place is set aside.

    Raises:
        UnreachableStorageError: others keep writing the same place.
    """
    if not is_local(store.filesystem):
        return _commit_remotely(store, staged, folder, manifest)
    settle_folder(staged)
    with store.alone():
        standing = store.valid_manifest_at(store.path(folder))
        if standing is not None and standing.equals_in_result(manifest):
            return standing
        store.clear_place(folder)
        move_folder(staged, Path(store.path(folder)))
        write_manifest(store, folder, manifest, staged.parent)
    return manifest


def write_manifest(store: ValidFolder, folder: str, manifest: Manifest, scratch: Path) -> None:
    """Write or replace a manifest in one step."""
    write_whole(store.filesystem, store.manifest_path(store.path(folder)), manifest.content, scratch=scratch)


def _commit_remotely(store: ValidFolder, staged: Path, folder: str, manifest: Manifest) -> Manifest:
    files = files_below(staged)
    for attempt in range(_ATTEMPTS):
        if attempt:
            # At random, so that two writers that met once do not meet again.
            time.sleep(_FIRST_WAIT * 2**attempt * random.uniform(0.5, 1.5))
        standing = store.manifest_at(store.path(folder))
        equal = standing is not None and standing.equals_in_result(manifest)
        if standing is not None and equal:
            if store.files.damage(store.path(folder), standing) is None:
                return standing
            if attempt < _ATTEMPTS // 2:
                continue  # its writer may be putting it right at this moment
            manifest = manifest.succeeding(standing)
        else:
            store.clear_place(folder)
        if _write(store, files, folder, manifest, replacing=equal) and _settle(store, files, folder, manifest):
            return manifest
    raise UnreachableStorageError(
        "storage.root", store.path(folder), "another process keeps writing the same artifact; end it"
    )


def _write(store: ValidFolder, files: Mapping[str, Path], folder: str, manifest: Manifest, *, replacing: bool) -> bool:
    """Upload files and manifest; False when another writer's manifest came first."""
    path = store.manifest_path(store.path(folder))
    for name, file in files.items():
        if not replacing and store.filesystem.exists(path):
            return False
        upload(store, file, f"{store.path(folder)}/{name}")
    if replacing:
        store.filesystem.pipe_file(path, manifest.content)
        return True
    if store.filesystem.exists(path):
        return False
    return create_manifest(store, path, manifest)


def create_manifest(store: ValidFolder, path: str, manifest: Manifest) -> bool:
    """Write a manifest where there is none; False when another writer was first."""
    try:
        store.filesystem.pipe_file(path, manifest.content, mode="create")
    except (NotImplementedError, TypeError):
        # A filesystem without conditional writes: whoever called has looked, and looks again.
        store.filesystem.pipe_file(path, manifest.content)
    except OSError as error:
        if not is_conflict(error):
            raise
        # A request that was sent again after its answer was lost finds what it made itself.
        return bool(store.filesystem.exists(path)) and store.filesystem.cat_file(path) == manifest.content
    return True


def _settle(store: ValidFolder, files: Mapping[str, Path], folder: str, manifest: Manifest) -> bool:
    """Whether manifest and files in the place are these; files that another writer put over them are written again."""
    place = store.path(folder)
    for _ in range(_ATTEMPTS):
        standing = store.manifest_at(place)
        if standing is None or standing.content != manifest.content:
            return False
        changed = [
            name for name, file in files.items() if not _is_there(store, f"{place}/{name}", file, manifest, name)
        ]
        if not changed:
            for name, file in files.items():
                store.files.keep(f"{place}/{name}", file, manifest.files[name])
            return True
        for name in changed:
            upload(store, files[name], f"{place}/{name}")
    return False


def _is_there(store: ValidFolder, path: str, file: Path, manifest: Manifest, name: str) -> bool:
    return store.files.holds(path, file, manifest.files[name])


def upload(store: ValidFolder, file: Path, path: str) -> None:
    """Put a local file into a remote place, in parts of a known size where that decides the tag."""
    protocol = store.filesystem.protocol
    parts = {"chunksize": PART} if "s3" in protocol else {}
    store.filesystem.put_file(str(file), path, **parts)
