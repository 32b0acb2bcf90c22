"""`grpo rewards analyse`: range, agreement and noise of stored scores."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import polars as pl
from pydantic import BaseModel

from configs.schema import RewardsFile
from configs.scoring import RewardSection
from flows.preflight.trust import require_trust, trusted_folders
from flows.rescoring.plan import needed_scores
from grpo_core.errors import InputError
from grpo_core.rewards.registry import build_reward
from tasks.reports.report import Report, require_page_path, write_page
from tasks.reports.reward_analysis import analyse, analysis_report, render_reward_page
from tasks.reports.statistics import Statistics
from tasks.reports.text import relative
from tasks.rewards.scores import read_scores, score_again
from tasks.runs.hacking import hacking_verdict
from tasks.runs.layout import ANALYSIS, REPORT_FILE, REPORT_PAGE, REWARDS_FILE, STORED, SamplingRound, rescoring_folder
from tasks.runs.lookup import CONFIG_FILE, find_run
from tasks.runs.read_run import read_run
from tasks.runs.reader import RunReader
from tasks.runs.stored import locate_paths, read_iterations, read_range, stored_config
from tasks.runs.trust import uses_of
from tasks.storage.artifacts.commit import IMAGES_REMOVED, removed_by
from tasks.storage.artifacts.store import ArtifactStore

REPEATED = 32
"""Samples that are scored again, to see whether the same image gets the same score."""

MAX_PAIRS = 12
"""Pairs of rewards that the terminal shows."""


class AnalysisSummary(BaseModel):
    """What `--json` prints.

    Attributes:
        rescored: name of the rescoring whose scores were analysed; None for the run's own.
        folder: where the page and the metrics are stored.
        fallen: guardrails, and rewards of weight 0, that have fallen while the held-out reward rose, in words.
        not_repeated: rewards that could not score again, and why.
    """

    run: str
    rescored: str | None
    folder: str
    fallen: list[str]
    not_repeated: dict[str, str]
    analysis: Statistics

    def report(self, *, on_page: bool = False) -> Report:
        """Return what stands out, the metrics of rewards and pairs (all on a page), and what could not score again."""
        title = f"{self.run}: rewards" + (f" of the rescoring {self.rescored}" if self.rescored else "")
        report = analysis_report(self.analysis, title, self.fallen)
        notes = [f"{label} was not scored again: {reason}" for label, reason in self.not_repeated.items()]
        if on_page:
            return replace(report, notes=notes)
        rewards, pairs = report.tables
        page = f"page: {relative(self.folder)}/{REPORT_PAGE}"
        return replace(report, tables=[rewards, pairs.head(MAX_PAIRS, "pairs")], notes=[*notes, page])


def analyse_rewards(
    source: str,
    *,
    root: str = "runs",
    iterations: str | None = None,
    rescored: str | None = None,
    repeats: int = REPEATED,
    html: Path | None = None,
    trust_code: bool = False,
) -> AnalysisSummary:
    """Analyse a run's scores and store the results in its `analysis` folder.

    Args:
        source: a run under the root, or the path of its folder.
        iterations: `A-B` or `A`; None for all.
        rescored: name of a rescoring whose scores are analysed; None for the run's own.
        repeats: number of samples to score again; 0 for none.
        html: another file for the page; None for no other.
        trust_code: use also what of the run's rewards this person has not trained with, and remember it.
    """
    if html is not None:
        require_page_path(html)
    if repeats < 0:
        raise InputError("--repeats", repeats, "Give a number of samples; 0 scores none again.")
    store = find_run(source, root)
    config = stored_config(store)
    sections = config.rewards if rescored is None else _rescored_rewards(store, rescored)
    if repeats or rescored is not None:
        # Which stored scores are those of a rescoring depends on the versions of its rewards.
        place = CONFIG_FILE if rescored is None else f"{rescoring_folder(rescored)}/{REWARDS_FILE}"
        uses = [use for index, each in enumerate(sections) for use in uses_of(each, f"rewards.{index}")]
        require_trust(uses, f"{store.run}/{place}", trust=trust_code)
    rounds = _scored_rounds(store, sections, iterations, rescored)
    folders = trusted_folders(config, trust=trust_code)
    again, not_repeated = _score_again(store, sections, rounds, repeats, folders)
    scores = read_scores(store, rounds)
    analysis = analyse(scores, again)
    run = read_run(RunReader(store))
    summary = AnalysisSummary(
        run=store.run,
        rescored=rescored,
        folder=store.path(ANALYSIS),
        fallen=[*map(str, hacking_verdict(run).fallen)],
        not_repeated=not_repeated,
        analysis=analysis,
    )
    page = render_reward_page(summary.report(on_page=True), analysis, scores, run)
    store.write_file(f"{ANALYSIS}/{REPORT_PAGE}", page.encode())
    store.write_file(f"{ANALYSIS}/{REPORT_FILE}", json.dumps(analysis, indent=1).encode())
    if html is not None:
        write_page(html, page)
    return summary


def _rescored_rewards(store: ArtifactStore, name: str) -> tuple[RewardSection, ...]:
    content = store.read_file(f"{rescoring_folder(name)}/{REWARDS_FILE}")
    if content is None:
        known = RunReader(store).rescorings()
        hint = (
            "It is not finished: run the same `grpo rescore` again."
            if name in known
            else f"{store.run} has {', '.join(known) or 'no rescoring'}."
        )
        raise InputError("--rescored", name, hint)
    values = json.loads(content)
    locate_paths(values, store)
    return RewardsFile.model_validate_json(json.dumps(values)).rewards


def _scored_rounds(
    store: ArtifactStore, rewards: tuple[RewardSection, ...], iterations: str | None, rescored: str | None
) -> dict[int, tuple[SamplingRound, ...]]:
    chosen = None if iterations is None else read_range(iterations)
    stored = read_iterations(store, chosen, rescored or STORED)
    if rescored is None:
        return {each.number: each.rounds for each in stored}
    rounds: dict[int, tuple[SamplingRound, ...]] = {}
    for each in stored:
        found = needed_scores(store, each, rewards)
        if missing := {one.section.label for needed in found for one in needed if one.stored is None}:
            hint = f"Scores of {', '.join(sorted(missing))} are missing in iteration {each.number}; run it again."
            raise InputError("--rescored", rescored, hint)
        rounds[each.number] = tuple(
            replace(stored_round, rewards={one.section.label: one.stored for one in needed if one.stored is not None})
            for stored_round, needed in zip(each.rounds, found, strict=True)
        )
    return rounds


def _score_again(
    store: ArtifactStore,
    sections: Sequence[RewardSection],
    rounds: Mapping[int, Sequence[SamplingRound]],
    samples: int,
    folders: Sequence[str],
) -> tuple[pl.DataFrame | None, dict[str, str]]:
    """Score the last iteration's first samples again by every reward that can run here."""
    if not samples:
        return None, {}
    able, unable = [], {}
    for section in sections:
        problems = build_reward(section.reward, section.settings).preflight()
        if problems:
            unable[section.label] = problems[0]
        else:
            able.append(section)
    if not able:
        return None, unable
    shown = [
        number
        for number, each in rounds.items()
        if IMAGES_REMOVED not in removed_by(store.pruned_reason(each[0].rollouts))
    ]
    last = max(shown, default=None)
    if last is None:
        gone = "the images were removed by `grpo prune`"
        return None, {**unable, **{section.label: gone for section in able}}
    return score_again(store, last, rounds[last][0], able, samples, folders), unable
