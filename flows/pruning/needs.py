"""Find what is still needed of a run: by its next start, by replays of it, and by flows that the server will run."""

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
        policies: reasons by policy version.
        evaluations: reasons to keep the images of an evaluation, by policy version.
        iterations: first and last iteration (None: every later one) whose images are kept, and the reason.
    """

    policies: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    evaluations: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    iterations: list[tuple[int, int | None, str]] = field(default_factory=list)

    def of_iteration(self, number: int) -> list[str]:
        """Return the reasons to keep an iteration's images."""
        return [why for first, last, why in self.iterations if first <= number and (last is None or number <= last)]


def find_needs(
    store: ArtifactStore, config: RunConfig, versions: Sequence[int], scheduled: Sequence[ScheduledFlow]
) -> Needs:
    """Find what of a run is needed, apart from its last versions.

    Args:
        store: the run.
        config: the run's configuration.
        versions: policy versions that have their files.
        scheduled: flows that Prefect's server will run.
    """
    needs = Needs()
    rewards = rewards_of(store, EVALUATIONS)
    if trained := [version for version in versions if version in rewards]:
        needs.policies[max(trained, key=rewards.__getitem__)].append(BEST)
    _add_training(needs, store, config, config, versions, "the next start of the run")
    for replay, start in unfinished_replays(store):
        needs.policies[start].append(f"the replay {replay} starts from it and is not finished")
    for each in scheduled:
        given = {name: value for name, value in each.parameters.items() if isinstance(value, Mapping)}
        if each.flow == TRAIN:
            if (planned := _scheduled_config(store, given.get("config", {}))) is not None:
                _add_training(needs, store, config, planned, versions, each.name)
        elif each.flow == EVALUATE:
            _add_evaluation(needs, store, given.get("request", {}), each.name)
        elif each.flow == RESCORE:
            _add_rescoring(needs, store, given.get("request", {}), each.name)
    return needs


def _add_training(
    needs: Needs, store: ArtifactStore, config: RunConfig, planned: RunConfig, versions: Sequence[int], who: str
) -> None:
    """Add what a training by `planned` would sample or score of the versions that are there."""
    if not planned.evaluate.sets:
        return
    # Other held-out prompts, another number or seed have every version evaluated again.
    alike = planned.evaluate.model_copy(update={"every": config.evaluate.every}) == config.evaluate
    due = [version for version in versions if is_evaluated(planned, version)]
    evaluated = RunReader(store).evaluations()
    scored = {
        version
        for version in {*due, *evaluated}
        if find_evaluation(store, evaluation_folder(version), planned) is not None
    }
    for version in due:
        if not alike or version not in scored:
            needs.policies[version].append(f"{who} evaluates it: that evaluation is not complete")
    for version in evaluated:
        if version not in scored:
            needs.evaluations[version].append(f"{who} scores it: those scores are not complete")


def _scheduled_config(store: ArtifactStore, given: Mapping[str, Any]) -> RunConfig | None:
    """Return the configuration of a scheduled training of this run; None if it is another run's or cannot start."""
    name, root = _mapping(given.get("run")).get("name"), _mapping(given.get("storage")).get("root", "runs")
    if name != store.run or not means_run(store, store.run, str(root)):
        return None
    try:
        return check_config(given)
    except (InputError, InputErrors):
        return None


def _add_evaluation(needs: Needs, store: ArtifactStore, request: Mapping[str, Any], who: str) -> None:
    version = request.get("policy")
    if isinstance(version, int) and means_run(store, str(request.get("run")), str(request.get("root", "runs"))):
        needs.policies[version].append(f"{who} evaluates it")
        needs.evaluations[version].append(f"{who} scores it")


def _add_rescoring(needs: Needs, store: ArtifactStore, plan: Mapping[str, Any], who: str) -> None:
    sources, root, chosen = plan.get("sources"), str(plan.get("root", "runs")), plan.get("iterations")
    named = [str(source) for source in sources] if isinstance(sources, list | tuple) else []
    if not any(means_run(store, source, root) for source in named):
        return
    first: int
    last: int | None
    try:
        first, last = (1, None) if chosen is None else read_range(str(chosen))
    except InputError:
        first, last = 1, None
    needs.iterations.append((first, last, f"{who} scores them again"))


def rewards_of(store: ArtifactStore, folder: str) -> dict[int, float]:
    """Return the mean held-out reward of the evaluations in a folder of the run, by policy version."""
    rewards: dict[int, float] = {}
    for version in RunReader(store).evaluations(folder):
        manifest = store.manifest_at(store.path(f"{folder}/{version:06d}/{ADVANTAGES}"))
        reward = _mapping(manifest.described.get("metrics") if manifest else None).get("reward")
        if isinstance(reward, float):
            rewards[version] = reward
    return rewards


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def unfinished_replays(store: ArtifactStore) -> Iterator[tuple[str, int]]:
    """Yield the name and the first policy version of each replay of a run that is stored next to it and unfinished."""
    entries = store.filesystem.ls(store.root, detail=True)
    folders = sorted(str(entry["name"]).rstrip("/") for entry in entries if entry["type"] == "directory")
    for name in (folder.rsplit("/", 1)[-1] for folder in folders):
        if name == store.run or name.startswith("."):
            continue
        try:
            values = yaml.safe_load(store.read_shared(f"{name}/config.yaml") or b"")
            replay, end = values["replay"], int(values["run"]["iterations"])
            start = int(replay["policy"]) if replay["source"] == store.run else 0
        except (yaml.YAMLError, UnicodeDecodeError, KeyError, TypeError, ValueError):
            # It is no replay, or one that cannot be continued.
            continue
        found = store.filesystem.glob(f"{store.root}/{name}/{POLICIES}/*{MANIFEST_ENDING}")
        numbers = [str(path).rsplit("/", 1)[-1].removesuffix(MANIFEST_ENDING) for path in found]
        if start and max((int(number) for number in numbers if number.isdigit()), default=0) < end:
            yield name, start
