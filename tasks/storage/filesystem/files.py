"""The steps that make a write whole: fsync of the content, one rename, fsync of the folder."""

import hashlib
import os
import uuid
from pathlib import Path

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

CHUNK = 1 << 20


def is_local(filesystem: AbstractFileSystem) -> bool:
    """Whether paths of this filesystem are paths of this machine."""
    return isinstance(filesystem, LocalFileSystem)


def sha256_of(filesystem: AbstractFileSystem, path: str) -> str:
    """Hex digest of a file."""
    digest = hashlib.sha256()
    with filesystem.open(path, "rb") as stream:
        while chunk := stream.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def fsync_path(path: Path) -> None:
    """Force a file's content, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_tree(folder: Path) -> None:
    """Force everything below a folder to the disk."""
    for path in sorted(folder.rglob("*")):
        fsync_path(path)
    fsync_path(folder)


def write_whole(filesystem: AbstractFileSystem, path: str, content: bytes, *, scratch: Path) -> None:
    """Write a small file so that a reader sees all of it or nothing; an existing one is replaced.

    Args:
        filesystem: where the file goes.
        path: the file.
        content: all of it.
        scratch: folder of this process on the same disk, for what is not whole yet.
    """
    if not is_local(filesystem):
        filesystem.pipe_file(path, content)
        return
    target, temporary = Path(path), scratch / f"{uuid.uuid4().hex}.part"
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary.write_bytes(content)
    fsync_path(temporary)
    temporary.replace(target)
    fsync_path(target.parent)


def _open_to_readers(folder: Path) -> None:
    """Give the files the rights that the folder has: safetensors writes for their owner alone, and a run is shared."""
    rights = folder.stat().st_mode & 0o666
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(rights)


def settle_folder(staged: Path) -> None:
    """Force a staged folder to the disk, with the rights that its files are to have."""
    _open_to_readers(staged)
    fsync_tree(staged)


def move_folder(staged: Path, target: Path) -> None:
    """Move a settled folder to its place on the same disk, in one rename.

    It lasts once the manifest beside it does, which forces the entries of their folder to the disk; where the power
    fails in between, a manifest without its folder is no artifact.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    staged.rename(target)


def files_below(folder: Path) -> dict[str, Path]:
    """Every file below a folder by its relative name with forward slashes, sorted."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path for path in paths}
