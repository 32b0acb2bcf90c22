"""Files of artifacts, read and verified: on a local disk each time, in a bucket only when they changed."""

import hashlib
import tempfile
from collections.abc import Mapping
from pathlib import Path

import fsspec
from fsspec import AbstractFileSystem

from tasks.storage.artifacts.manifest import Manifest
from tasks.storage.filesystem.files import CHUNK, is_local, sha256_of
from tasks.storage.filesystem.read_cache import ReadCache

PART = 64 * 2**20
"""Bytes of one part of an upload; a file of less than two goes in one."""
_TAGS = ("ETag", "etag", "md5Hash", "crc32c", "generation", "mtime", "updated", "LastModified")
_ATTEMPTS = 3
_LOCAL = fsspec.filesystem("file")


class ArtifactFiles:
    """Reads the files below a storage root.

    Args:
        filesystem: of the root.
        cache: copies of remote files; None keeps none.
    """

    def __init__(self, filesystem: AbstractFileSystem, cache: ReadCache | None) -> None:
        self.filesystem, self.cache = filesystem, None if is_local(filesystem) else cache

    def sha256(self, path: str) -> str:
        """Of a file; one in a bucket is read only when it is not as it was when it was last read or written.

        Raises:
            FileNotFoundError: it is missing.
        """
        if self.cache is None:
            return sha256_of(self.filesystem, path)
        stamp = self.stamp(path)
        known = None if stamp is None else self.cache.seen(self._url(path), stamp)
        if known is not None:
            return known
        with tempfile.TemporaryDirectory(prefix="grpo-") as folder:
            return self._download(path, Path(folder) / "file")

    def damage(self, folder: str, manifest: Manifest) -> str | None:
        """What is wrong with the files in `folder`, or None when they are what the manifest says."""
        for name in manifest.files:
            try:
                found = self.sha256(f"{folder}/{name}")
            except FileNotFoundError:
                return f"{name} is missing"
            if found not in manifest.accepted(name):
                return _changed(name, found, manifest)
        return None

    def fetch(self, folder: str, manifest: Manifest, target: Path) -> str | None:
        """Put the files of a remote folder below `target`; what is wrong with them, or None.

        Each is read from the root once, or not at all where the cache holds it.
        """
        for name in manifest.files:
            place = target / name
            place.parent.mkdir(parents=True, exist_ok=True)
            try:
                found = self._fetch(f"{folder}/{name}", place, manifest.accepted(name))
            except FileNotFoundError:
                return f"{name} is missing"
            if found not in manifest.accepted(name):
                return _changed(name, found, manifest)
        return None

    def keep(self, path: str, written: Path, sha256: str) -> None:
        """Remember a file that this process has just uploaded, and keep a copy of it."""
        if self.cache is not None and (stamp := self.stamp(path)) is not None:
            self.cache.note(self._url(path), stamp, sha256)
            self.cache.keep(written, sha256)

    def note_copy(self, source: str, target: str, sha256: str) -> None:
        """Remember a file that was copied within the root, where its tag tells that it is the same."""
        if self.cache is None:
            return
        stamp = self.stamp(source)
        if stamp is not None and "ETag" in stamp and stamp == self.stamp(target):
            self.cache.note(self._url(target), stamp, sha256)

    def holds(self, path: str, written: Path, sha256: str) -> bool:
        """Whether the remote file is the local one: by its tag where that tells the content, else by reading it."""
        try:
            info = self.filesystem.info(path)
            if info["size"] != written.stat().st_size:
                return False
            if str(info.get("ETag", "")).strip('"') == s3_tag(written):
                return True
            return sha256_of(self.filesystem, path) == sha256
        except FileNotFoundError:
            return False

    def stamp(self, path: str) -> Mapping[str, str] | None:
        """Size and tag of a remote file; None where the filesystem has no tag that changes with the content."""
        info = self.filesystem.info(path)
        tag = next((name for name in _TAGS if info.get(name)), None)
        return None if tag is None else {"size": str(info["size"]), tag: str(info[tag])}

    def _url(self, path: str) -> str:
        return str(self.filesystem.unstrip_protocol(path))

    def _fetch(self, path: str, target: Path, accepted: frozenset[str]) -> str:
        """The sha256 of what was put at `target`."""
        if self.cache is None:
            return self._download(path, target)
        with self.cache.reading(min(accepted)):
            stamp = self.stamp(path)
            known = None if stamp is None else self.cache.seen(self._url(path), stamp)
            if known is not None and (known not in accepted or self.cache.take(known, target)):
                return known
            return self._download(path, target)

    def _download(self, path: str, target: Path) -> str:
        """Read a file once, and keep it; one that changed meanwhile is read again."""
        for _ in range(_ATTEMPTS):
            stamp = self.stamp(path)
            # What is there may be another name of a copy that the cache keeps.
            target.unlink(missing_ok=True)
            self.filesystem.get_file(path, str(target))
            found = sha256_of(_LOCAL, str(target))
            if stamp == self.stamp(path):
                break
        else:
            # It changed during every read, so nobody knows which of its tags this content had.
            stamp = None
        if self.cache is not None and stamp is not None:
            self.cache.note(self._url(path), stamp, found)
            self.cache.keep(target, found)
        return found


def _changed(name: str, found: str, manifest: Manifest) -> str:
    return f"{name} has sha256 {found[:12]}, not {manifest.files[name][:12]}"


def s3_tag(path: Path) -> str:
    """The tag that S3 gives to a file that was uploaded in parts of PART bytes, without encryption by a key service."""
    if path.stat().st_size < 2 * PART:
        return _md5(path, 0, 2 * PART).hex()
    parts = [_md5(path, start, PART) for start in range(0, path.stat().st_size, PART)]
    return f"{hashlib.md5(b''.join(parts), usedforsecurity=False).hexdigest()}-{len(parts)}"


def _md5(path: Path, start: int, length: int) -> bytes:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as stream:
        stream.seek(start)
        while length > 0 and (chunk := stream.read(min(CHUNK, length))):
            digest.update(chunk)
            length -= len(chunk)
    return digest.digest()
