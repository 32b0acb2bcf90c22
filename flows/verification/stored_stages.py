"""The stages of a stored run, each with the arguments that computed it.

The functions of the training loop are called with the stored artifacts: every stage that they ask for is noted and
answered with what is stored. Prompts and seeds are those of the stored rows, so they need no prompt files; where the
files are here, what they plan is compared with the rows.
"""

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from prefect import Task

from configs.schema import ReplayConfig, RewardsFile
from configs.validation import validated
from configs.yaml_files import parse_yaml
from flows.pipeline.run import Run, plan_heldout, shares_noise
from flows.pipeline.stages import calling_stages, evaluate_baselines, evaluate_policy
from flows.replaying import ReplayPlan, previous_advantages, replay_iteration
from flows.rescoring.plan import RescoredRun
from flows.rescoring.rescore import advantages_of, score_missing
from flows.training.history import TrainingHistory
from flows.training.prefetch import sampling_version
from flows.training.train import sample_rollouts, train_policy
from flows.verification.stored_plans import plan_difference, read_groups
from grpo_core.errors import InputError
from tasks.prompts.curriculum import PromptStatistics
from tasks.pruning import FILES_REMOVED
from tasks.rewards.score_rewards import NeededScores
from tasks.rollouts.plan import RolloutPlan, plan_evaluation, plan_round
from tasks.runs.layout import (
    ADVANTAGES,
    BASELINES,
    PARTS,
    RECOMPUTED,
    REWARDS,
    REWARDS_FILE,
    ROLLOUTS,
    StoredIteration,
    baseline_folder,
    evaluation_folder,
    is_evaluation,
    iteration_folder,
    policy_folder,
    rescoring_folder,
    round_folder,
)
from tasks.runs.reader import RunReader
from tasks.runs.stored import read_iterations
from tasks.runs.stored_policies import read_policy
from tasks.storage.artifacts.commit import removed_by
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef, StaleReferenceError
from tasks.storage.artifacts.store import ArtifactStore
from tasks.verification.records import StageKind

Reference = ArtifactRef | PolicyRef

_KINDS: Mapping[str, StageKind] = {
    "collect rollouts": "rollouts",
    "draw baseline": "rollouts",
    "score reward": "rewards",
    "compute advantages": "advantages",
    "copy advantages": "advantages",
    "update policy": "update",
}


@dataclass(frozen=True)
class StoredStage:
    """A stage that a run has stored: its task, the name of its task run, its arguments, and what it made."""

    task: Task[..., Any]
    title: str
    arguments: Mapping[str, Any]
    folder: str
    stored: Reference

    @property
    def kind(self) -> StageKind:
        """Which of the stages it is; those of evaluations are of one kind."""
        return "evaluation" if is_evaluation(self.folder) else _KINDS[self.task.name]

    @property
    def artifact(self) -> ArtifactRef:
        """What it wrote."""
        return artifact_of(self.stored)


def artifact_of(reference: Reference) -> ArtifactRef:
    """Return the artifact of a reference; that of a policy is its checkpoint."""
    found = reference.checkpoint if isinstance(reference, PolicyRef) else reference
    assert found is not None, "a stage has written it"
    return found


def output_folder(task: str, arguments: Mapping[str, Any]) -> str:
    """Return where a stage writes, given its name and its arguments."""
    match task:
        case "collect rollouts":
            return f"{arguments['plan'].folder}/{ROLLOUTS}"
        case "draw baseline":
            return f"{baseline_folder(arguments['baseline'])}/{ROLLOUTS}"
        case "score reward":
            return f"{arguments['folder']}/{arguments['section'].label}"
        case "update policy":
            return policy_folder(arguments["policy"].version + 1)
        case _:
            return f"{arguments['folder']}/{ADVANTAGES}"


@dataclass(frozen=True)
class StoredRun(Run):
    """A run that is not written.

    Attributes:
        known_folders: of target images that the person knows.
        problems: what is wrong with the plans of its rows; added to.
        policies: the versions that were read.
    """

    known_folders: tuple[str, ...] = ()
    problems: list[str] = field(default_factory=list)
    policies: dict[int, PolicyRef] = field(default_factory=dict)

    @property
    def target_folders(self) -> tuple[str, ...]:
        """The folders of target images that may be read."""
        return self.known_folders

    @cached_property
    def reader(self) -> RunReader:
        """Lists what the run has."""
        return RunReader(self.store)

    def plan(
        self,
        iteration: int,
        sampling_round: int,
        count: int,
        statistics: PromptStatistics | None = None,
        earlier: Sequence[RolloutPlan] = (),
    ) -> RolloutPlan:
        """Return the plan that the rows of a sampling round have, after a look at what the prompt files plan."""
        config = self.config
        bare = plan_round(
            [],
            seed=config.run.seed,
            iteration=iteration,
            sampling_round=sampling_round,
            images_of_samples=config.images_of_samples,
            shared_noise=shares_noise(config.rollout),
            window_start=config.window_start(iteration),
        )
        plan = self._of_rows(bare, round_folder(iteration, sampling_round))
        if self.training:
            self._compare(plan, super().plan(iteration, sampling_round, count, statistics, earlier))
        return plan

    def heldout_plan(self, version: int) -> RolloutPlan:
        """Return the plan that the rows of a version's evaluation have, after the same look."""
        evaluate = self.config.evaluate
        bare = plan_evaluation(
            [],
            seed=evaluate.seed,
            version=version,
            samples_per_prompt=evaluate.samples_per_prompt,
            shared_noise=shares_noise(self.config.evaluation_rollout),
        )
        plan = self._of_rows(bare, evaluation_folder(version))
        if (expected := plan_heldout(self.config, self.heldout, version)) is not None:
            self._compare(plan, expected)
        return plan

    def _of_rows(self, bare: RolloutPlan, folder: str) -> RolloutPlan:
        place = f"{folder}/{ROLLOUTS}"
        found = self.reader.find(place)
        if found is None or not self.reader.verify(found, only=fnmatch.filter(found.manifest.files, PARTS)):
            raise StaleReferenceError(f"{self.store.run}/{place} is missing or damaged")
        plan = bare.model_copy(update={"groups": tuple(read_groups(self.store, place))})
        # The run has stored them, and verification writes nothing there.
        self.stored_sources.update(plan.named_sources)
        return plan

    def _compare(self, plan: RolloutPlan, expected: RolloutPlan) -> None:
        if (found := plan_difference(plan, expected)) is not None:
            self.problems.append(f"{plan.title}: {found}")

    def policy(self, version: int) -> PolicyRef:
        """Return a stored version; version 0, or that a replay starts from, is not the run's own."""
        if version <= self.config.first_version:
            return self.base_policy
        if version not in self.policies:
            self.policies[version] = self._read_policy(version)
        return self.policies[version]

    def _read_policy(self, version: int) -> PolicyRef:
        checkpoint = self.artifact(policy_folder(version))
        if FILES_REMOVED in removed_by(self.store.pruned_reason(checkpoint)):
            # Its weights are gone with their digest; what reads them is not tried.
            return PolicyRef(version=version, digest=checkpoint.digest, checkpoint=checkpoint)
        return read_policy(self.store, version)

    def artifact(self, folder: str) -> ArtifactRef:
        """Return the artifact in a folder, unverified; StaleReferenceError without a valid manifest."""
        manifest = self.store.manifest_at(self.store.path(folder))
        if manifest is None:
            raise StaleReferenceError(f"{self.store.run}/{folder} is missing or damaged")
        return manifest.reference(f"{self.store.run}/{folder}")

    def advantages(self, iteration: int) -> ArtifactRef:
        """Return the advantages of an iteration, which cover all its sampling rounds."""
        folder = iteration_folder(iteration)
        return self.artifact(f"{(self.reader.scored_rounds(folder) or [folder])[-1]}/{ADVANTAGES}")


@dataclass
class _Noted:
    """Answers the calls of stages with what is stored, and notes them in order."""

    run: StoredRun
    stages: list[StoredStage] = field(default_factory=list)

    def __call__(self, task: Task[..., Any], title: str, arguments: Mapping[str, Any]) -> Reference:
        folder = output_folder(task.name, arguments)
        stored: Reference = self.run.artifact(folder)
        if task.name == "update policy":
            stored = self.run.policy(arguments["policy"].version + 1)
        self.stages.append(StoredStage(task, title, arguments, folder, stored))
        return stored


def noted(run: StoredRun, walk: Callable[[], object]) -> tuple[StoredStage, ...]:
    """Return the stages that a walk through the run asks for; where something is missing it ends, with a problem."""
    caller = _Noted(run)
    try:
        with calling_stages(caller):
            walk()
    except (StaleReferenceError, InputError) as error:
        run.problems.append(str(error))
    return tuple(caller.stages)


def stages_of_iteration(run: StoredRun, iteration: int) -> tuple[StoredStage, ...]:
    """Return the stages of an iteration, of a replay those that made the version of this number."""
    if isinstance(run.config, ReplayConfig):
        return noted(run, lambda: _walk_replay(run, iteration))

    def walk() -> None:
        history, curriculum = TrainingHistory.of(run), run.config.data.curriculum
        window = 1 if curriculum.kind == "uniform" else curriculum.window
        for earlier in range(max(1, iteration - window), iteration):
            history.add_sampled(run, run.advantages(earlier))
        batch = sample_rollouts(run, history, run.policy(sampling_version(run.config.run, iteration)), iteration)
        if run.store.manifest_at(run.store.path(policy_folder(iteration))) is not None:
            train_policy(run, run.policy(iteration - 1), batch, iteration)

    return noted(run, walk)


def _walk_replay(run: StoredRun, version: int) -> None:
    config = run.config
    assert isinstance(config, ReplayConfig), "its caller looked"
    section, source = config.replay, ArtifactStore(run.store.url, config.replay.source)
    numbers = section.iterations

    def read(number: int) -> StoredIteration:
        return read_iterations(source, (number, number), section.advantages)[0]

    stored = read(numbers[version - config.first_version - 1])
    history = TrainingHistory.of(run)
    is_first = version == config.first_version + 1
    if not is_first:
        history.add_sampled(run, run.advantages(version - 1))
    before = previous_advantages(source, config, (stored,)) if is_first and section.advantages == RECOMPUTED else None
    replay_iteration(run, ReplayPlan(config, run.start, (stored,), before), run.policy(version - 1), stored, history)


def stages_of_evaluation(run: StoredRun, version: int) -> tuple[StoredStage, ...]:
    """Return the stages of a version's evaluation on the run's held-out prompts; with version 0, of the baselines."""

    def walk() -> None:
        plan = run.heldout_plan(version)
        if version == run.config.first_version and set(BASELINES) & {*run.reader.names("evaluations")}:
            evaluate_baselines(run, plan)
        evaluate_policy(run, run.policy(version).averaged, plan)

    return noted(run, walk)


def stages_of_rescoring(run: StoredRun, name: str, iteration: int) -> tuple[StoredStage, ...]:
    """Return the stages of a rescoring of an iteration: the scores that it computed, and its advantages."""

    def walk() -> None:
        place = rescoring_folder(name, REWARDS_FILE)
        content = run.store.read_file(place) or b""
        requested = validated(RewardsFile, parse_yaml(content.decode(errors="replace"), f"{run.store.run}/{place}"))
        stored = read_iterations(run.store, (iteration, iteration), "stored")[0]
        needed = tuple(
            tuple(_needed(run, name, each.rollouts.folder, section) for section in requested.rewards)
            for each in stored.rounds
        )
        advantages = requested.advantages or run.config.advantages
        folders = run.target_folders
        rescored = RescoredRun(
            run.store, run.config, requested.rewards, advantages, (stored,), folders, {iteration: needed}
        )
        rounds = tuple(score_missing(name, rescored, stored, index) for index in range(len(stored.rounds)))
        before = f"{rescoring_folder(name, iteration_folder(iteration - 1))}/{ADVANTAGES}"
        has_before = run.store.manifest_at(run.store.path(before)) is not None
        advantages_of(name, rescored, stored, rounds, run.artifact(before) if has_before else None)

    return noted(run, walk)


def _needed(run: StoredRun, name: str, rollouts: str, section: Any) -> NeededScores:
    folder = f"{rollouts.rpartition('/')[0]}/{REWARDS}/{section.label}"
    is_own = run.store.manifest_at(run.store.path(rescoring_folder(name, folder))) is not None
    return NeededScores(section, None if is_own else run.artifact(folder), (), 0)
