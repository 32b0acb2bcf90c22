"""Plan a rescoring: find stored rollouts and the scores that are missing, and report every mistake before scoring."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from configs.contradictions import reward_contradictions
from configs.loader import read_rewards_file
from configs.schema import RewardsFile, RunConfig
from configs.scoring import AdvantagesSection, RewardSection
from configs.validation import contradictions_within
from flows.preflight.files import checked_once
from flows.preflight.rewards import token_problems
from flows.preflight.trust import trusted_folders
from flows.requests import RescoreRequest
from flows.server.reachable import require_pools, require_server
from grpo_core.errors import InputError, raise_all
from grpo_core.rewards.registry import build_reward
from grpo_core.rewards.reward import Needs
from grpo_core.rollouts.images import fits_reward, shown_bounds
from grpo_core.rollouts.streams import ImageSize
from tasks.prompts.targets import find_target
from tasks.reports.report import require_page_path
from tasks.rewards.score_rewards import NeededScores, StoredScores
from tasks.rewards.score_rows import TARGET_HINT
from tasks.runs.layout import PARTS, RECOMPUTED, REWARDS, STORED, StoredIteration, rescoring_folder, stage_folder
from tasks.runs.lookup import find_run
from tasks.runs.reader import RunReader
from tasks.runs.stored import first_iteration, read_iterations, read_range, stored_config
from tasks.storage.artifacts.commit import IMAGES_REMOVED, removed_by
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.parquet import read_columns

_OF_PROMPTS = ("dataset", "columns", "sources", "target_uri", "width", "height")


@dataclass(frozen=True)
class RescoredRun:
    """One run that is scored again with new rewards.

    Attributes:
        iterations: the iterations in order, every file verified.
        folders: of target images, which the person knows.
        needed: scores that each reward needs, by iteration and for each of its sampling rounds.
    """

    store: ArtifactStore
    config: RunConfig
    rewards: tuple[RewardSection, ...]
    advantages: AdvantagesSection
    iterations: tuple[StoredIteration, ...]
    folders: tuple[str, ...]
    needed: Mapping[int, tuple[tuple[NeededScores, ...], ...]]

    @property
    def missing(self) -> tuple[RewardSection, ...]:
        """The rewards that have to score a sample of any sampling round."""
        needed = [each for rounds in self.needed.values() for scores in rounds for each in scores]
        return tuple({each.section.label: each.section for each in needed if each.missing}.values())


@dataclass(frozen=True)
class RescorePlan:
    """What a rescoring does, to the runs in the order of the request; `html` is another file for the report."""

    name: str
    runs: tuple[RescoredRun, ...]
    html: Path | None


@checked_once
def plan_rescore(request: RescoreRequest) -> RescorePlan:
    """Find what is stored, and check that it can be scored as requested; an InputError names each option or key."""
    requested = read_rewards_file(request.rewards, "--rewards")
    raise_all(_option_problems(request))
    html = None if request.html is None else Path(request.html)
    if html is not None:
        require_page_path(html)
    chosen = None if request.iterations is None else read_range(request.iterations)
    stores = [find_run(source, request.root) for source in request.sources]
    names = [store.run for store in stores]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError("RUN", twice, "A report identifies runs by name; score these separately.")
    runs = [_plan_run(store, requested, chosen, trust=request.trust_code) for store in stores]
    problems = [problem for run in runs for problem in _scoring_problems(run)]
    # Runs may have the same one.
    raise_all({str(problem): problem for problem in problems}.values())
    require_pools([place for run in runs for place in _pools(run)])
    require_server()
    return RescorePlan(name=request.name, runs=tuple(runs), html=html)


def needed_scores(
    store: ArtifactStore, stored: StoredIteration, rewards: Sequence[RewardSection]
) -> tuple[tuple[NeededScores, ...], ...]:
    """Find what each reward needs over each sampling round; tables of the run and of all its rescorings count."""
    reader = RunReader(store)
    needed = []
    for sampling_round in stored.rounds:
        folder = f"{stage_folder(sampling_round.rollouts.folder)}/{REWARDS}"
        folders = [rescoring_folder(name, folder) for name in reader.rescorings()]
        others = [store.find(f"{folder}/{label}") for folder in folders for label in reader.artifact_names(folder)]
        candidates = [*sampling_round.rewards.values(), *(each for each in others if each is not None)]
        scores = StoredScores(store, sampling_round.rollouts, candidates)
        needed.append(tuple(scores.needed(each) for each in rewards))
    return tuple(needed)


def _pools(run: RescoredRun) -> Iterator[tuple[str, str]]:
    placement = run.config.placement
    for name, pool in (("rewards", placement.rewards.pool), ("advantages", placement.advantages.pool)):
        if pool is not None:
            yield f"placement.{name}.pool of {run.store.run}", pool
    for index, section in enumerate(run.rewards):
        if section.pool is not None:
            yield f"rewards.{index}.pool", section.pool


def _option_problems(request: RescoreRequest) -> Iterator[InputError]:
    if request.name in (STORED, RECOMPUTED):
        yield InputError("--name", request.name, "grpo replay gives this name a meaning; choose another.")
    if len(set(request.sources)) < len(request.sources):
        yield InputError("RUN", list(request.sources), "A run is named twice; name each once.")


def _plan_run(
    store: ArtifactStore, requested: RewardsFile, chosen: tuple[int, int] | None, *, trust: bool
) -> RescoredRun:
    config = stored_config(store)
    advantages = requested.advantages or config.advantages
    # Only the rewards are checked: the rest has run, and its files may be gone.
    mixed = config.model_copy(update={"rewards": requested.rewards, "advantages": advantages})
    raise_all([*contradictions_within(requested), *reward_contradictions(mixed)])
    iterations = read_iterations(store, chosen, STORED)
    running = [section.label for section in requested.rewards if section.normalize == "running"]
    if running and chosen is not None and chosen[0] > first_iteration(store):
        hint = f"The running moments of {', '.join(running)} need every earlier iteration; start with the first."
        raise InputError("--iterations", f"{chosen[0]}-{chosen[1]}", hint)
    needed = {each.number: needed_scores(store, each, requested.rewards) for each in iterations}
    folders = trusted_folders(config, trust=trust)
    return RescoredRun(store, config, requested.rewards, advantages, iterations, folders, needed)


def _scoring_problems(run: RescoredRun) -> Iterator[InputError]:
    """Report why missing scores cannot be computed; stored scores need nothing."""
    kl_coef = run.advantages.kl_coef
    if kl_coef and not run.config.advantages.kl_coef:
        hint = f"The rollouts of {run.store.run} have no log-probs of the reference; leave it out."
        yield InputError("advantages.kl_coef", kl_coef, hint)
    prompts = _stored_prompts(run)
    found = sorted({name for columns in prompts["columns"].unique() for name in json.loads(columns)})
    for index, section in enumerate(run.rewards):
        place, needed = f"rewards.{index}.{section.label}", set(section.where or {})
        if section in run.missing:
            reward = build_reward(section.reward, section.settings)
            needs = reward.load_needs()
            for problem in reward.preflight():
                yield InputError(place, dict(section.settings), problem)
            yield from token_problems(run.config, section, reward, place)
            yield from _pruned_problems(run, section, place)
            if needs.target and prompts["target_uri"].null_count() == prompts.height:
                hint = f"The rollouts of {run.store.run} were collected without target images."
                yield InputError(place, section.reward, hint)
            if needs.target:
                yield from _target_problems(run, prompts, place)
            if needs.sources == "required" and not prompts["sources"].list.len().sum():
                hint = f"The prompts of {run.store.run} have no images."
                yield InputError(place, section.reward, hint)
            yield from _size_problems(run, section, needs, prompts, place)
            needed |= set(filter(None, [needs.column]))
        for column in sorted(needed - set(found)):
            hint = f"No prompt of {run.store.run} has this column; it has {', '.join(found) or 'none'}."
            yield InputError(place, column, hint)


def _target_problems(run: RescoredRun, prompts: pl.DataFrame, place: str) -> Iterator[InputError]:
    for uri in prompts["target_uri"].drop_nulls().unique(maintain_order=True):
        if find_target(uri, [run.store], run.folders) is None:
            yield InputError(f"{place}, {run.store.run}/data.targets", uri, TARGET_HINT)
            return


def _size_problems(
    run: RescoredRun, section: RewardSection, needs: Needs, prompts: pl.DataFrame, place: str
) -> Iterator[InputError]:
    if "width" not in prompts.columns:
        return
    refused: dict[ImageSize, str] = {}
    for row in prompts.unique(("dataset", "columns", "width", "height"), maintain_order=True).iter_rows(named=True):
        size, meant = ImageSize(row["width"], row["height"]), (row["dataset"], json.loads(row["columns"]))
        if not fits_reward(size, needs.min_side, needs.max_aspect) and section.scores_prompt(*meant):
            refused.setdefault(size, row["dataset"])
    for size, dataset in refused.items():
        hint = f"It needs {shown_bounds(needs.min_side, needs.max_aspect)}; {dataset} has images of this size."
        yield InputError(place, f"{section.reward} of {size} pixels", hint)


def _pruned_problems(run: RescoredRun, section: RewardSection, place: str) -> Iterator[InputError]:
    missing = [
        each.number
        for each in run.iterations
        for sampling_round, needed in zip(each.rounds, run.needed[each.number], strict=True)
        if any(one.section == section and one.missing for one in needed)
        and IMAGES_REMOVED in removed_by(run.store.pruned_reason(sampling_round.rollouts))
    ]
    if missing:
        hint = (
            f"{run.store.run} has no scores of it for iteration {', '.join(map(str, dict.fromkeys(missing)))}, whose "
            "images were removed by `grpo prune`. Choose other --iterations, or rewards whose scores are stored."
        )
        yield InputError(place, section.reward, hint)


def _stored_prompts(run: RescoredRun) -> pl.DataFrame:
    store, rollouts = run.store, [part.rollouts.uri for each in run.iterations for part in each.rounds]
    tables = (read_columns(store.filesystem, f"{store.root}/{uri}", PARTS, _OF_PROMPTS) for uri in rollouts)
    return pl.concat(pl.DataFrame(table) for table in tables)
