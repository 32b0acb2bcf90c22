"""Read and verify files of artifacts: on a local disk each time, in a bucket only when they changed."""

import tempfile
from pathlib import Path

import fsspec
from fsspec import AbstractFileSystem

from tasks.storage.artifacts.manifest import Manifest
from tasks.storage.filesystem.files import is_local, sha256_of
from tasks.storage.filesystem.read_cache import ReadCache

_TAGS = ("ETag", "etag", "md5Hash", "crc32c", "generation", "mtime", "updated", "LastModified")
_ATTEMPTS = 3
_LOCAL = fsspec.filesystem("file")


class ArtifactFiles:
    """Reads the files below a storage root.

    Args:
        filesystem: the root's filesystem.
        cache: copies of remote files; None for no copies.
    """

    def __init__(self, filesystem: AbstractFileSystem, cache: ReadCache | None) -> None:
        self.filesystem, self.cache = filesystem, None if is_local(filesystem) else cache

    def sha256(self, path: str) -> str:
        """Return a file's sha256; one in a bucket is read only if it changed since it was last read or written.

        Raises:
            FileNotFoundError: it is missing.
        """
        if self.cache is None:
            return sha256_of(self.filesystem, path)
        version = self._version(path)
        known = None if version is None else self.cache.seen(version)
        if known is not None:
            return known
        with tempfile.TemporaryDirectory(prefix="grpo-") as folder:
            return self._download(path, Path(folder) / "file")

    def damage(self, folder: str, manifest: Manifest) -> str | None:
        """Return what is wrong with the files in `folder`; None if they match the manifest."""
        for name in manifest.files:
            try:
                found = self.sha256(f"{folder}/{name}")
            except FileNotFoundError:
                return f"{name} is missing"
            if found not in manifest.accepted(name):
                return _changed(name, found, manifest)
        return None

    def fetch(self, folder: str, manifest: Manifest, target: Path) -> str | None:
        """Copy the files of a remote folder below `target`; return what is wrong with them, or None.

        Each is read from the root once, or not at all if the cache has it.
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

    def _fetch(self, path: str, target: Path, accepted: frozenset[str]) -> str:
        """Put a file at `target` and return its sha256."""
        if self.cache is None:
            return self._download(path, target)
        with self.cache.reading(min(accepted)):
            version = self._version(path)
            known = None if version is None else self.cache.seen(version)
            if known is not None and (known not in accepted or self.cache.take(known, target)):
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


def _changed(name: str, found: str, manifest: Manifest) -> str:
    return f"{name} has sha256 {found[:12]}, not {manifest.files[name][:12]}"
