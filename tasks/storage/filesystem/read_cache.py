"""Copies of files that were read from a bucket, on a disk of this machine, bounded in size.

fsspec's file cache is neither bounded nor verified. Here contents are kept under their sha256, which is checked each
time one is taken. Notes remember the sha256 of an object while it has a given size and tag, so that an unchanged object
is not read again. Readers get hard links, so evicted contents stay valid for them.
"""

import contextlib
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import fsspec

from grpo_core.errors import InputError
from tasks.storage.filesystem.checked_json import dump_checked, load_checked
from tasks.storage.filesystem.files import locked_file, sha256_of

GIB = 2**30
_LOCAL = fsspec.filesystem("file")


class ReadCache:
    """A folder of copies that several processes share; on a full or read-only disk it keeps nothing.

    Args:
        folder: a folder of this user alone; nothing is written yet.
        limit: bytes of all copies; a larger file is not kept.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self._contents, self._seen, self._locks = folder / "contents", folder / "seen", folder / "locks"

    def require_usable(self) -> None:
        """Raise InputError unless copies can be kept there."""
        try:
            self._make(self._contents)
            probe = self._contents / f".{uuid.uuid4().hex}"
            probe.touch()
            probe.unlink()
        except OSError as error:
            hint = f"Copies cannot be kept there ({error}). Choose a folder that can be written."
            raise InputError("storage.cache_dir", str(self.folder), hint) from error

    @contextlib.contextmanager
    def reading(self, sha256: str) -> Iterator[None]:
        """Let one process at a time fetch a content; the others then find it in the cache."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                self._make(self._locks)
                stack.enter_context(locked_file(self._locks / sha256[:2]))
            yield

    def seen(self, version: str) -> str | None:
        """Return the sha256 of an object in this version, if it was read or written before.

        Args:
            version: URL, size and tag of the object.
        """
        try:
            known = load_checked(self._note(version).read_bytes())
        except (OSError, ValueError):
            return None
        return str(known.get("sha256")) if known.get("version") == version else None

    def note(self, version: str, sha256: str) -> None:
        """Remember the content of an object in this version."""
        with contextlib.suppress(OSError):
            self._make(self._seen)
            with _replacing(self._note(version)) as partial:
                partial.write_bytes(dump_checked({"version": version, "sha256": sha256}))

    def take(self, sha256: str, target: Path) -> bool:
        """Copy a content to `target`; False if it is not kept, or its copy was damaged.

        Raises:
            OSError: `target` cannot be written.
        """
        kept = self._contents / sha256
        if not os.access(kept, os.R_OK):
            return False
        target.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            _link(kept, target)
            if sha256_of(_LOCAL, str(target)) == sha256:
                with contextlib.suppress(OSError):
                    os.utime(kept)
                return True
            target.unlink()
            with contextlib.suppress(OSError):
                kept.unlink()
        return False

    def keep(self, path: Path, sha256: str) -> None:
        """Keep a file whose sha256 is known; the least recently read are evicted until it fits."""
        size, kept = path.stat().st_size, self._contents / sha256
        if size > self.limit or kept.exists():
            return
        with contextlib.suppress(OSError):
            self._make(self._contents)
            self._evict(self.limit - size)
            _link(path, kept)
            os.utime(kept)

    def _evict(self, limit: int) -> None:
        entries: list[tuple[int, int, Path]] = []
        for path in (*self._contents.iterdir(), *(self._seen.iterdir() if self._seen.exists() else ())):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                entries.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries):
            if total <= limit:
                break
            path.unlink(missing_ok=True)
            total -= size

    def _make(self, folder: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.mkdir(exist_ok=True)

    def _note(self, version: str) -> Path:
        return self._seen / f"{hashlib.sha256(version.encode()).hexdigest()}.json"


def default_cache(limit: int = 20 * GIB) -> ReadCache | None:
    """Return the cache in the user's cache folder; None for a user without a home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(given) if Path(given).is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return ReadCache(base / "grpo", limit)


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[Path]:
    """Yield a file that replaces `target` in one step; the file of a killed process is evicted like any other."""
    partial = target.with_name(f".{uuid.uuid4().hex}.part")
    try:
        yield partial
        partial.replace(target)
    finally:
        # Renaming a hard link to another link of the same file keeps both.
        partial.unlink(missing_ok=True)


def _link(source: Path, target: Path) -> None:
    """Give a file another name, or copy it where the disk has no links."""
    with _replacing(target) as partial:
        try:
            partial.hardlink_to(source)
        except FileNotFoundError:
            raise
        except OSError:
            shutil.copyfile(source, partial)
