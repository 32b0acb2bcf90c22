"""Digests of a model's files: of a folder, or of a hub snapshot."""

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType

from grpo_core.errors import InputError
from grpo_core.policies.trained.whole import FULL_WEIGHTS
from grpo_core.streams import STREAMS, Stream
from tasks.storage.artifacts.reference import PolicyRef

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


WEIGHT_FILES = ("adapter_model*.safetensors", *FULL_WEIGHTS)


REFERENCE_FOLDER, EMA_FOLDER, OLD_FOLDER = "reference", "ema", "old"
"""Folders of a policy version with the weights of its reference, of its moving average, and of its old policy."""


def weights_folder(checkpoint: Path, policy: PolicyRef) -> Path:
    """Return the folder with the weights that a reference to a version names.

    Args:
        checkpoint: local folder of the version's checkpoint.
        policy: the version; `policy.averaged` names its moving average, and `policy.sampler` its old policy.
    """
    if policy.is_averaged:
        return checkpoint / EMA_FOLDER
    return checkpoint / OLD_FOLDER if policy.is_old else checkpoint


def stored_reference(checkpoint: Path | None, version: PolicyRef, stream: Stream) -> Path | None:
    """Return the folder with the weights of a component's reference; None while that is the initial component.

    Args:
        checkpoint: local folder of the version's checkpoint; None for version 0.
    """
    if checkpoint is None or version.reference_digest is None:
        return None
    folder = checkpoint / REFERENCE_FOLDER / stream
    return folder if folder.is_dir() else None


def weights_digest(folder: Path, known: Mapping[Path, str] = MappingProxyType({})) -> str:
    """Compute a sha256 over the weight files of a policy's components, or of a folder of weights.

    Weights of one component have one digest, wherever they are.

    Args:
        known: sha256 of files that are not read for it.
    """
    digest = hashlib.sha256()
    parts = [path for stream in STREAMS if (path := folder / stream).is_dir()] or [folder]
    top = parts[0] if len(parts) == 1 else folder
    for part in parts:
        for pattern in WEIGHT_FILES:
            for path in sorted(part.glob(pattern)):
                add_file(digest, path.relative_to(top).as_posix(), path, known.get(path))
    return digest.hexdigest()
