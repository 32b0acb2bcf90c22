"""The file that makes a folder an artifact: a description, the sha256 of every file in it, and a checksum."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tasks.storage.artifacts.reference import ArtifactRef, stays_inside
from tasks.storage.filesystem.checked_json import dump_checked, load_checked

MANIFEST_ENDING = ".manifest.json"
FILES, PREVIOUS, PRUNED, REPLACED = "files", "previous", "pruned", "replaced"


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest.

    Attributes:
        described: fields of the reference, except its uri and sha256.
        files: sha256 by name within the artifact's folder.
        previous: sha256 of the manifests that this one replaced; references to them mean this one.
        pruned: what was deleted from the artifact and why (a tombstone); None if nothing was deleted.
        replaced: sha256 of the files that were replaced by smaller ones or deleted. A replaced file is valid in both
            forms, since the process that replaces it may be killed halfway.
    """

    described: Mapping[str, Any]
    files: Mapping[str, str]
    previous: tuple[str, ...] = ()
    pruned: Mapping[str, Any] | None = None
    replaced: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def content(self) -> bytes:
        """Encode the manifest as the bytes of its file.

        Raises:
            ValueError: a metric is not finite.
        """
        optional = {PREVIOUS: list(self.previous), PRUNED: self.pruned, REPLACED: dict(self.replaced)}
        present = {name: value for name, value in optional.items() if value not in ([], None, {})}
        return dump_checked({**self.described, FILES: dict(self.files), **present})

    @property
    def sha256(self) -> str:
        """Digest of the manifest itself."""
        return hashlib.sha256(self.content).hexdigest()

    def reference(self, uri: str) -> ArtifactRef:
        """Make the reference that stands for the artifact at `uri`.

        Raises:
            ValueError: the manifest describes no artifact.
        """
        return ArtifactRef(uri=uri, sha256=self.sha256, **self.described)

    def matches(self, reference: ArtifactRef) -> bool:
        """Return whether the reference means this manifest, or one that it replaced."""
        known = (self.sha256, *self.previous)
        return reference.sha256 in known and self.described.get("digest") == reference.digest

    def equals_in_result(self, other: "Manifest") -> bool:
        """Return whether later stages get the same from both; measured seconds may differ."""
        kept = ("digest", "schema_version", "rows", "metrics")
        same = all(self.described.get(name) == other.described.get(name) for name in kept)
        return same and set(self.files) == set(other.files) and self.pruned == other.pruned

    def accepted(self, name: str) -> frozenset[str]:
        """Return every sha256 that a file may have."""
        return frozenset({self.files[name], self.replaced.get(name, self.files[name])})


def read_manifest(content: bytes) -> Manifest:
    """Read a manifest from its bytes.

    Raises:
        ValueError: it is no manifest, was changed, or names a file outside of its folder.
    """
    found = load_checked(content)
    files, replaced = _checked(found.pop(FILES, None)), _checked(found.pop(REPLACED, {}))
    previous, pruned = found.pop(PREVIOUS, []), found.pop(PRUNED, None)
    known = isinstance(previous, list) and all(isinstance(each, str) for each in previous)
    if not known or not isinstance(pruned, Mapping | None):
        raise ValueError("the manifest has entries of the wrong kind")
    return Manifest(found, files, tuple(previous), pruned, replaced)


def _checked(files: object) -> Mapping[str, str]:
    if not isinstance(files, dict) or not all(isinstance(sha256, str) for sha256 in files.values()):
        raise ValueError("the manifest names no files with their sha256")
    for name in files:
        if not stays_inside(name):
            raise ValueError(f"the manifest names {name!r}, which is not in its folder")
    return files
