"""Copies of what was read from a bucket, on a disk of this machine, bounded in size.

Contents are kept under their sha256, which is checked each time that one is taken, as it is for a file of a local root.
Beside them stands which content an object had when it had a given size and tag, so that an object that is as it was
need not be read again. Readers get hard links: what is removed here stays whole with them.
"""

import contextlib
import errno
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import fsspec

from grpo_core.errors import InputError
from tasks.storage.filesystem.checked_json import dump_checked, load_checked
from tasks.storage.filesystem.files import sha256_of
from tasks.storage.filesystem.staging import clear_abandoned, locked_file, staging_folder

GIB = 2**30
_CONTENTS, _SEEN, _LOCKS, _INCOMING = "contents", "seen", "locks", ".incoming"
_NOTES_A_FOLDER = 128
_NO_LINKS = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP})
_LOCAL = fsspec.filesystem("file")


class ReadCache:
    """A folder of copies that several processes share; a disk that is full or read-only makes it do nothing."""

    def __init__(self, folder: Path, limit: int) -> None:
        """Point at a folder; nothing is written yet.

        Args:
            folder: of this user alone.
            limit: bytes of all copies; a file that is larger is not kept.
        """
        self.folder, self.limit = folder, limit

    def require_usable(self) -> None:
        """Raise InputError unless copies can be kept there."""
        try:
            with self._staging() as staged:
                (staged / "probe").write_bytes(b"")
        except OSError as error:
            hint = f"Copies cannot be kept there ({error}). Choose a folder that can be written."
            raise InputError("storage.cache_dir", str(self.folder), hint) from error

    @contextlib.contextmanager
    def reading(self, sha256: str) -> Iterator[None]:
        """One process at a time fetches a content; the others find it kept."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                self._make(_LOCKS)
                stack.enter_context(locked_file(self.folder / _LOCKS / sha256[:2]))
            yield

    def seen(self, place: str, stamp: Mapping[str, str]) -> str | None:
        """The sha256 of the object at this URL, if it is as it was when it was last read or written."""
        try:
            known = load_checked(self._note(place).read_bytes())
        except (OSError, ValueError):
            return None
        if known.get("place") != place or known.get("stamp") != dict(stamp):
            return None
        return str(known.get("sha256"))

    def note(self, place: str, stamp: Mapping[str, str], sha256: str) -> None:
        """Remember what the object at this URL holds while it has this size and tag."""
        content = dump_checked({"place": place, "stamp": dict(stamp), "sha256": sha256})
        with contextlib.suppress(OSError), self._staging() as staged:
            (staged / "note").write_bytes(content)
            target = self._note(place)
            target.parent.mkdir(parents=True, exist_ok=True)
            (staged / "note").replace(target)
            self._forget(target.parent)

    def take(self, sha256: str, target: Path) -> bool:
        """Put a content at `target`; False where it is not kept, or is no longer what it was.

        Raises:
            OSError: `target` cannot be written.
        """
        kept = self._content(sha256)
        try:
            kept.open("rb").close()
        except OSError:
            return False
        try:
            _link(kept, target)
        except FileNotFoundError:
            return False
        if sha256_of(_LOCAL, str(target)) != sha256:
            target.unlink()
            with contextlib.suppress(OSError):
                kept.unlink()
            return False
        with contextlib.suppress(OSError):
            os.utime(kept)
        return True

    def keep(self, path: Path, sha256: str) -> None:
        """Keep a file whose sha256 is known; the longest unread go until it fits."""
        size = path.stat().st_size
        kept = self._content(sha256)
        if size > self.limit or kept.exists():
            return
        # Nobody's stage fails for want of a copy.
        with contextlib.suppress(OSError), self._staging() as staged:
            self._make_room(size)
            _link(path, staged / "content")
            os.utime(staged / "content")
            kept.parent.mkdir(parents=True, exist_ok=True)
            (staged / "content").replace(kept)

    def _make_room(self, size: int) -> None:
        entries = sorted(self._entries(), key=lambda entry: entry[1].st_mtime_ns)
        total = size + sum(status.st_size for _, status in entries)
        for path, status in entries:
            if total <= self.limit:
                break
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            total -= status.st_size

    @staticmethod
    def _forget(folder: Path) -> None:
        """Notes are small, but each new place of an object makes one."""
        notes = sorted(folder.iterdir(), key=lambda note: note.stat().st_mtime_ns)
        for note in notes[:-_NOTES_A_FOLDER]:
            note.unlink(missing_ok=True)

    def _entries(self) -> Iterator[tuple[Path, os.stat_result]]:
        for path in (self.folder / _CONTENTS).glob("*/*"):
            with contextlib.suppress(FileNotFoundError):
                yield path, path.stat()

    @contextlib.contextmanager
    def _staging(self) -> Iterator[Path]:
        self._make(_INCOMING)
        clear_abandoned(self.folder / _INCOMING)
        with staging_folder(self.folder / _INCOMING) as folder:
            yield folder

    def _make(self, name: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (self.folder / name).mkdir(exist_ok=True)

    def _content(self, sha256: str) -> Path:
        return self.folder / _CONTENTS / sha256[:2] / sha256

    def _note(self, place: str) -> Path:
        name = hashlib.sha256(place.encode()).hexdigest()
        return self.folder / _SEEN / name[:2] / f"{name}.json"


def default_cache(limit: int = 20 * GIB) -> ReadCache | None:
    """The cache in the user's cache folder; None for a user without a home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(given) if Path(given).is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return ReadCache(base / "grpo", limit)


def _link(source: Path, target: Path) -> None:
    """The same file under another name, in the place of what is there; a copy where the disk has no such thing."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{uuid.uuid4().hex}.part")
    try:
        try:
            partial.hardlink_to(source)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            shutil.copyfile(source, partial)
        partial.replace(target)
    finally:
        # Renaming one name of a file to another name of the same file leaves both.
        partial.unlink(missing_ok=True)
