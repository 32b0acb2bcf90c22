"""The summary of a training run: first and last rewards, time by stage, where to look."""

import io
from collections import Counter

from PIL import Image
from prefect import get_run_logger

from configs.sections import TextRolloutSection
from flows.pipeline.flow_run_page import publish_report
from flows.pipeline.run import Run
from flows.training.history import TrainingHistory
from tasks.reports.heldout import write_contact_sheet, write_heldout_texts
from tasks.reports.images import image_uri, shrunk
from tasks.reports.report import Report, reward_facts, seconds_facts
from tasks.reports.text import counted, relative
from tasks.runs.layout import ADVANTAGES, CONTACT_SHEET, GUARDRAILS_PLOT
from tasks.runs.run_view import RunSummary, guardrail_curves, summary_of

_SHEET_SIDE = 1000
"""Pixels of the longer side of the contact sheet in the UI, whose pages should stay below 300 KB."""


class TrainSummary(RunSummary):
    """The results of a training run; `seconds.total` is the wall time of this start, the stages' are as measured.

    Attributes:
        contact_sheet: image of the held-out samples before and after; None for text and without held-out prompts.
        heldout_texts: page of the held-out completions before and after; None for images.
        guardrails_plot: plot of the held-out reward and the guardrails; None without guardrails.
        hacking: guardrails that had fallen at the last evaluation while the reward rose, in words.
        stopped_early: whether a guardrail, or a hook, ended the run before its last iteration.
        quarantined: damaged and replaced files that this start moved to `quarantine/`, and why.
        reused: number of iterations with results of another run, by its name; their seconds are not counted.
    """

    contact_sheet: str | None
    heldout_texts: str | None
    guardrails_plot: str | None
    hacking: list[str]
    stopped_early: bool
    quarantined: list[str]
    reused: dict[str, int]

    def report(self) -> Report:
        """Return the end of a training run or a replay: rewards first and last, time by stage, where to look."""
        files = {
            "images before and after": self.contact_sheet,
            "completions before and after": self.heldout_texts,
            "reward and its guardrails": self.guardrails_plot,
        }
        facts = [
            *reward_facts(self),
            *seconds_facts(self.seconds),
            *((f"reused from run {name}", counted(count, "iteration")) for name, count in self.reused.items()),
            ("policy digest", (self.policy_digest or "none")[:16]),
            ("stored in", relative(self.folder)),
            *((title, relative(path)) for title, path in files.items() if path),
            *(("stopped by a guardrail" if self.stopped_early else "guardrail fell", sign) for sign in self.hacking),
            *(("moved away", reason) for reason in self.quarantined),
        ]
        return Report(f"{self.run}: {self.iterations} iterations", facts)


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
        guardrails_plot=_write_guardrails_plot(run, history) if history.guardrail_series else None,
        hacking=[str(sign) for sign in history.signs],
        stopped_early=version < run.config.run.iterations,
        quarantined=list(store.reasons),
        reused=Counter(name for record in history.iterations for name in dict.fromkeys(record.reused.values())),
    )


def _write_guardrails_plot(run: Run, history: TrainingHistory) -> str:
    """Plot the held-out reward above the guardrails and return the path of the image."""
    # The plotting library takes a second to import, which a run without guardrails does not need.
    from tasks.reports.reward_plots import plot_guardrails

    run.store.write_file(GUARDRAILS_PLOT, plot_guardrails(*guardrail_curves(history)))
    return run.store.path(GUARDRAILS_PLOT)


async def publish_summary(run: Run, summary: TrainSummary) -> None:
    """Show the summary in Prefect's UI: in the run's log, and on a page with the held-out images before and after."""
    report = summary.report()
    get_run_logger().info("\n".join([report.title, *(f"    {name}: {value}" for name, value in report.facts)]))
    sheet, images = run.store.read_file(CONTACT_SHEET) if summary.contact_sheet else None, ""
    if sheet is not None:
        image = shrunk(Image.open(io.BytesIO(sheet)), _SHEET_SIDE)
        images = f"![before and after training]({image_uri(image, lossless_side=0, quality=80)})\n"
    await publish_report(report, f"{summary.run}-summary", images)
