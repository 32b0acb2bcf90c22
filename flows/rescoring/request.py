"""What `grpo rescore` is asked for -> a checked plan, or every mistake at once, before anything is scored."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, InstanceOf, computed_field

from configs.checks import reward_contradictions
from configs.loader import read_rewards_file
from configs.schema import RewardsFile, RunConfig
from configs.scoring import RewardSection
from configs.training import AdvantagesSection
from flows.rescoring.needed_scores import NeededScores, needed_scores
from flows.server.reachable import require_pools
from grpo_core.errors import InputError, InputErrors
from grpo_core.rewards.registry import build_reward
from tasks.reports.pages import require_page_path
from tasks.runs.lookup import find_run
from tasks.runs.records import StoredIteration
from tasks.runs.stored import (
    RECOMPUTED,
    STORED,
    first_iteration,
    read_iterations,
    read_range,
    stored_config,
)
from tasks.storage.artifacts.store import ArtifactStore

OWN_NAMES = (STORED, RECOMPUTED)


@dataclass(frozen=True)
class RescoreRequest:
    """The options as they were given.

    Attributes:
        sources: runs under the root, or paths of their folders.
        rewards: file of the rewards.
        name: of the rescoring, a folder below `rescored/` of each run.
        root: where runs are kept.
        iterations: `A-B` or `A`; None for all.
        html: file for the report beside the one that each run keeps; None for no other.
    """

    sources: tuple[str, ...]
    rewards: Path
    name: str
    root: str = "runs"
    iterations: str | None = None
    html: Path | None = None


@dataclass(frozen=True)
class RescoredRun:
    """One run that is scored again.

    Attributes:
        store: at the run.
        config: its own configuration.
        rewards: that it is scored with.
        advantages: how these become advantages.
        iterations: in order, every file verified.
        needed: by iteration, for each of its draws, what each reward needs.
    """

    store: ArtifactStore
    config: RunConfig
    rewards: tuple[RewardSection, ...]
    advantages: AdvantagesSection
    iterations: tuple[StoredIteration, ...]
    needed: Mapping[int, tuple[tuple[NeededScores, ...], ...]]

    @property
    def missing(self) -> tuple[RewardSection, ...]:
        """The rewards that have to be computed for any draw."""
        wanted = [each for rounds in self.needed.values() for draw in rounds for each in draw if each.stored is None]
        return tuple({each.section.label: each.section for each in wanted}.values())


class RescorePlan(BaseModel):
    """What a rescoring does. Prefect's server is told names alone: all stored iterations may be more than it takes.

    Attributes:
        name: of the rescoring.
        runs: in the order they were named.
        html: where else the report is written; None for nowhere.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    runs: tuple[InstanceOf[RescoredRun], ...] = Field(exclude=True)
    html: Path | None

    @computed_field
    def sources(self) -> list[str]:
        """Names of the runs."""
        return [run.store.run for run in self.runs]


def plan_rescore(request: RescoreRequest) -> RescorePlan:
    """Find what is stored, and check that it can be scored as asked.

    Raises:
        InputError, InputErrors: with the option or the key, the value and the hint.
    """
    requested = read_rewards_file(request.rewards, "--rewards")
    problems = list(_option_problems(request))
    if problems:
        raise InputErrors(problems)
    if request.html is not None:
        require_page_path(request.html)
    chosen = None if request.iterations is None else read_range(request.iterations)
    stores = [find_run(source, request.root) for source in request.sources]
    names = [store.run for store in stores]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputErrors(
            [InputError("RUN", twice, "A report tells runs apart by their names; score these one by one.")]
        )
    runs = [_plan_run(store, requested, chosen) for store in stores]
    problems = [problem for run in runs for problem in _scoring_problems(run)]
    if problems:
        raise InputErrors(list({str(problem): problem for problem in problems}.values()))
    require_pools([place for run in runs for place in _pools(run)])
    return RescorePlan(name=request.name, runs=tuple(runs), html=request.html)


def _pools(run: RescoredRun) -> Iterator[tuple[str, str]]:
    """Work pools that score and compute advantages."""
    placement = run.config.placement
    for name, pool in (("rewards", placement.rewards.pool), ("advantages", placement.advantages.pool)):
        if pool is not None:
            yield f"placement.{name}.pool of {run.store.run}", pool
    for index, section in enumerate(run.rewards):
        if section.pool is not None:
            yield f"rewards.{index}.pool", section.pool


def _option_problems(request: RescoreRequest) -> Iterator[InputError]:
    if request.name in OWN_NAMES:
        yield InputError("--name", request.name, "grpo replay has a meaning of its own for it; give another name.")
    elif not request.name.replace("-", "").replace("_", "").replace(".", "").isalnum() or request.name[0] in ".-_":
        hint = "It becomes a folder: letters, digits, dots, dashes and underscores, the first a letter or digit."
        yield InputError("--name", request.name, hint)
    if len(set(request.sources)) < len(request.sources):
        yield InputError("RUN", list(request.sources), "A run stands twice; name each once.")


def _plan_run(store: ArtifactStore, requested: RewardsFile, chosen: tuple[int, int] | None) -> RescoredRun:
    config = stored_config(store)
    advantages = requested.advantages or config.advantages
    # Only what concerns the rewards is looked at: the rest is done, and its files may be elsewhere by now.
    mixed = config.model_copy(update={"rewards": requested.rewards, "advantages": advantages})
    problems = list(reward_contradictions(mixed))
    if problems:
        raise InputErrors(problems)
    iterations = read_iterations(store, chosen, STORED)
    running = [section.label for section in requested.rewards if section.normalize == "running"]
    if running and chosen is not None and chosen[0] > first_iteration(store):
        hint = f"The running moments of {', '.join(running)} need every iteration before; start with the first."
        raise InputErrors([InputError("--iterations", f"{chosen[0]}-{chosen[1]}", hint)])
    needed = {each.number: needed_scores(store, each, requested.rewards) for each in iterations}
    return RescoredRun(store, config, requested.rewards, advantages, iterations, needed)


def _scoring_problems(run: RescoredRun) -> Iterator[InputError]:
    """What stands in the way of the scores that are missing; those that are stored need nothing any more."""
    kl_coef = run.advantages.kl_coef
    if kl_coef and not run.config.advantages.kl_coef:
        hint = f"The rollouts of {run.store.run} hold no log-probs of the reference; leave it out."
        yield InputError("advantages.kl_coef", kl_coef, hint)
    for section in run.missing:
        place = f"rewards.{run.rewards.index(section)}.{section.label}"
        reward = build_reward(section.reward, section.settings)
        for problem in reward.preflight():
            yield InputError(place, dict(section.settings), problem)
        yield from _pruned_problems(run, section, place)
        prompts = _stored_prompts(run)
        if reward.needs_target and prompts["target_uri"].null_count() == prompts.height:
            hint = f"The rollouts of {run.store.run} were collected without target images, and are compared with none."
            yield InputError(place, section.reward, hint)
        found = sorted({name for columns in prompts["columns"].unique() for name in json.loads(columns)})
        for column in sorted({*filter(None, [reward.needs_column]), *(section.where or {})} - set(found)):
            hint = f"No prompt of {run.store.run} has this column; it has {', '.join(found) or 'none'}."
            yield InputError(place, column, hint)


def _pruned_problems(run: RescoredRun, section: RewardSection, place: str) -> Iterator[InputError]:
    """Scores that are missing where the images are too."""
    lacking = [
        each.number
        for each in run.iterations
        for draw, needed in zip(each.rounds, run.needed[each.number], strict=True)
        if any(one.section == section and one.stored is None for one in needed)
        and run.store.pruned_reason(draw.rollouts) is not None
    ]
    if lacking:
        hint = (
            f"{run.store.run} has no scores of it for iteration {', '.join(map(str, dict.fromkeys(lacking)))}, whose "
            "images were removed by `grpo prune`. Choose other --iterations, or rewards whose scores are stored."
        )
        yield InputError(place, section.reward, hint)


def _stored_prompts(run: RescoredRun) -> pl.DataFrame:
    """Target and other columns of every sample of the run."""
    store, parts = run.store, []
    for rollouts in (draw.rollouts for each in run.iterations for draw in each.rounds):
        for path in sorted(store.filesystem.glob(f"{store.root}/{rollouts.uri}/*.parquet")):
            with store.filesystem.open(path) as file:
                held = pq.ParquetFile(file)
                wanted = [name for name in ("columns", "target_uri") if name in held.schema_arrow.names]
                parts.append(pl.from_arrow(held.read(columns=wanted)))
    return pl.concat([part for part in parts if isinstance(part, pl.DataFrame)])
