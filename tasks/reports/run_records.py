"""What a run is, once read: frozen records of its iterations, its evaluations and what was set aside."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tasks.storage.artifacts.reader import Damage
from tasks.storage.artifacts.reference import ArtifactRef

Noun = Literal["image", "completion"]

STAGES = ("rollouts", "rewards", "advantages", "update")
"""An iteration's stages in their order; the last one's artifact is the policy that it makes."""

Stages = Mapping[str, tuple[ArtifactRef, ...]]
"""Whole artifacts by stage: one of rollouts a draw, one of rewards a draw and label, one of the others."""


@dataclass(frozen=True)
class IterationView:
    """One training iteration, as far as it went.

    Attributes:
        iteration: its number.
        stages: whole artifacts by stage; one that is absent or damaged is not in it.
        metrics: figures of these stages, and the seconds of each.
        heldout: held-out reward of the policy that it made, where that was evaluated.
    """

    iteration: int
    stages: Stages
    metrics: Mapping[str, float]
    heldout: float | None

    @property
    def complete(self) -> bool:
        """Whether every stage is there."""
        return all(stage in self.stages for stage in STAGES)

    @property
    def rounds(self) -> int:
        """Collections of rollouts, begun or done."""
        return len(self.stages.get("rollouts", ()))


@dataclass(frozen=True)
class EvaluationView:
    """The held-out prompts drawn with one policy version.

    Attributes:
        version: of the policy.
        stages: whole artifacts by stage.
        guardrails: mean of each guardrail that scored the same samples, by label.
    """

    version: int
    stages: Stages
    guardrails: Mapping[str, float]

    @property
    def metrics(self) -> Mapping[str, float]:
        """Figures of its rewards; empty where it was not scored."""
        return self.stages["advantages"][0].metrics if "advantages" in self.stages else {}

    @property
    def seconds(self) -> float:
        """Of its stages; its rewards are computed side by side, so the slowest counts."""
        return sum(max(part.seconds for part in parts) for parts in self.stages.values())

    @property
    def reward(self) -> float | None:
        """Mean held-out reward, if it was scored."""
        return self.metrics.get("reward")


@dataclass(frozen=True)
class SetAside:
    """What a later start moved out of the way.

    Attributes:
        place: folder within the run.
        reason: why.
        paths: what was moved.
    """

    place: str
    reason: str
    paths: tuple[str, ...]


@dataclass(frozen=True)
class RunView:
    """Everything about a run but its samples.

    Attributes:
        name: of the run.
        folder: where it is kept.
        config_text: config.yaml as it is written; None without a readable one.
        config: the same, read.
        iterations: in order; only those that have at least one whole stage.
        shown: the iteration that was asked for.
        evaluations: in order of the policy version.
        policy_version: updates made; 0 is the model as it was given.
        policy_digest: of that policy's weights; None where no whole file says it.
        set_aside: in order.
        damages: files that are not what they were.
        unverified: artifacts too large to verify that are not shown.
    """

    name: str
    folder: str
    config_text: str | None
    config: Mapping[str, Any]
    iterations: tuple[IterationView, ...]
    shown: IterationView | None
    evaluations: tuple[EvaluationView, ...]
    policy_version: int
    policy_digest: str | None
    set_aside: tuple[SetAside, ...]
    damages: tuple[Damage, ...]
    unverified: int

    @property
    def planned(self) -> int | None:
        """Iterations that the configuration asks for."""
        section = self.config.get("run")
        planned = section.get("iterations") if isinstance(section, Mapping) else None
        return planned if isinstance(planned, int) else None

    @property
    def noun(self) -> Noun:
        """What people call one of its samples."""
        section = self.config.get("policy")
        kind = section.get("kind") if isinstance(section, Mapping) else None
        return "completion" if kind == "causal_lm" else "image"

    @property
    def finished(self) -> bool:
        """Whether every iteration that the configuration asks for is made."""
        return self.planned is not None and self.policy_version >= self.planned

    @property
    def evaluated(self) -> tuple[EvaluationView, ...]:
        """The evaluations that have a reward."""
        return tuple(evaluation for evaluation in self.evaluations if evaluation.reward is not None)

    @property
    def seconds(self) -> dict[str, float]:
        """Measured seconds by stage over all iterations, of the evaluations, and in all."""
        by_stage = {
            stage: sum(view.metrics.get(f"seconds/{stage}", 0.0) for view in self.iterations) for stage in STAGES
        }
        by_stage |= {"evaluation": sum(view.seconds for view in self.evaluations)} if self.evaluations else {}
        return {"total": sum(by_stage.values()), **by_stage}

    def series(self, metric: str) -> list[tuple[float, float]]:
        """(iteration, value) of a metric, where it was measured."""
        return [(float(view.iteration), view.metrics[metric]) for view in self.iterations if metric in view.metrics]

    def heldout_series(self, metric: str = "reward") -> list[tuple[float, float]]:
        """(policy version, held-out reward or another figure of it); version 0 is before training."""
        return [(float(view.version), view.metrics[metric]) for view in self.evaluations if metric in view.metrics]

    @property
    def guardrail_series(self) -> dict[str, list[tuple[float, float]]]:
        """(policy version, mean of the held-out samples) of each guardrail, by label."""
        labels = dict.fromkeys(label for view in self.evaluations for label in view.guardrails)
        return {
            label: [
                (float(view.version), view.guardrails[label]) for view in self.evaluations if label in view.guardrails
            ]
            for label in labels
        }

    @property
    def dataset_rewards(self) -> dict[str, str]:
        """Name of the reward's figure by dataset, sorted; empty where there is one dataset alone."""
        seen = [*(view.metrics for view in self.iterations), *(view.metrics for view in self.evaluations)]
        names = {name for metrics in seen for name in metrics}
        found = {dataset: name for name in names if (dataset := dataset_of(name)) is not None}
        return dict(sorted(found.items()))


def dataset_of(metric: str) -> str | None:
    """The dataset whose reward this figure is; None for any other figure."""
    if metric.startswith("datasets/") and metric.endswith("/reward"):
        return metric.removeprefix("datasets/").removesuffix("/reward")
    return None
