"""The summary of a training run: first and last rewards, time by stage, where to look."""

import io
from collections import Counter

from PIL import Image
from prefect import get_run_logger
from prefect.artifacts import acreate_markdown_artifact

from configs.sections import TextRolloutSection
from flows.pipeline.flow_run_page import artifact_key
from flows.pipeline.run import Run
from flows.terminal.summaries import training_rows
from flows.training.history import TrainingHistory, write_watch_plot
from tasks.reports.heldout import write_contact_sheet, write_heldout_texts
from tasks.reports.images import image_uri, shrunk
from tasks.reports.text import in_cell, markdown_table
from tasks.runs.layout import CONTACT_SHEET
from tasks.runs.run_view import RunSummary
from tasks.storage.artifacts.reference import PolicyRef

_SHEET_SIDE = 1000
"""Pixels of the longer side of the contact sheet in the UI, whose pages should stay below 300 KB."""


class TrainSummary(RunSummary):
    """The results of a training run; `seconds.total` is the wall time of this start, the stages' are as measured.

    Attributes:
        contact_sheet: image of the held-out samples before and after; None for text and without held-out prompts.
        heldout_texts: page of the held-out completions before and after; None for images.
        watch: plot of the held-out reward and the guardrails; None without guardrails.
        hacking: guardrails that had fallen at the last evaluation while the reward rose, in words.
        stopped_early: whether the watch, or a hook, ended the run before its last iteration.
        quarantined: damaged and replaced files that this start moved to `quarantine/`, and why.
        reused: number of iterations with results of another run, by its name; their seconds are not counted.
    """

    contact_sheet: str | None
    heldout_texts: str | None
    watch: str | None
    hacking: list[str]
    stopped_early: bool
    quarantined: list[str]
    reused: dict[str, int]


def summarize(run: Run, policy: PolicyRef, history: TrainingHistory, elapsed: float) -> TrainSummary:
    """Gather the summary, and store the held-out samples before and after; `elapsed` is the time of this start."""
    iterations, heldout = history.iterations, history.heldout
    rewards = [record.metrics["reward"] for record in iterations if "reward" in record.metrics]
    by_stage = {"total": elapsed}
    for record in iterations:
        for stage, seconds in record.seconds.items():
            by_stage[stage] = by_stage.get(stage, 0.0) + seconds
    versions = sorted(heldout)
    ends = (heldout[versions[0]], heldout[versions[-1]]) if versions else None
    title, texts = f"{run.config.run.name}: held-out prompts", isinstance(run.config.rollout, TextRolloutSection)
    return TrainSummary(
        run=run.config.run.name,
        iterations=len(iterations),
        reward_first=rewards[0] if rewards else None,
        reward_last=rewards[-1] if rewards else None,
        heldout_before=heldout[versions[0]].metrics.get("reward") if versions else None,
        heldout_after=heldout[versions[-1]].metrics.get("reward") if versions else None,
        heldout_baselines={
            name: scored.metrics["reward"] for name, scored in history.baselines.items() if "reward" in scored.metrics
        },
        policy_digest=policy.digest,
        seconds=by_stage,
        folder=run.store.path(),
        contact_sheet=write_contact_sheet(run.store, *ends, title) if ends and not texts else None,
        heldout_texts=write_heldout_texts(run.store, *ends, title) if ends and texts else None,
        watch=write_watch_plot(run.store, heldout, history.guardrails) if any(history.guardrails.values()) else None,
        hacking=[str(sign) for sign in history.signs],
        stopped_early=policy.version < run.config.run.iterations,
        quarantined=list(run.store.reasons),
        reused=Counter(name for record in iterations for name in dict.fromkeys(record.reused.values())),
    )


async def publish_summary(run: Run, summary: TrainSummary) -> None:
    """Show the summary in Prefect's UI: in the run's log, and on a page with the held-out images before and after."""
    title, rows = f"{summary.run}: {summary.iterations} iterations", training_rows(summary)
    get_run_logger().info("\n".join([title, *(f"    {name}: {value}" for name, value in rows)]))
    lines = [f"# {title}", "", *markdown_table(("", ""), [(in_cell(name), in_cell(value)) for name, value in rows]), ""]
    sheet = run.store.read_file(CONTACT_SHEET) if summary.contact_sheet else None
    if sheet is not None:
        image = shrunk(Image.open(io.BytesIO(sheet)), _SHEET_SIDE)
        lines += [f"![before and after training]({image_uri(image, lossless_side=0, quality=80)})", ""]
    key = artifact_key(f"{summary.run}-summary")
    await acreate_markdown_artifact("\n".join(lines), key=key, description=title)
