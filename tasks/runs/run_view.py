"""The history of a run, which a training appends to and `read_run` reads from its folder, and its summary."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel

from grpo_core.rollouts.streams import Stream
from tasks.metrics import SAMPLES_PER_SECOND, SECONDS, STEP_TIME
from tasks.runs.layout import (
    ADVANTAGES,
    PREVIEW_STAGES,
    RECOMPUTED,
    REWARDS,
    ROLLOUTS,
    STAGES,
    STORED,
    StoredEvaluation,
)
from tasks.runs.lookup import RunStart
from tasks.runs.reader import Damage, MovedFiles
from tasks.runs.signs import MeasuredIteration, Sign
from tasks.storage.artifacts.reference import ArtifactRef

Noun = Literal["image", "completion"]

StageArtifacts = Mapping[str, tuple[ArtifactRef, ...]]
"""Valid artifacts by stage: one of rollouts per sampling round, one of rewards per round and label, one of others."""


@dataclass(frozen=True)
class IterationView:
    """The valid artifacts of a training iteration, from 1; metrics are theirs, and its policy's held-out reward."""

    iteration: int
    stages: StageArtifacts
    metrics: Mapping[str, float]

    @property
    def complete(self) -> bool:
        """Whether every stage is there."""
        return all(stage in self.stages for stage in STAGES)

    @property
    def rounds(self) -> int:
        """Number of sampling rounds that have rollouts."""
        return len(self.stages.get(ROLLOUTS, ()))


@dataclass(frozen=True)
class EvaluationView:
    """The held-out prompts, sampled by one policy version; `guardrails` has the mean score of each by label."""

    version: int
    stages: StageArtifacts
    guardrails: Mapping[str, float]

    @classmethod
    def of(cls, version: int, stored: StoredEvaluation) -> "EvaluationView":
        """Describe an evaluation of which every stage is there."""
        stages = {
            ROLLOUTS: (stored.rollouts,),
            REWARDS: tuple(stored.rewards.values()),
            ADVANTAGES: (stored.advantages,),
        }
        return cls(version, stages, means_of(stored.guardrails))

    @property
    def metrics(self) -> Mapping[str, float]:
        """Metrics of the rewards; empty without advantages."""
        return self.stages[ADVANTAGES][0].metrics if ADVANTAGES in self.stages else {}

    @property
    def scores(self) -> dict[str, float]:
        """Mean of each reward alone, before its weight, by label."""
        return means_of({part.folder.rsplit("/", 1)[-1]: part for part in self.stages.get(REWARDS, ())})

    @property
    def seconds(self) -> float:
        """Seconds of all stages; rewards are computed concurrently, so the slowest counts."""
        return sum(max(part.seconds for part in parts) for parts in self.stages.values())

    @property
    def reward(self) -> float | None:
        """Mean held-out reward; None where no sample has one."""
        return self.metrics.get("reward")


def means_of(scores: Mapping[str, ArtifactRef]) -> dict[str, float]:
    """Return the mean of each table of scores by its label; a reward that scored no sample has none."""
    means = {label: part.metrics.get(f"rewards/{label}/mean") for label, part in scores.items()}
    return {label: mean for label, mean in means.items() if mean is not None}


class Cost(BaseModel):
    """Samples of some iterations, and the seconds of all their stages; those that overlapped count in full."""

    samples: int = 0
    seconds: float = 0.0


@dataclass(kw_only=True)
class RunHistory:
    """The finished iterations and evaluations of a run."""

    name: str
    folder: str  # path or URL of the run
    # Iterations in order; only those that have at least one valid stage.
    iterations: Sequence[MeasuredIteration] = field(default_factory=list)
    # Evaluations by the versions of their policies, in order.
    evaluations: Sequence[EvaluationView] = field(default_factory=list)
    # Mean held-out reward of images that no policy made, by their name in BASELINES.
    baselines: Mapping[str, float] = field(default_factory=dict)
    policy_version: int = 0  # number of updates; 0 is the initial model
    policy_digest: str | None = None  # sha256 of that policy's weights; None where no valid file states it
    # Name of the rescoring whose rewards a replay is trained on, while its held-out reward is of its own.
    trained_on: str | None = None
    # The configuration as plain values; empty where it cannot be read.
    config: Mapping[str, Any] = field(default_factory=dict)
    signs: Sequence[Sign] = ()  # what is wrong with the training as far as its metrics and evaluations show

    @property
    def planned(self) -> int | None:
        """Number of iterations in the configuration; None without a readable one."""
        section = self.config.get("run")
        planned = section.get("iterations") if isinstance(section, Mapping) else None
        return planned if isinstance(planned, int) else None

    @property
    def finished(self) -> bool:
        """Whether every configured iteration is done."""
        return self.planned is not None and self.policy_version >= self.planned

    @property
    def stream(self) -> Stream:
        """The first stream that it trains."""
        section = self.config.get("policy")
        trained = section.get("train") if isinstance(section, Mapping) else None
        return "denoising" if trained and "tokens" not in trained else "tokens"

    @property
    def evaluated(self) -> tuple[EvaluationView, ...]:
        """The evaluations that have a reward."""
        return tuple(each for each in self.evaluations if each.reward is not None)

    @property
    def heldout_rewards(self) -> dict[int, float]:
        """Mean held-out reward by policy version, where a sample has one."""
        return {each.version: each.reward for each in self.evaluations if each.reward is not None}

    @property
    def seconds(self) -> dict[str, float]:
        """Measured seconds by stage over all iterations, of the evaluations, and in total."""
        with_previews = any(f"{SECONDS}{PREVIEW_STAGES[0]}" in each.metrics for each in self.iterations)
        stages = (*PREVIEW_STAGES, *STAGES) if with_previews else STAGES
        by_stage = {
            stage: sum(each.metrics.get(f"{SECONDS}{stage}", 0.0) for each in self.iterations) for stage in stages
        }
        by_stage |= {"evaluation": sum(each.seconds for each in self.evaluations)} if self.evaluations else {}
        return {"total": sum(by_stage.values()), **by_stage}

    def cost(self, version: int | None = None) -> Cost:
        """Return what the iterations have cost that made a policy version, or all; without evaluations."""
        samples = seconds = 0.0
        for each in self.iterations:
            if version is None or each.iteration <= version:
                found = each.metrics
                sampling = sum(found.get(f"{SECONDS}{stage}", 0.0) for stage in (*PREVIEW_STAGES, ROLLOUTS))
                samples += found.get(SAMPLES_PER_SECOND, 0.0) * sampling
                seconds += found.get(STEP_TIME, 0.0)
        return Cost(samples=round(samples), seconds=seconds)

    def cost_until(self, reward: float) -> Cost | None:
        """Return what training has cost until an evaluation first had this held-out reward; None if none has it."""
        return next((self.cost(version) for version, found in self.heldout_rewards.items() if found >= reward), None)

    @property
    def throughput(self) -> float | None:
        """Samples per second and device over all stages, as verl-omni counts images; None where nothing was sampled."""
        placement, cost = self.config.get("placement"), self.cost()
        devices = placement.get("devices") if isinstance(placement, Mapping) else None
        count = len(devices) if isinstance(devices, list) else 1
        return cost.samples / cost.seconds / count if cost.samples and cost.seconds else None

    def series(self, metric: str) -> list[tuple[float, float]]:
        """(iteration, value) of a metric, where it was measured."""
        return [(float(each.iteration), each.metrics[metric]) for each in self.iterations if metric in each.metrics]

    def heldout_series(self, metric: str = "reward") -> list[tuple[float, float]]:
        """(policy version, value) of a metric of the evaluations; version 0 is before training."""
        return [(float(each.version), each.metrics[metric]) for each in self.evaluations if metric in each.metrics]

    @property
    def guardrail_series(self) -> dict[str, list[tuple[float, float]]]:
        """(policy version, mean over the held-out samples) of each guardrail, by label."""
        return _by_label({each.version: each.guardrails for each in self.evaluations})

    @property
    def heldout_scores(self) -> dict[str, list[tuple[float, float]]]:
        """The same of each reward alone, before its weight."""
        return _by_label({each.version: each.scores for each in self.evaluations})

    @property
    def dataset_rewards(self) -> dict[str, str]:
        """Name of the reward's metric by dataset, sorted; empty with a single dataset."""
        seen = [*(each.metrics for each in self.iterations), *(each.metrics for each in self.evaluations)]
        names = {name for metrics in seen for name in metrics}
        found = {dataset: name for name in names if (dataset := dataset_of(name)) is not None}
        return dict(sorted(found.items()))


@dataclass(kw_only=True)
class RunView(RunHistory):
    """Everything that a run's folder has except its samples."""

    iterations: Sequence[IterationView] = field(default_factory=list)
    starts: tuple[RunStart, ...]
    config_text: str | None  # content of config.yaml; None without a readable one
    shown: IterationView | None  # the iteration to show; None where it has no valid stage
    evaluated_last: bool  # whether the last policy has the evaluation that the configuration asks for
    moved: tuple[MovedFiles, ...]  # files in `quarantine/`
    damages: tuple[Damage, ...]  # files that differ from what was written
    unverified: int  # number of artifacts that are not shown and were too large to verify

    @property
    def finished(self) -> bool:
        """Whether every configured iteration is done, and the last policy evaluated."""
        return super().finished and self.evaluated_last

    @property
    def noun(self) -> Noun:
        """What one of its samples is called."""
        section = self.config.get("policy")
        kind = section.get("kind") if isinstance(section, Mapping) else None
        return "completion" if kind in ("causal_lm", "vision_lm") else "image"


def _by_label(means: Mapping[int, Mapping[str, float]]) -> dict[str, list[tuple[float, float]]]:
    series: dict[str, list[tuple[float, float]]] = {}
    for version, by_label in means.items():
        for label, mean in by_label.items():
            series.setdefault(label, []).append((float(version), mean))
    return series


class RunSummary(BaseModel):
    """Rewards, time and place of a run, under the names that every command's `--json` uses."""

    run: str
    iterations: int  # number of policy updates
    reward_first: float | None  # mean training reward of the first and the last iteration; None without rewards
    reward_last: float | None
    heldout_before: float | None  # mean held-out reward of the first evaluated policy; None without held-out prompts
    heldout_after: float | None  # mean held-out reward of the last evaluated policy; None where only one was evaluated
    heldout_best: float | None  # the highest of all evaluations
    until_best: Cost | None  # what training had cost when it was first reached
    samples_per_device_second: float | None  # over all stages; None where nothing was sampled
    heldout_baselines: dict[str, float]  # the same for images that no policy made, by their name; empty without targets
    trained_on: str | None  # as in RunHistory
    policy_digest: str | None
    seconds: dict[str, float]  # `total`, and by stage over all iterations as measured when each ran
    folder: str
    signs: list[Sign]


def summary_of(run: RunHistory) -> RunSummary:
    """Summarize a run."""
    rewards, evaluated = run.series("reward"), run.evaluated
    best = max(run.heldout_rewards.values(), default=None)
    return RunSummary(
        run=run.name,
        iterations=run.policy_version,
        reward_first=rewards[0][1] if rewards else None,
        reward_last=rewards[-1][1] if rewards else None,
        heldout_before=evaluated[0].reward if evaluated else None,
        heldout_after=evaluated[-1].reward if len(evaluated) > 1 else None,
        heldout_best=best,
        until_best=None if best is None else run.cost_until(best),
        samples_per_device_second=run.throughput,
        heldout_baselines=dict(run.baselines),
        trained_on=run.trained_on,
        policy_digest=run.policy_digest,
        seconds=run.seconds,
        folder=run.folder,
        signs=list(run.signs),
    )


def rescoring_of(replay: object) -> str | None:
    """Return the rescoring that a replay is trained on, by its section; None where the run's own rewards are."""
    advantages = replay.get("advantages", STORED) if isinstance(replay, Mapping) else STORED
    return None if advantages in (STORED, RECOMPUTED) else str(advantages)


def dataset_of(metric: str) -> str | None:
    """Return the dataset whose mean reward this metric is; None for any other metric."""
    if metric.startswith("datasets/") and metric.endswith("/reward"):
        return metric.removeprefix("datasets/").removesuffix("/reward")
    return None
