"""What a flow that trains has seen so far."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from configs.schema import RunConfig
from flows.pipeline.run import Run
from grpo_core.rewards.hacking import HackingSign
from tasks.prompts.curriculum import PromptStatistics, read_statistics
from tasks.reports.iteration import IterationRecord
from tasks.storage.artifacts.reference import ArtifactRef


@dataclass
class TrainingHistory:
    """What the flow has seen so far.

    Attributes:
        iterations: one record an iteration.
        drawn: advantages of the iterations that have been drawn, which may be ahead of those that are over.
        heldout: held-out advantages artifact by policy version.
        guardrails: scores of the held-out samples by policy version and guardrail.
        signs: guardrails that had fallen at the last evaluation while the reward rose.
    """

    iterations: list[IterationRecord] = field(default_factory=list)
    drawn: list[ArtifactRef] = field(default_factory=list)
    heldout: dict[int, ArtifactRef] = field(default_factory=dict)
    guardrails: dict[int, Mapping[str, ArtifactRef]] = field(default_factory=dict)
    signs: list[HackingSign] = field(default_factory=list)

    @property
    def advantages(self) -> ArtifactRef | None:
        """Of the iteration that was drawn last; None before the first."""
        return self.drawn[-1] if self.drawn else None

    def stopped_by(self, config: RunConfig, version: int) -> bool:
        """Whether the watch ends a run at this policy version that would go on otherwise."""
        return bool(self.signs) and config.watch.stop and version < config.run.iterations

    def statistics(self, run: Run) -> PromptStatistics | None:
        """How hard the prompts of the curriculum's window were; None where it does not ask."""
        curriculum = run.config.data.curriculum
        if curriculum.kind == "uniform":
            return None
        return read_statistics(run.store, self.drawn[-curriculum.window :])
