"""Seeds derived from the place of each random number, and digests of files."""

import functools
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def derive_seed(run_seed: int, *place: int | str) -> int:
    """Derive the seed, in [0, 2**63), for one place of a run; the same on every platform, whatever ran before.

    Args:
        place: where the number is used, from the general to the particular: iteration, stage, sample.
    """
    # A separator inside a name is doubled, so that no two places give the same text.
    escaped = [f"{type(part).__name__}:{part}".replace("\x1f", "\x1f\x1f") for part in (run_seed, *place)]
    named = "\x1f".join(escaped)
    return int.from_bytes(hashlib.sha256(named.encode()).digest()[:8], "big") >> 1


def make_generator(seed: int) -> "torch.Generator":
    """Return a generator with this seed, on the CPU so that every device gets the same numbers."""
    import torch

    return torch.Generator(device="cpu").manual_seed(seed)


def file_sha256(path: str) -> str:
    """Return the sha256 of a file in hexadecimal; it is read again only when file, size or time is another."""
    file = Path(path).expanduser().resolve()
    status = file.stat()
    return _file_sha256(file, status.st_ino, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=4096)
def _file_sha256(file: Path, inode: int, size: int, mtime_ns: int) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
