"""The file that makes a folder an artifact: what it is, and the sha256 of every file in it, under a seal of its own."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.storage.artifacts.names import stays_inside
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.filesystem.checked_json import dump_checked, load_checked

FILES, FORMER, PRUNED, LEAVING = "files", "previous", "pruned", "leaving"
_BESIDE_THE_REFERENCE = (FILES, FORMER, PRUNED, LEAVING)


@dataclass(frozen=True)
class Manifest:
    """What a manifest says.

    Attributes:
        content: its bytes.
        described: fields of the reference, all but its uri and sha256.
        files: sha256 by name within the artifact's folder.
        previous: sha256 of the manifests that it succeeded; references to them mean this one.
        pruned: what was taken away from the artifact and why; None while it is as its stage made it.
        leaving: files that are being replaced or removed, as they were. A process may have been killed amid that.
    """

    content: bytes
    described: Mapping[str, Any]
    files: Mapping[str, str]
    previous: tuple[str, ...] = ()
    pruned: Mapping[str, Any] | None = None
    leaving: Mapping[str, str] | None = None

    @property
    def sha256(self) -> str:
        """Of the manifest itself."""
        return hashlib.sha256(self.content).hexdigest()

    def reference(self, uri: str) -> ArtifactRef:
        """The reference that stands for the artifact at `uri`.

        Raises:
            ValueError: the manifest describes no artifact.
        """
        return ArtifactRef(uri=uri, sha256=self.sha256, **self.described)

    def answers(self, reference: ArtifactRef) -> bool:
        """Whether the reference means this manifest, or one that it succeeded."""
        known = (self.sha256, *self.previous)
        return reference.sha256 in known and self.described.get("digest") == reference.digest

    def equals_in_result(self, other: "Manifest") -> bool:
        """Whether later stages find the same in both; measured seconds may differ."""
        kept = ("digest", "schema_version", "rows", "metrics")
        same = all(self.described.get(name) == other.described.get(name) for name in kept)
        return same and set(self.files) == set(other.files) and self.pruned == other.pruned

    def accepted(self, name: str) -> frozenset[str]:
        """The sha256 that a file may have."""
        return frozenset({self.files[name]} | {(self.leaving or {}).get(name, self.files[name])})

    def succeeding(
        self,
        other: "Manifest",
        *,
        pruned: Mapping[str, Any] | None = None,
        leaving: Mapping[str, str] | None = None,
    ) -> "Manifest":
        """The same, so that references to `other` mean it too."""
        previous = tuple(dict.fromkeys((other.sha256, *other.previous, *self.previous)))
        return written(self.described, self.files, previous=previous, pruned=pruned, leaving=leaving)


def written(
    described: Mapping[str, Any],
    files: Mapping[str, str],
    *,
    previous: Sequence[str] = (),
    pruned: Mapping[str, Any] | None = None,
    leaving: Mapping[str, str] | None = None,
) -> Manifest:
    """A manifest with its bytes."""
    beside: dict[str, Any] = {FILES: dict(files)}
    beside |= {FORMER: list(previous)} if previous else {}
    beside |= {PRUNED: dict(pruned)} if pruned is not None else {}
    beside |= {LEAVING: dict(leaving)} if leaving is not None else {}
    return Manifest(dump_checked({**described, **beside}), described, files, tuple(previous), pruned, leaving)


def read_manifest(content: bytes) -> Manifest:
    """A manifest from its bytes.

    Raises:
        ValueError: it is no manifest, not as it was written, or names a file outside of its folder.
    """
    found = load_checked(content)
    described = {name: value for name, value in found.items() if name not in _BESIDE_THE_REFERENCE}
    leaving, pruned, previous = found.get(LEAVING), found.get(PRUNED), found.get(FORMER, [])
    known = isinstance(previous, list) and all(isinstance(each, str) for each in previous)
    if not known or not isinstance(pruned, Mapping | None):
        raise ValueError("the manifest has entries of another kind than it should")
    return Manifest(
        content,
        described,
        _checked(found.get(FILES)),
        tuple(previous),
        pruned,
        None if leaving is None else _checked(leaving),
    )


def _checked(files: object) -> Mapping[str, str]:
    if not isinstance(files, dict) or not all(isinstance(sha256, str) for sha256 in files.values()):
        raise ValueError("the manifest names no files with their sha256")
    for name in files:
        if not stays_inside(name):
            raise ValueError(f"the manifest names {name!r}, which is not in its folder")
    return files
