"""Digests of a model's files: of a folder, or of a hub snapshot."""

import hashlib
from functools import lru_cache
from pathlib import Path

from grpo_core.errors import InputError

_DETERMINING = {".safetensors", ".bin", ".json", ".jinja", ".model", ".txt"}


@lru_cache(maxsize=4)
def model_digest(model: str) -> str:
    """Compute the digest of a model: of the content of a folder's files, or the commit of a hub snapshot.

    A hub name whose files are not on this machine is downloaded, unless the hub is switched off.

    Raises:
        InputError: the hub's files are not on this machine and cannot be downloaded.
    """
    folder = model_folder(model)
    if not Path(model).expanduser().is_dir():
        return folder.name
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix in _DETERMINING:
            add_file(digest, path.relative_to(folder).as_posix(), path)
    return digest.hexdigest()


def model_folder(model: str) -> Path:
    """Return a model's folder on this machine: the one that is named, or the snapshot of a hub name.

    A hub name whose files are not on this machine is downloaded, unless the hub is switched off.

    Raises:
        InputError: the hub's files are not on this machine and cannot be downloaded.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError) as error:
        hint = f"Its files are not here and cannot be downloaded: run `hf download {model}`, or give a folder."
        raise InputError("policy.model", model, hint) from error


def add_file(digest: "hashlib._Hash", name: str, path: Path) -> None:
    """Add a file's name and content to a digest."""
    with path.open("rb") as stream:
        digest.update(name.encode() + b"\0" + hashlib.file_digest(stream, "sha256").digest())


WEIGHT_FILES = ("adapter_model*.safetensors", "model*.safetensors")


REFERENCE_FOLDER = "reference"


def weights_digest(folder: Path) -> str:
    """Compute a sha256 over the weight files of a policy's folder."""
    digest = hashlib.sha256()
    for pattern in WEIGHT_FILES:
        for path in sorted(folder.glob(pattern)):
            add_file(digest, path.name, path)
    return digest.hexdigest()
