"""What of a run is still needed, and by whom: its own next start, replays of it, and what the server will run."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from configs.loader import check_config
from configs.schema import RunConfig
from flows.pruning.scheduled import EVALUATE, RESCORE, TRAIN, ScheduledFlow, means_run
from flows.training.evaluation import is_evaluated
from grpo_core.errors import InputError, InputErrors
from tasks.runs.layout import ADVANTAGES, EVALUATIONS, POLICIES, evaluation_folder
from tasks.runs.reader import RunReader
from tasks.runs.stored import find_evaluation, read_range
from tasks.storage.artifacts.store import MANIFEST_ENDING, ArtifactStore

BEST = "it has the best held-out reward"


@dataclass
class Needs:
    """Reasons to keep something.

    Attributes:
        policies: by version.
        evaluations: of their images, by version.
        iterations: of their images: first and last iteration, None for all from the first on, and the reason.
    """

    policies: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    evaluations: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    iterations: list[tuple[int, int | None, str]] = field(default_factory=list)

    def of_iteration(self, number: int) -> list[str]:
        """Reasons to keep an iteration's images."""
        return [
            reason for first, last, reason in self.iterations if first <= number and (last is None or number <= last)
        ]


def find_needs(
    store: ArtifactStore, config: RunConfig, versions: Sequence[int], scheduled: Sequence[ScheduledFlow]
) -> Needs:
    """All that is needed of a run beside its end.

    Args:
        store: of the run.
        config: its own.
        versions: of the policy that have files.
        scheduled: by Prefect's server.
    """
    finder = _Finder(store, config, versions, Needs())
    finder.of_best()
    finder.of_training(config, "the next start of the run")
    for replay, start in unfinished_replays(store):
        finder.needs.policies[start].append(f"the replay {replay} starts from it and is not finished")
    for each in scheduled:
        finder.of_scheduled(each)
    return finder.needs


@dataclass(frozen=True)
class _Finder:
    store: ArtifactStore
    config: RunConfig
    versions: Sequence[int]
    needs: Needs

    def of_best(self) -> None:
        """The version that people will want."""
        rewards = rewards_of(self.store, EVALUATIONS)
        trained = {version: reward for version, reward in rewards.items() if version in self.versions}
        if trained:
            self.needs.policies[max(trained, key=trained.__getitem__)].append(BEST)

    def of_training(self, config: RunConfig, who: str) -> None:
        """What a training by `config` would draw or score of the versions that it passes by."""
        if not config.evaluate.sets:
            return
        # Held-out prompts of another kind, number or seed have every version drawn again.
        alike = config.evaluate.model_copy(update={"every": self.config.evaluate.every}) == self.config.evaluate
        due = [version for version in self.versions if is_evaluated(config, version)]
        evaluated = RunReader(self.store).evaluations()
        scored = {version for version in {*due, *evaluated} if self._is_scored(version, config)}
        for version in due:
            if not alike or version not in scored:
                self.needs.policies[version].append(f"{who} evaluates it: that evaluation is not there whole")
        for version in evaluated:
            if version not in scored:
                self.needs.evaluations[version].append(f"{who} scores it: those scores are not there whole")

    def _is_scored(self, version: int, config: RunConfig) -> bool:
        return find_evaluation(self.store, evaluation_folder(version), config) is not None

    def of_scheduled(self, scheduled: ScheduledFlow) -> None:
        """What a flow will read."""
        parameters = scheduled.parameters
        if scheduled.flow == TRAIN:
            self._of_scheduled_training(_mapping(parameters.get("config")), scheduled.name)
        elif scheduled.flow == EVALUATE:
            self._of_scheduled_evaluation(_mapping(parameters.get("request")), scheduled.name)
        elif scheduled.flow == RESCORE:
            self._of_scheduled_rescoring(_mapping(parameters.get("plan")), scheduled.name)

    def _of_scheduled_training(self, given: Mapping[str, Any], who: str) -> None:
        name, root = _mapping(given.get("run")).get("name"), _mapping(given.get("storage")).get("root", "runs")
        if name != self.store.run or not means_run(self.store, self.store.run, str(root)):
            return
        try:
            config = check_config(given)
        except (InputError, InputErrors):
            # It cannot begin as it stands.
            return
        self.of_training(config, who)

    def _of_scheduled_evaluation(self, requested: Mapping[str, Any], who: str) -> None:
        version = requested.get("policy")
        if isinstance(version, int) and means_run(
            self.store, str(requested.get("run")), str(requested.get("root", "runs"))
        ):
            self.needs.policies[version].append(f"{who} evaluates it")
            self.needs.evaluations[version].append(f"{who} scores it")

    def _of_scheduled_rescoring(self, requested: Mapping[str, Any], who: str) -> None:
        sources, root = requested.get("sources"), str(requested.get("root", "runs"))
        named = [str(source) for source in sources] if isinstance(sources, list | tuple) else []
        if any(means_run(self.store, source, root) for source in named):
            self.needs.iterations.append((*_iterations(requested.get("iterations")), f"{who} scores them again"))


def rewards_of(store: ArtifactStore, folder: str) -> dict[int, float]:
    """Mean held-out reward of the evaluations in a folder of the run, by policy version."""
    rewards: dict[int, float] = {}
    for version in RunReader(store).evaluations(folder):
        manifest = store.manifest_at(store.path(f"{folder}/{version:06d}/{ADVANTAGES}"))
        metrics = manifest.described.get("metrics") if manifest is not None else None
        reward = metrics.get("reward") if isinstance(metrics, Mapping) else None
        if isinstance(reward, float):
            rewards[version] = reward
    return rewards


def _iterations(text: object) -> tuple[int, int | None]:
    try:
        return (1, None) if text is None else read_range(str(text))
    except InputError:
        return 1, None


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def unfinished_replays(store: ArtifactStore) -> Iterator[tuple[str, int]]:
    """Replays of a run, kept beside it, that are not at their end: name, and the version that each starts from."""
    entries = store.filesystem.ls(store.root, detail=True)
    folders = sorted(str(entry["name"]).rstrip("/") for entry in entries if entry["type"] == "directory")
    for name in (folder.rsplit("/", 1)[-1] for folder in folders):
        if name == store.run or name.startswith("."):
            continue
        start, end = _replay_of(store.run, store.read_shared(f"{name}/config.yaml"))
        if start and _last_version(store, name) < end:
            yield name, start


def _replay_of(run: str, content: bytes | None) -> tuple[int, int]:
    """The version that a replay starts from and the last that it makes; zeros where it is none of this run."""
    try:
        values = yaml.safe_load(content or b"")
        replay = values["replay"]
        return (int(replay["policy"]), int(values["run"]["iterations"])) if replay["source"] == run else (0, 0)
    except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError, ValueError):
        # Whatever it is, it cannot be gone on with as it stands.
        return 0, 0


def _last_version(store: ArtifactStore, run: str) -> int:
    found = store.filesystem.glob(f"{store.root}/{run}/{POLICIES}/*{MANIFEST_ENDING}")
    names = [str(path).rsplit("/", 1)[-1].removesuffix(MANIFEST_ENDING) for path in found]
    return max((int(name) for name in names if name.isdigit()), default=0)
