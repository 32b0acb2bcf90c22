"""Find a run by name or path."""

from tasks.storage.artifacts.reader import ArtifactReader
from tasks.storage.artifacts.store import ArtifactStore
from grpo_core.errors import InputError
from collections.abc import Iterator
from pathlib import Path
from tasks.runs.iterations import is_run
import json
from tasks.prompts.files import nearest_names
import os
from tasks.runs.schema_guard import refuse_newer
from tasks.storage.filesystem.failures import translate_remote_errors


def find_run(name: str, root: str) -> ArtifactStore:
    """The run of this name under the root, or in the folder of this path.

    Raises:
        InputError: there is none, with the nearest names; or the folder is no run.
    """
    if not name.strip():
        raise InputError("RUN", name, "Name a run, or the path of its folder.")
    found = next((store for store in _places(name, root) if _is_folder(store)), None)
    if found is None:
        raise InputError("RUN", name, _which_runs(name, root))
    if not is_run(ArtifactReader(found)):
        reason = f"The folder {found.path()} is no run: it holds neither run.json nor an iteration."
        raise InputError("RUN", name, f"{reason} {_which_runs(name, root)}")
    refuse_newer(found)
    return found


def _is_folder(store: ArtifactStore) -> bool:
    with translate_remote_errors(store.filesystem, store.root):
        return bool(store.filesystem.isdir(store.path()))


def _places(name: str, root: str) -> Iterator[ArtifactStore]:
    if "/" not in name and name not in (".", "..", "~"):
        yield _store(root, name, "--root")
    if "://" in name:
        parent, _, last = name.rstrip("/").rpartition("/")
        yield _store(parent, last, "RUN")
    else:
        path = Path(os.path.abspath(Path(name).expanduser()))
        yield _store(str(path.parent), path.name, "RUN")


def _store(root: str, run: str, place: str) -> ArtifactStore:
    try:
        return ArtifactStore(root, run)
    except InputError as error:
        # Its value is the root without the credentials that it may hold.
        raise InputError(place, error.value, error.hint) from error


def _which_runs(name: str, root: str) -> str:
    store = _store(root, "", "--root")
    if not store.filesystem.isdir(store.root):
        return f"There is no folder {root} either; name the storage root with --root, or the path of the run's folder."
    runs = [held for held in ArtifactReader(store).names() if is_run(ArtifactReader(_store(root, held, "--root")))]
    if not runs:
        return f"{root} holds no runs; name the storage root with --root, or the path of the run's folder."
    return f"Runs in {root}: {nearest_names(name.rstrip('/').rsplit('/', 1)[-1], runs)}."
