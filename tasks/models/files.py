"""Digests of a model's files: of a folder, or of a hub snapshot."""

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import get_args

from grpo_core.errors import InputError
from grpo_core.policies.trained.choice import CopyName
from grpo_core.policies.trained.whole import FULL_WEIGHTS
from grpo_core.streams import STREAMS, Stream
from tasks.storage.artifacts.reference import PolicyRef

RECORD_FILE = "grpo.json"
"""In an exported folder: what `grpo sample` needs of the run to sample as in training."""

_DETERMINING = {".safetensors", ".bin", ".json", ".jinja", ".model", ".txt"}


@lru_cache(maxsize=4)
def model_digest(model: str, revision: str | None = None) -> str:
    """Compute the digest of a model: of the content of a folder's files, or the commit of a hub snapshot.

    A hub name whose files are not on this machine is downloaded, unless the hub is switched off.

    Args:
        revision: branch, tag or commit of a hub name; None: main.

    Raises:
        InputError: the hub's files are not on this machine and cannot be downloaded.
    """
    folder = model_folder(model, revision)
    if not Path(model).expanduser().is_dir():
        return folder.name
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix in _DETERMINING:
            add_file(digest, path.relative_to(folder).as_posix(), path)
    return digest.hexdigest()


def model_folder(model: str, revision: str | None = None) -> Path:
    """Return a model's folder on this machine: the one that is named, or the snapshot of a hub name.

    Args:
        revision: branch, tag or commit of a hub name; None: main.

    Raises:
        InputError: the hub's files are not on this machine and cannot be downloaded.
    """
    folder = Path(model).expanduser()
    return folder if folder.is_dir() else snapshot("policy.model", model, revision)


def snapshot(place: str, name: str, revision: str | None, *, patterns: list[str] | None = None) -> Path:
    """Return the local folder of a hub repository, which is downloaded unless the hub is switched off.

    Args:
        place: the setting that names it, for the error.
        revision: branch, tag or commit; None: main.
        patterns: of the files that are needed; None: all.

    Raises:
        InputError: its files are not on this machine and cannot be downloaded.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        command = f"hf download {name}" + (f" --revision {revision}" if revision else "")
        hint = f"Its files are not here and cannot be downloaded: run `{command}`, or give a folder."
        raise InputError(place, name, hint) from error


def local_source(model: str, revision: str | None) -> str:
    """Return what a model is loaded from: its name, or the folder of a hub revision on this machine.

    A revision that is not on this machine is named `model@revision`, which no check takes for another one's files.
    """
    if revision is None:
        return model
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return str(snapshot_download(model, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return f"{model}@{revision}"


def add_file(digest: "hashlib._Hash", name: str, path: Path, known: str | None = None) -> None:
    """Add a file's name and content to a digest; it is not read if its sha256 is known."""
    if known is None:
        with path.open("rb") as stream:
            known = hashlib.file_digest(stream, "sha256").hexdigest()
    digest.update(name.encode() + b"\0" + bytes.fromhex(known))


COPIES: tuple[CopyName, ...] = get_args(CopyName)
WEIGHT_FILES = ("adapter_model*.safetensors", *FULL_WEIGHTS)


def component_folder(policy: Path, stream: Stream) -> Path:
    """Return where a policy's files of one component are; the copies of its weights are in subfolders of their names.

    Args:
        policy: folder of a version.
        stream: of the component.
    """
    return policy / stream


def weights_folder(checkpoint: Path, policy: PolicyRef, stream: Stream) -> Path:
    """Return the folder with the weights of a component that a reference to a version names.

    Args:
        checkpoint: local folder of the version's checkpoint.
        policy: the version; `policy.averaged` names its moving average, and `policy.sampler` its old policy.
        stream: of the component.
    """
    own = component_folder(checkpoint, stream)
    return own if policy.copy_name is None else copy_folder(own, policy.copy_name) or own


def copy_folder(component: Path, name: CopyName) -> Path | None:
    """Return the folder of a copy of a component's weights; None where none is kept.

    Args:
        component: the component's folder.
    """
    return folder if (folder := component / name).is_dir() else None


def weights_digest(folder: Path, known: Mapping[Path, str] = MappingProxyType({}), copy: CopyName | None = None) -> str:
    """Compute a sha256 over the weight files of a policy's components, or of a folder of weights.

    Weights of one component have one digest, wherever they are.

    Args:
        known: sha256 of files that are not read for it.
        copy: of these weights; a component without such a copy has its own, unless it is the reference.
    """
    digest = hashlib.sha256()
    for name, part in _components(folder).items():
        own = part if copy is None else copy_folder(part, copy) or (None if copy == "reference" else part)
        found = [] if own is None else [path for pattern in WEIGHT_FILES for path in sorted(own.glob(pattern))]
        for path in found:
            add_file(digest, f"{name}{path.name}", path, known.get(path))
    return digest.hexdigest()


def copy_digests(folder: Path, known: Mapping[Path, str] = MappingProxyType({})) -> dict[CopyName, str]:
    """Compute `weights_digest` of every copy that a policy's folder has of a component's weights."""
    kept = [name for name in COPIES if any(copy_folder(part, name) for part in _components(folder).values())]
    return {name: weights_digest(folder, known, name) for name in kept}


def _components(folder: Path) -> dict[str, Path]:
    """Return the components' folders, by what stands before the names of their files; one component has no prefix."""
    parts = [path for stream in STREAMS if (path := folder / stream).is_dir()] or [folder]
    return {f"{part.name}/" if len(parts) > 1 else "": part for part in parts}
