"""Read and verify files of artifacts: on a local disk once by each reader, in a bucket only when they changed.

What was read from a bucket is kept on a disk of this machine. fsspec's file cache is neither bounded nor verified. Here
contents are kept under their sha256, which is checked each time one is taken. Notes remember the sha256 of an object
while it has a given size and tag, so that an unchanged object is not read again. Readers get hard links, so evicted
contents stay valid for them.
"""

import contextlib
import hashlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

import fsspec
from fsspec import AbstractFileSystem

from grpo_core.errors import InputError
from tasks.process import map_in_threads, user_cache
from tasks.storage.artifacts.reference import Manifest
from tasks.storage.files import FileHashes, dump_checked, is_local, load_checked, locked_file, scratch_folder, sha256_of

GIB = 2**30
_TAGS = ("ETag", "etag", "md5Hash", "crc32c", "generation", "mtime", "updated", "LastModified")
_ATTEMPTS = 3
_LOCAL = fsspec.filesystem("file")


class ReadCache:
    """A folder of copies, at most `limit` bytes, that the processes of one user share; it keeps none on a full disk.

    Processes that fill it at once may exceed the limit, each by a 16th: the folder is looked at after that many bytes.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self._contents, self._seen, self._locks = folder / "contents", folder / "seen", folder / "locks"
        self._room = 0  # bytes that are kept before the folder is looked at again

    def require_usable(self) -> None:
        """Raise InputError unless copies can be kept there."""
        try:
            with tempfile.TemporaryFile(dir=self._made(self._contents)):
                pass
        except OSError as error:
            hint = f"Copies cannot be kept there ({error}). Choose a folder that can be written."
            raise InputError("storage.cache_dir", str(self.folder), hint) from error

    @contextlib.contextmanager
    def reading(self, sha256: str) -> Iterator[None]:
        """Let one process at a time fetch a content; the others then find it in the cache."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                stack.enter_context(locked_file(self._made(self._locks) / sha256[:2]))
            yield

    def seen(self, version: str) -> str | None:
        """Return the sha256 of an object in this version (URL, size and tag), if it was read or written before."""
        try:
            known = load_checked(self._note(version).read_bytes())
        except (OSError, ValueError):
            return None
        return str(known.get("sha256")) if known.get("version") == version else None

    def note(self, version: str, sha256: str) -> None:
        """Remember the content of an object in this version."""
        with contextlib.suppress(OSError):
            self._made(self._seen)
            with _replacing(self._note(version)) as partial:
                partial.write_bytes(dump_checked({"version": version, "sha256": sha256}))

    def take(self, sha256: str, target: Path) -> bool:
        """Copy a content to `target`; False if it is not kept, or its copy was damaged."""
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
            self._made(self._contents)
            if size > self._room:
                self._make_room(size)
            _link(path, kept)
            os.utime(kept)
            self._room -= size

    def _make_room(self, size: int) -> None:
        share = self.limit // 16
        limit = self.limit - max(size, share)
        entries: list[tuple[int, int, Path]] = []
        for path in (*self._contents.iterdir(), *(self._seen.iterdir() if self._seen.exists() else ())):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                entries.append((status.st_mtime_ns, status.st_size, path))
        total = sum(each for _, each, _ in entries)
        for _, found, path in sorted(entries):
            if total <= limit:
                break
            path.unlink(missing_ok=True)
            total -= found
        self._room = min(self.limit - total, max(size, share))

    def _made(self, folder: Path) -> Path:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.mkdir(exist_ok=True)
        return folder

    def _note(self, version: str) -> Path:
        return self._seen / f"{hashlib.sha256(version.encode()).hexdigest()}.json"


def default_cache(limit: int = 20 * GIB) -> ReadCache | None:
    """Return the cache in the user's cache folder; None for a user without a home."""
    folder = user_cache()
    return None if folder is None else ReadCache(folder, limit)


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


class ArtifactFiles:
    """Reads the files below a storage root; without a cache, remote files are not copied."""

    def __init__(self, filesystem: AbstractFileSystem, cache: ReadCache | None) -> None:
        self.filesystem, self.cache = filesystem, None if is_local(filesystem) else cache
        self._hashes = FileHashes(filesystem) if is_local(filesystem) else None

    def sha256(self, path: str) -> str:
        """Return a file's sha256; it is read only if it changed since it was last read, in a bucket also written."""
        if self._hashes is not None:
            return self._hashes.sha256(path)
        if self.cache is None:
            return sha256_of(self.filesystem, path)
        if (known := self._known(path)) is not None:
            return known
        with scratch_folder() as folder:
            return self._download(path, folder / "file")

    def damage(self, folder: str, manifest: Manifest, only: Iterable[str] | None = None) -> str | None:
        """Return what is wrong with the files in `folder`, or with `only` these; None if they match the manifest."""
        names = list(manifest.files if only is None else only)

        def look(name: str) -> str | None:
            reason = self.damage_of(folder, manifest, name)
            return None if reason is None else f"{name} {reason}"

        # A disk reads one file after the other fastest, and then none after the first that is damaged.
        found = map(look, names) if is_local(self.filesystem) else map_in_threads(look, names)
        return next((each for each in found if each is not None), None)

    def damage_of(self, folder: str, manifest: Manifest, name: str) -> str | None:
        """Return what is wrong with one of the manifest's files; None if it matches."""
        try:
            reason = _difference(manifest, name, self.sha256(f"{folder}/{name}"))
            return reason or _oversized(self.filesystem, f"{folder}/{name}")
        except FileNotFoundError:
            return "is missing"

    def fetch(self, folder: str, manifest: Manifest, target: Path, only: Iterable[str] | None = None) -> str | None:
        """Copy the files of a remote folder, or `only` these, below `target`; return what is wrong with one."""

        def get(name: str) -> str | None:
            place = target / name
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                reason = _difference(manifest, name, self._fetch(f"{folder}/{name}", place, manifest.files[name]))
                reason = reason or _oversized(_LOCAL, str(place))
            except FileNotFoundError:
                reason = "is missing"
            return None if reason is None else f"{name} {reason}"

        found = map_in_threads(get, list(manifest.files if only is None else only))
        return next((each for each in found if each is not None), None)

    def keep(self, path: str, local: Path, sha256: str) -> None:
        """Remember a file that this process has just uploaded, and keep a copy of it."""
        if self.cache is not None and (version := self._version(path)) is not None:
            self.cache.note(version, sha256)
            self.cache.keep(local, sha256)

    def note_copy(self, source: str, target: str, sha256: str) -> None:
        """Remember a file that was copied within the root, if its ETag proves that it is unchanged."""
        if self.cache is None:
            return
        tags = [str(self.filesystem.info(path).get("ETag", "")) for path in (source, target)]
        if tags[0] and tags[0] == tags[1] and (version := self._version(target)) is not None:
            self.cache.note(version, sha256)

    def _version(self, path: str) -> str | None:
        """Return URL, size and tag of a remote file; None if no tag of the filesystem changes with the content."""
        info = self.filesystem.info(path)
        tag = next((name for name in _TAGS if info.get(name)), None)
        return None if tag is None else f"{self.filesystem.unstrip_protocol(path)} {info['size']} {tag} {info[tag]}"

    def _known(self, path: str) -> str | None:
        version = self._version(path)
        return None if version is None or self.cache is None else self.cache.seen(version)

    def _fetch(self, path: str, target: Path, expected: str) -> str:
        """Put a file at `target` and return its sha256; one that is known to have another is not fetched."""
        if self.cache is None:
            return self._download(path, target)
        with self.cache.reading(expected):
            known = self._known(path)
            if known is not None and (known != expected or self.cache.take(known, target)):
                return known
            return self._download(path, target)

    def _download(self, path: str, target: Path) -> str:
        """Read a file once, and keep it; one that changed meanwhile is read again."""
        for _ in range(_ATTEMPTS):
            version = self._version(path)
            # The old target may be a hard link to a copy in the cache.
            target.unlink(missing_ok=True)
            self.filesystem.get_file(path, str(target))
            found = sha256_of(_LOCAL, str(target))
            if version == self._version(path):
                break
        else:
            # It changed during every read, so the tag of this content is unknown.
            version = None
        if self.cache is not None and version is not None:
            self.cache.note(version, found)
            self.cache.keep(target, found)
        return found


def _oversized(filesystem: AbstractFileSystem, path: str) -> str | None:
    if not path.endswith(".parquet"):
        return None
    # Most of the files are no tables, and pyarrow takes longer to import than they take to read.
    from tasks.storage.parquet import oversized_file

    return oversized_file(filesystem, path)


def _difference(manifest: Manifest, name: str, found: str) -> str | None:
    expected = manifest.files[name]
    return None if found == expected else f"has sha256 {found[:12]}, not {expected[:12]}"
