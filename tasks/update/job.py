"""What an update of a policy is given, in this process or another, and what it reports back."""

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict

from configs.sections import PlacementSection, StorageSection
from configs.training import AnyUpdateSection
from grpo_core.streams import Stream
from tasks.models.resident import ModelSpec
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef


class UpdateJob(BaseModel):
    """Everything that an update needs; its artifacts are in the current store.

    Attributes:
        policy: the version that is trained.
        rollouts: one artifact per sampling round.
        advantages: of all rounds.
        model: the model's files.
        updates: the options of the update of each trained component, in the order in which they are trained.
        seed: the run's seed.
        max_staleness: how many versions a row's policy may be older than this one.
        placement: device, threads and number of processes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: PolicyRef
    rollouts: tuple[ArtifactRef, ...]
    advantages: ArtifactRef
    model: ModelSpec
    updates: Mapping[Stream, AnyUpdateSection]
    seed: int
    max_staleness: int
    placement: PlacementSection

    @property
    def version(self) -> int:
        """Version of the policy that the update makes."""
        return self.policy.version + 1


class SharedJob(BaseModel):
    """A job for other processes.

    Attributes:
        job: the same for all of them.
        storage: where the artifacts are.
        run: whose artifacts they are.
        staged: folder that the first process writes to.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    job: UpdateJob
    storage: StorageSection
    run: str
    staged: str


class UpdateOutcome(BaseModel):
    """What an update wrote to its folder.

    Attributes:
        policy: the next version, whose checkpoint is still to be committed.
        checkpoint_digest: of everything that the next update reads.
        settled: sha256 of the files that are on the disk already.
        rows: how many samples it trained on.
        metrics: by name; those of a second component have the name of its stream in front.
        peak_memory: most bytes allocated on the GPU of the first process; None without a GPU.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    policy: PolicyRef
    checkpoint_digest: str
    settled: dict[str, str]
    rows: int
    metrics: dict[str, float]
    peak_memory: int | None = None
