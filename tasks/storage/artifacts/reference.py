"""The small record that stands for an artifact between tasks: never the data, never a path of one machine."""

from pydantic import BaseModel, ConfigDict, field_validator

from tasks.storage.artifacts.names import stays_inside


class ArtifactRef(BaseModel):
    """One stage's output.

    Attributes:
        uri: folder of the artifact relative to the storage root, `<run>/iteration_000001/rollouts`.
        sha256: of the artifact's manifest, which holds the sha256 of every file.
        digest: of the values that later stages depend on; measured times are not among them.
        schema_version: of the files' layout.
        rows: samples.
        seconds: that the stage took when it ran.
        metrics: the stage's figures.
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
    """One version of the policy.

    Attributes:
        version: updates made so far; 0 is the model as it was given.
        digest: of the weights that sample: the given model's for version 0, the trained part's afterwards.
        checkpoint: weights, optimizer and schedule; None for version 0.
        reference_digest: of the reference's weights; None while it is the model as it was given.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    version: int
    digest: str
    checkpoint: ArtifactRef | None = None
    reference_digest: str | None = None


class StaleReferenceError(ValueError):
    """What a reference stands for is missing, or no longer what it was."""
