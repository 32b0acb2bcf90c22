"""The rescoring flow: stored rollouts are scored with other rewards; nothing is sampled, and no policy changes."""

import json
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import polars as pl
from PIL import Image
from prefect import flow
from pydantic import BaseModel

from configs.schema import RewardsFile
from flows.pipeline.prefect_ui import RescoreForm, publish_report
from flows.pipeline.stages import as_task, recording, score_concurrently
from flows.rescoring.plan import RescoredRun, RescorePlan, plan_rescore
from tasks.advantages.compute_advantages import compute_advantages_task
from tasks.progress import advance_run, log
from tasks.reports.report import Report, seconds_facts, write_page
from tasks.reports.rescoring import (
    compare,
    comparison_tables,
    moved_most,
    moved_table,
    read_outputs,
    read_rescored,
    render_rescoring_page,
    title_of,
)
from tasks.reports.statistics import Statistics
from tasks.reports.text import counted, relative
from tasks.rewards.score_rewards import failed_scores
from tasks.runs.layout import (
    ADVANTAGES,
    REPORT_FILE,
    REPORT_PAGE,
    REWARDS,
    REWARDS_FILE,
    SamplingRound,
    StoredIteration,
    iteration_folder,
    parse_iteration,
    rescoring_folder,
    stage_folder,
)
from tasks.runs.reader import RunReader
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.run_lock import locked

SHOWN = 3
"""Number of samples that moved which are shown in the terminal; the page has all."""


class RescoreSummary(BaseModel):
    """The results of a rescoring; numbers are those of all runs together.

    Attributes:
        computed, failed: samples that each reward was computed for, and could not score.
        seconds: `total`, `scores`, `advantages` and `report`.
        report: paths of the pages, one per run and the requested one.
    """

    name: str
    runs: list[str]
    iterations: int
    samples: int
    computed: dict[str, int]
    failed: dict[str, int]
    seconds: dict[str, float]
    report: list[str]
    comparison: dict[str, Any]


@dataclass(frozen=True)
class Rescoring:
    """The results of a rescoring, what changed, and the samples whose rank moved most."""

    summary: RescoreSummary
    comparison: Statistics
    moved: pl.DataFrame

    def report(self) -> Report:
        """Return what changed, what was computed, and where the pages are."""
        summary = self.summary
        facts = [
            *(
                (f"{label}, computed", _computed(count, summary.failed[label]))
                for label, count in summary.computed.items()
            ),
            *seconds_facts(summary.seconds),
            *(("page", relative(page)) for page in summary.report),
        ]
        moved = moved_table(self.moved).head(SHOWN, "samples", relative(summary.report[-1]))
        tables = [*comparison_tables(self.comparison), moved]
        return Report(title_of(summary.runs, summary.name), facts, tables)


def _computed(count: int, failed: int) -> str:
    computed = counted(count, "sample") if count else "nothing: every score was stored"
    return f"{computed}; {failed:,} could not be scored" if failed else computed


@flow(name="grpo rescore", flow_run_name="{request.name}")
async def rescore(request: RescoreForm) -> Rescoring:
    """Score stored rollouts, compute their advantages again, and report what changed."""
    started = time.perf_counter()
    plan = plan_rescore(request)
    spent: dict[str, float] = {"scores": 0.0, "advantages": 0.0}
    done: dict[str, list[StoredIteration]] = {}
    with ExitStack() as stack:
        folder = rescoring_folder(plan.name)
        locks = [stack.enter_context(locked(run.store, folder, setting="--name", value=plan.name)) for run in plan.runs]
        for run, lock in zip(plan.runs, locks, strict=True):
            async with recording(run.store, lock):
                done[run.store.run] = rescore_run(plan.name, run, spent)
        begun = time.perf_counter()
        comparison, moved, pages = write_pages(plan, done)
    spent = {"total": time.perf_counter() - started, **spent, "report": time.perf_counter() - begun}
    rescoring = Rescoring(rescore_summary(plan, done, spent, pages, comparison), comparison, moved)
    await publish_report(rescoring.report(), f"rescore-{plan.name}")
    return rescoring


def rescore_run(name: str, run: RescoredRun, spent: dict[str, float]) -> list[StoredIteration]:
    """Score every iteration of one run, in order: running moments carry over from one to the next."""
    done: list[StoredIteration] = []
    started = time.perf_counter()
    for stored in run.iterations:
        begun = time.perf_counter()
        rounds = tuple(score_missing(name, run, stored, index) for index in range(len(stored.rounds)))
        if not done:
            # Scores name their own rewards: one that is refused leaves what was there before.
            open_folder(name, run)
        between = time.perf_counter()
        advantages = advantages_of(name, run, stored, rounds, done[-1].advantages if done else None)
        spent["scores"] += between - begun
        spent["advantages"] += time.perf_counter() - between
        done.append(replace(stored, rounds=rounds, advantages=advantages))
        advance_run(len(done), len(run.iterations), (time.perf_counter() - started) / len(done))
    log(f"{run.store.run}: {len(done)} iterations scored as {name}")
    return done


def open_folder(name: str, run: RescoredRun) -> None:
    """Store the rewards of the rescoring; advantages that other rewards made are moved to `quarantine/`."""
    store, place = run.store, rescoring_folder(name)
    requested = RewardsFile(rewards=run.rewards, advantages=run.advantages)
    content = requested.model_dump_json(indent=1).encode()
    if store.read_file(f"{place}/{REWARDS_FILE}") == content:
        return
    reader = RunReader(store)
    stored = {each: reader.names(f"{place}/{each}") for each in reader.names(place) if parse_iteration(each)}
    # The manifest first: without it the table is invalid.
    parts = (store.manifest_path(ADVANTAGES), ADVANTAGES)
    stale = [f"{place}/{each}/{part}" for each, names in stored.items() for part in parts if part in names]
    if stale:
        store.quarantine(stale, reason=f"the rewards of the rescoring {name} changed")
    store.write_file(f"{place}/{REWARDS_FILE}", content)


def score_missing(name: str, run: RescoredRun, stored: StoredIteration, index: int) -> SamplingRound:
    """Return a sampling round with the requested scores; the missing ones are computed concurrently."""
    rollouts, needed = stored.rounds[index].rollouts, run.needed[stored.number][index]
    missing = [each for each in needed if each.stored is None]
    computed = score_concurrently(
        rollouts,
        [each.section for each in missing],
        rescoring_folder(name, f"{stage_folder(rollouts.folder)}/{REWARDS}"),
        f"iteration {stored.number}" if index == 0 else f"iteration {stored.number}, round {index + 1}",
        run.config.placement,
        earlier={each.section.label: each.earlier for each in missing},
        folders=run.folders,
    )
    scores = {each.section.label: each.stored or computed[each.section.label] for each in needed}
    return SamplingRound(rollouts, scores)


def advantages_of(
    name: str, run: RescoredRun, stored: StoredIteration, rounds: tuple[SamplingRound, ...], earlier: ArtifactRef | None
) -> ArtifactRef:
    """Compute one table of advantages over the samples of all rounds of an iteration."""
    title = f"iteration {stored.number}"
    stage = as_task(compute_advantages_task, title, run.config.placement)
    folder = rescoring_folder(name, iteration_folder(stored.number))
    streams = run.config.streams
    return stage(rounds, streams, run.rewards, run.advantages, folder, title, earlier, run.config.placement)


def write_pages(
    plan: RescorePlan, done: Mapping[str, list[StoredIteration]]
) -> tuple[Statistics, pl.DataFrame, list[str]]:
    """Compare all runs; store the page in each of them, and in the requested file."""
    frames = [read_rescored(run.store, run.iterations, done[run.store.run]) for run in plan.runs]
    samples = pl.concat(frames, how="diagonal")
    comparison, moved = compare(samples), moved_most(samples)
    outputs: dict[tuple[str, str], Image.Image | str] = {}
    for run in plan.runs:
        outputs |= read_outputs(run.store, run.iterations, moved)
    page = render_rescoring_page(comparison, samples, moved, outputs, title_of(list(done), plan.name))
    pages = []
    for store in [run.store for run in plan.runs]:
        place = rescoring_folder(plan.name)
        store.write_file(f"{place}/{REPORT_FILE}", json.dumps(comparison, indent=1).encode())
        store.write_file(f"{place}/{REPORT_PAGE}", page.encode())
        pages.append(store.path(f"{place}/{REPORT_PAGE}"))
    if plan.html is not None:
        write_page(plan.html, page)
        pages.append(str(plan.html))
    return comparison, moved, pages


def rescore_summary(
    plan: RescorePlan,
    done: Mapping[str, list[StoredIteration]],
    seconds: dict[str, float],
    pages: list[str],
    comparison: Statistics,
) -> RescoreSummary:
    """Gather the summary."""
    labels = [section.label for section in plan.runs[0].rewards]
    computed, failed = dict.fromkeys(labels, 0), dict.fromkeys(labels, 0)
    for run in plan.runs:
        for each in done[run.store.run]:
            for sampling_round, needed in zip(each.rounds, run.needed[each.number], strict=True):
                for one in needed:
                    scores = sampling_round.rewards[one.section.label]
                    computed[one.section.label] += one.missing
                    failed[one.section.label] += failed_scores(scores)
    return RescoreSummary(
        name=plan.name,
        runs=list(done),
        iterations=sum(map(len, done.values())),
        samples=comparison["samples"],
        computed=computed,
        failed=failed,
        seconds=seconds,
        report=pages,
        comparison=comparison,
    )
