"""The end of a training run: first and last rewards, time by stage, where to look; also of a run that had finished.

Everything that a start would use again is verified as the start would; whatever is missing, damaged or changed is left
to the start, which names and replaces it.
"""

import io
import json
import time
from collections import Counter
from typing import Any
from uuid import UUID

from PIL import Image
from prefect import get_run_logger

from configs.rollouts import TextRolloutSection
from configs.schema import RunConfig
from configs.yaml_files import parse_yaml
from flows.pipeline.lineage import identify, read_valid_description, resolve_code, resolve_start, stage_code
from flows.pipeline.prefect_ui import artifact_link, publish_report
from flows.pipeline.run import Run, describe, heldout_digest
from flows.preflight.model import trained_model
from flows.preflight.prompts import read_prompt_files
from flows.pruning.prune import PolicyKeeper
from flows.training.history import TrainingHistory
from grpo_core.errors import InputError
from tasks.reports.heldout import write_contact_sheet, write_heldout_texts
from tasks.reports.images import image_uri, shrunk
from tasks.reports.report import Report, reward_facts, seconds_facts, signs_notice
from tasks.reports.text import counted, relative
from tasks.runs.layout import (
    ADVANTAGES,
    BASELINES,
    CONTACT_SHEET,
    STORED,
    Baseline,
    StoredEvaluation,
    baseline_folder,
    evaluation_folder,
    policy_folder,
)
from tasks.runs.lookup import CONFIG_SHA256, read_config_file
from tasks.runs.run_view import RunSummary, summary_of
from tasks.runs.stored import find_evaluation, read_iterations
from tasks.runs.stored_policies import read_policy
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore, open_store
from tasks.storage.prefect_results import note_copied
from tasks.storage.run_lock import RunLock, locked

_SHEET_SIDE = 1000
"""Pixels of the longer side of the contact sheet in the UI, whose pages should stay below 300 KB."""


class TrainSummary(RunSummary):
    """The results of a training run; `seconds.total` is the wall time of this start, the stages' are as measured.

    Attributes:
        contact_sheet: image of the held-out samples before and after; None for text and without held-out prompts.
        heldout_texts: page of the held-out completions before and after; None for images.
        stopped_early: whether a guardrail, or a hook, ended the run before its last iteration.
        quarantined: damaged and replaced files that this start moved to `quarantine/`, and why.
        reused: number of iterations with results of another run, by its name; their seconds are not counted.
        pages: addresses of the last report and the summary in Prefect's UI; empty without a lasting server.
    """

    contact_sheet: str | None
    heldout_texts: str | None
    stopped_early: bool
    quarantined: list[str]
    reused: dict[str, int]
    pages: dict[str, str]

    def report(self) -> Report:
        """Return the end of a training run or a replay: rewards first and last, time by stage, where to look."""
        files = {
            "images before and after": self.contact_sheet,
            "completions before and after": self.heldout_texts,
        }
        facts = [
            *reward_facts(self),
            *seconds_facts(self.seconds),
            *((f"reused from run {name}", counted(count, "iteration")) for name, count in self.reused.items()),
            ("policy digest", (self.policy_digest or "none")[:16]),
            ("stored in", relative(self.folder)),
            *((title, relative(path)) for title, path in files.items() if path),
            *([("stopped", f"after iteration {self.iterations}, before the last one")] if self.stopped_early else []),
            *(("moved away", reason) for reason in self.quarantined),
        ]
        # A line of its own is never folded, so the address stays in one piece.
        notes = [f"{title} in Prefect's UI: {address}" for title, address in self.pages.items()]
        notices = [signs_notice(self.signs)]
        return Report(f"{self.run}: {self.iterations} iterations", facts, notices=notices, notes=notes)


def summarize(run: Run, history: TrainingHistory, elapsed: float) -> TrainSummary:
    """Summarize a run, and store its held-out samples before and after; `elapsed` is the time of this start."""
    store, version = run.store, history.policy_version
    scored = [each.stages[ADVANTAGES][0] for each in history.evaluations]
    ends = (scored[0], scored[-1]) if scored else None
    title, texts = f"{history.name}: held-out prompts", isinstance(run.config.rollout, TextRolloutSection)
    known = summary_of(history).model_dump()
    return TrainSummary(
        **known | {"iterations": len(history.iterations), "seconds": {"total": elapsed, **history.seconds}},
        contact_sheet=write_contact_sheet(store, *ends, title) if ends and not texts else None,
        heldout_texts=write_heldout_texts(store, *ends, title) if ends and texts else None,
        stopped_early=version < run.config.run.iterations,
        quarantined=list(store.reasons),
        pages={},
        reused=Counter(name for record in history.iterations for name in dict.fromkeys(record.reused.values())),
    )


async def publish_summary(run: Run, summary: TrainSummary, last_report: UUID | None) -> TrainSummary:
    """Show the summary in Prefect's UI, with held-out images before and after; add the addresses of both reports."""
    pages = {} if last_report is None else _page("last report", last_report)
    parts = [f"[{title}]({address})" for title, address in pages.items()]
    sheet = run.store.read_file(CONTACT_SHEET) if summary.contact_sheet else None
    if sheet is not None:
        image = shrunk(Image.open(io.BytesIO(sheet)), _SHEET_SIDE)
        parts.append(f"![before and after training]({image_uri(image, lossless_side=0, quality=80)})")
    page = await publish_report(summary.report(), f"{summary.run}-summary", "\n\n".join(parts))
    shown = summary.model_copy(update={"pages": {**pages, **_page("summary", page)}})
    report = shown.report()
    signs = [line for notice in report.notices for line in notice.lines]
    facts = [f"{name}: {value}" for name, value in report.facts]
    get_run_logger().info("\n    ".join([report.title, *signs, *facts, *report.notes]))
    return shown


def _page(title: str, artifact: UUID) -> dict[str, str]:
    address = artifact_link(artifact)
    return {} if address is None else {title: address}


_ELSEWHERE = ("placement", "storage")
"""Sections that a finished run has no more use for."""


def read_finished(config: RunConfig) -> TrainSummary | None:
    """Return the summary of a run that a start would leave as it is; None if there is anything for a start to do."""
    started = time.perf_counter()
    store = open_store(config.storage, config.run.name)
    with locked(store, setting="run.name", value=config.run.name) as lock:
        try:
            run = _unchanged_run(config, store, lock)
            history = None if run is None else read_history(run)
        except (InputError, ValueError):
            # The start reports it, if it cannot be replaced.
            return None
        if run is None or history is None:
            return None
        # A start that was killed at its end may have left some.
        PolicyKeeper(store, run.config, lock).delete_unneeded(config.run.iterations, history.heldout_rewards)
        return summarize(run, history, time.perf_counter() - started)


def _unchanged_run(config: RunConfig, store: ArtifactStore, lock: RunLock) -> Run | None:
    """Return the run if a start would write the same run.json and config.yaml again, but for where it runs."""
    prompts, previous = read_prompt_files(config), read_valid_description(store)
    if previous is None or prompts.problems:
        return None
    config, start = resolve_start(config, previous)
    model = trained_model(config)
    run = Run(config, store, lock, model, prompts.usable("data"), prompts.usable("evaluate"), start)
    accepted = resolve_code(stage_code(config, model), previous, accept=False)
    identity = identify(config, model, run.training, start, run.heldout)
    evaluation = heldout_digest(config, run.heldout) or previous.get("evaluation")
    described, settings = describe(run, identity, accepted, evaluation)
    stored = {name: value for name, value in previous.items() if name != CONFIG_SHA256}
    same = json.loads(json.dumps(described)) == stored and _read(settings) == _read(read_config_file(store))
    return run if same else None


def _read(settings: bytes) -> dict[str, Any]:
    values = parse_yaml(settings.decode(), "config.yaml")
    return {name: section for name, section in values.items() if name not in _ELSEWHERE}


def read_history(run: Run) -> TrainingHistory | None:
    """Read the history of a finished run; None if a part is missing, damaged, or would be written again by a start."""
    config, store, history = run.config, run.store, TrainingHistory.of(run)
    if not note_copied(store):
        return None
    evaluations: dict[int, StoredEvaluation] = {}
    for version in range(config.run.iterations + 1) if run.heldout else ():
        if version == 0 or config.is_evaluated(version):
            done = find_evaluation(store, evaluation_folder(version), config)
            if done is None:
                return None
            evaluations[version] = done
    if any(target is not None for each in run.heldout for target in each.targets):
        history.add_baselines(_find_baselines(run))
        if len(history.baselines) < len(BASELINES):
            return None
    if 0 in evaluations:
        history.add_evaluation(config, 0, evaluations[0])
    labels = {section.label for section in config.rewards}
    for stored in read_iterations(store, (1, config.run.iterations), STORED):
        if stored.number in evaluations:
            history.add_evaluation(config, stored.number, evaluations[stored.number])
        update = store.find(policy_folder(stored.number))
        if update is None:
            return None
        record, changed = history.add_iteration(store, stored.number, stored.rounds, stored.advantages, update)
        if changed or not record.stored or any(set(each.rewards) != labels for each in stored.rounds):
            return None
    history.reach(read_policy(store, config.run.iterations))
    return history


def _find_baselines(run: Run) -> dict[Baseline, ArtifactRef]:
    unguarded: Any = run.config.guardrails.model_copy(update={"rewards": ()})
    config = run.config.model_copy(update={"guardrails": unguarded})
    found = {name: find_evaluation(run.store, baseline_folder(name), config) for name in BASELINES}
    return {name: done.advantages for name, done in found.items() if done is not None}
