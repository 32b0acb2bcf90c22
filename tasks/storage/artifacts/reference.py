"""References that tasks pass to each other instead of artifacts, and the manifests that they stand for.

A reference never contains data or a path of one machine. A manifest is the file that makes a folder an artifact: a
description, the sha256 of every file in it, and a checksum.
"""

import hashlib
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from grpo_core.errors import InputError
from grpo_core.policies.trained.settings import CopyName
from tasks.storage.files import dump_checked, load_checked

MANIFEST_ENDING = ".manifest.json"


class ArtifactRef(BaseModel):
    """A reference to one stage's output."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    uri: str  # folder of the artifact relative to the storage root, `<run>/iteration_000001/rollouts`
    sha256: str  # digest of the artifact's manifest as its stage wrote it, with the sha256 of every file
    digest: str  # digest of the values that later stages depend on; measured times are not among them
    schema_version: int  # version of the files' layout
    rows: int  # number of samples
    seconds: float  # time that the stage took when it ran
    metrics: dict[str, float]  # the stage's metrics
    # Most bytes that PyTorch had allocated on the GPU while the stage ran; None without a GPU, and for stages that use
    # none.
    peak_memory: int | None = None

    @field_validator("uri")
    @classmethod
    def _stay_below_the_root(cls, uri: str) -> str:
        if "/" not in uri or not _stays_inside(uri):
            raise ValueError("an artifact lies in a folder of a run, below the storage root")
        return uri

    @property
    def run(self) -> str:
        """Name of the run that the artifact was written in."""
        return self.uri.split("/", 1)[0]

    @property
    def folder(self) -> str:
        """The artifact's folder within its run."""
        return self.uri.split("/", 1)[1]


class PolicyRef(BaseModel):
    """A reference to one version of the policy."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int  # number of updates made so far; 0 is the initial model
    digest: str  # digest of the weights: all those of the initial model for version 0, later the trained ones
    checkpoint: ArtifactRef | None = None  # weights, optimizer and schedule; None for version 0
    # Digests of the other weights of the version: of the reference, unless that is the initial model; of the moving
    # average, where one is kept; of the old policy, where it samples in place of the trained weights.
    copies: Mapping[CopyName, str] = Field(default_factory=dict)

    @property
    def averaged(self) -> "PolicyRef":
        """The version with its moving average as its weights, to be evaluated or exported; itself without one."""
        return self.model_copy(update={"digest": self.copies.get("ema", self.digest)})

    @property
    def sampler(self) -> "PolicyRef":
        """The version with the weights that sample training rollouts as its weights; itself where these are trained."""
        return self.model_copy(update={"digest": self.copies.get("old", self.digest)})

    @property
    def copy_name(self) -> CopyName | None:
        """The copy that the digest names, as in `averaged` and `sampler`; None for the trained weights."""
        names: tuple[CopyName, ...] = ("ema", "old")
        return next((name for name in names if self.copies.get(name) == self.digest), None)

    def with_copies(self, *names: CopyName) -> "PolicyRef":
        """Return the version with these copies alone."""
        return self.model_copy(update={"copies": {name: self.copies[name] for name in names if name in self.copies}})


class StaleReferenceError(ValueError):
    """The artifact of a reference is missing or was changed."""


class PrunedArtifactError(InputError):
    """The artifact's files were deleted on purpose; the command line ends with exit code 2."""


@dataclass(frozen=True)
class Manifest:
    """The content of a manifest."""

    described: Mapping[str, Any]  # fields of the reference, except its uri and sha256
    files: Mapping[str, str]  # sha256 by name within the artifact's folder
    # What was deleted from the artifact and why (a tombstone); None if nothing was deleted.
    pruned: Mapping[str, Any] | None = None
    deleted: Mapping[str, str] = field(default_factory=dict)  # sha256 of the deleted files by name

    @cached_property
    def content(self) -> bytes:
        """The bytes of its file; ValueError if a metric is not finite."""
        tombstone = {} if self.pruned is None else {"pruned": self.pruned, "deleted": dict(self.deleted)}
        return dump_checked({**self.described, "files": dict(self.files), **tombstone})

    @cached_property
    def sha256(self) -> str:
        """Digest of the manifest as the stage wrote it: deleting files changes no reference to the artifact."""
        written = self if self.pruned is None else Manifest(self.described, {**self.files, **self.deleted})
        return hashlib.sha256(written.content).hexdigest()

    def reference(self, uri: str) -> ArtifactRef:
        """Make the reference to the artifact at `uri`; ValueError or TypeError if it describes no artifact."""
        return ArtifactRef(uri=uri, sha256=self.sha256, **self.described)

    def matches(self, reference: ArtifactRef) -> bool:
        """Return whether the reference means this artifact."""
        return reference.sha256 == self.sha256 and self.described.get("digest") == reference.digest

    def equals_in_result(self, other: "Manifest") -> bool:
        """Return whether later stages get the same from both; measured seconds may differ."""
        kept = ("digest", "schema_version", "rows", "metrics")
        same = all(self.described.get(name) == other.described.get(name) for name in kept)
        return same and set(self.files) == set(other.files) and self.pruned == other.pruned


@lru_cache(maxsize=64)
def read_manifest(content: bytes) -> Manifest:
    """Read a manifest; ValueError if it is none, was changed, or names a file outside of its folder."""
    found = load_checked(content)
    files, deleted = _checked(found.pop("files", None)), _checked(found.pop("deleted", {}))
    pruned = found.pop("pruned", None)
    if not isinstance(pruned, Mapping | None):
        raise ValueError("the manifest has entries of the wrong kind")
    return Manifest(found, files, pruned, deleted)


def _checked(files: object) -> Mapping[str, str]:
    if not isinstance(files, dict) or not all(isinstance(sha256, str) for sha256 in files.values()):
        raise ValueError("the manifest names no files with their sha256")
    for name in files:
        if not _stays_inside(name):
            raise ValueError(f"the manifest names {name!r}, which is not in its folder")
    return files


def _stays_inside(name: str) -> bool:
    """Return whether a relative name leads to a place inside the folder that it is looked up in."""
    if "\\" in name or any(unicodedata.category(letter) == "Cc" for letter in name):
        return False
    return all(part not in ("", ".", "..") for part in name.split("/"))
