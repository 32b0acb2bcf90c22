"""References that tasks pass to each other instead of artifacts: never the data, never a path of one machine."""

import unicodedata

from pydantic import BaseModel, ConfigDict, field_validator

from grpo_core.errors import InputError


class ArtifactRef(BaseModel):
    """A reference to one stage's output.

    Attributes:
        uri: folder of the artifact relative to the storage root, `<run>/iteration_000001/rollouts`.
        sha256: digest of the artifact's manifest, which lists the sha256 of every file.
        digest: digest of the values that later stages depend on; measured times are not among them.
        schema_version: version of the files' layout.
        rows: number of samples.
        seconds: time that the stage took when it ran.
        metrics: the stage's metrics.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    uri: str
    sha256: str
    digest: str
    schema_version: int
    rows: int
    seconds: float
    metrics: dict[str, float]

    @field_validator("uri")
    @classmethod
    def _stay_below_the_root(cls, uri: str) -> str:
        if "/" not in uri or not stays_inside(uri):
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
    """A reference to one version of the policy.

    Attributes:
        version: number of updates made so far; 0 is the initial model.
        digest: digest of the weights: all those of the initial model for version 0, later the trained ones.
        checkpoint: weights, optimizer and schedule; None for version 0.
        reference_digest: digest of the reference's weights; None while that is the initial model.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int
    digest: str
    checkpoint: ArtifactRef | None = None
    reference_digest: str | None = None


class StaleReferenceError(ValueError):
    """The artifact of a reference is missing or was changed."""


class PrunedArtifactError(InputError):
    """The artifact's files were deleted on purpose; the command line ends with exit code 2."""


def stays_inside(name: str) -> bool:
    """Return whether a relative name leads to a place inside the folder that it is looked up in."""
    if "\\" in name or any(unicodedata.category(letter) == "Cc" for letter in name):
        return False
    return all(part not in ("", ".", "..") for part in name.split("/"))
