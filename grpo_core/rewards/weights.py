"""Weight files on disk: is the right one there, and what is in it."""

import functools
import hashlib
import pickle
import re
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from grpo_core.errors import InputError


@dataclass(frozen=True)
class PublishedWeights:
    """Where a weight file can be had.

    Attributes:
        file: its name as published; the digits after the last dash are the start of its sha256.
        project: who publishes it.
        url: from where.
    """

    file: str
    project: str
    url: str

    @property
    def sha256_start(self) -> str:
        """First digits of the sha256, read from the file's name."""
        return Path(self.file).stem.rsplit("-", 1)[-1]


def check_digest_setting(place: str, value: object) -> None:
    """Refuse what is neither None nor a sha256, whole or its first 8 digits or more.

    Raises:
        InputError: it is not.
    """
    if value is not None and not (isinstance(value, str) and re.fullmatch(r"[0-9a-fA-F]{8,64}", value)):
        raise InputError(place, value, "Set the file's sha256: 64 hexadecimal digits, or at least the first 8.")


def find_weights_problem(
    place: str, path: str | None, sha256: str | None, published: PublishedWeights
) -> InputError | None:
    """What is wrong with a weight file, without loading it; None where nothing is.

    Args:
        place: of the setting that holds the path, for messages; the digest's is the same with ``_sha256`` added.
        path: the setting; None where it is not set.
        sha256: the digest that the file must have, whole or its first digits. Without it, a file with the published
            name must have the digest that its name claims.
        published: where the file comes from.
    """
    obtain = (
        f"Download {published.file}, published by {published.project} at {published.url} (torchvision keeps it in "
        f"torch's hub/checkpoints folder), and set `{place.rsplit('.', 1)[-1]}` in the reward's settings to its path."
    )
    if path is None:
        return InputError(place, None, f"This reward needs weights that its package does not hold. {obtain}")
    if not Path(path).expanduser().is_file():
        return InputError(place, path, f"There is no such file. {obtain}")
    try:
        found = file_sha256(path)
    except OSError as error:
        return InputError(place, path, f"The file cannot be read ({error.strerror}). Make it readable.")
    named = published.sha256_start if Path(path).name == published.file else ""
    expected = (sha256 or named).lower()
    if not found.startswith(expected):
        mend = f"The sha256 of {path} is {found}. Fetch the file again ({published.url}), or set its own digest."
        return InputError(f"{place}_sha256", expected, mend)
    return None


def file_sha256(path: str) -> str:
    """sha256 of the file's bytes in hexadecimal; read again only when its size or time has changed.

    Raises:
        OSError: the file cannot be read.
    """
    file = Path(path).expanduser().resolve()
    status = file.stat()
    return _file_sha256(file, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=64)
def _file_sha256(file: Path, size: int, mtime_ns: int) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def load_state_dict(place: str, path: str) -> dict[str, Tensor]:
    """The tensors of a .safetensors file, or of a PyTorch file without running code from it; on the CPU.

    Raises:
        InputError: not such a file, or one that holds something else than named tensors.
    """
    file = Path(path).expanduser()
    try:
        if file.suffix == ".safetensors":
            return safetensors.torch.load_file(file)
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        mend = f"It cannot be read as a state dict ({reason}). Give a complete .safetensors file or torch.save file."
        raise InputError(place, path, mend) from error
    if not isinstance(loaded, dict) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise InputError(place, path, "It does not hold named tensors. Give the state dict itself.")
    return loaded
