"""Digests of files."""

import functools
import hashlib
from pathlib import Path


def file_sha256(path: str) -> str:
    """Return the sha256 of a file in hexadecimal; it is read again only when its size or time has changed.

    Raises:
        OSError: the file cannot be read.
    """
    file = Path(path).expanduser().resolve()
    status = file.stat()
    return _file_sha256(file, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=1024)
def _file_sha256(file: Path, size: int, mtime_ns: int) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
