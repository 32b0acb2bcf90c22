"""Read what `grpo inspect` shows of a run: metrics, the samples of one iteration, warnings; write the page."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from grpo_core.errors import InputError
from tasks.reports.groups import LARGE, read_groups
from tasks.reports.images import PromptImages
from tasks.reports.report import Report, require_page_path, write_page
from tasks.reports.run_page import (
    PageSamples,
    read_excerpts,
    read_heldout,
    read_rewards,
    render_run_page,
    run_report,
    stage_shares,
)
from tasks.reports.text import relative
from tasks.runs.hacking import Verdict, hacking_verdict
from tasks.runs.layout import ROLLOUTS
from tasks.runs.lookup import find_run, spans
from tasks.runs.read_run import read_run
from tasks.runs.reader import RunReader
from tasks.runs.run_view import RunSummary, RunView, summary_of
from tasks.storage.artifacts.commit import IMAGES_REMOVED, removed_by
from tasks.storage.files import scratch_folder

MAX_GROUPS = 60
"""Groups that are shown with all their samples; an iteration may have thousands."""


class InspectSummary(RunSummary):
    """What `--json` prints.

    Attributes:
        iteration: shown iteration; None for a run without iterations.
        iterations_planned: number in the configuration; None without a readable one.
        hacking: whether the reward is hacked as far as the evaluations show, with the reasons.
        warnings: damaged and missing files, as sentences.
        quarantined: place and reason of damaged and replaced files in `quarantine/`.
    """

    iteration: int | None
    iterations_planned: int | None
    finished: bool
    hacking: Verdict
    warnings: list[str]
    quarantined: list[dict[str, str]]
    html: str | None


@dataclass(frozen=True)
class Inspection:
    """What is shown of a run: its view, samples, and warnings of damaged and missing files."""

    run: RunView
    samples: PageSamples
    warnings: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        """Whether the reward is hacked, as far as the evaluations show."""
        return hacking_verdict(self.run)

    def summary(self, html: Path | None) -> InspectSummary:
        """Return what `--json` prints, with the path of the page."""
        run = self.run
        return InspectSummary(
            **summary_of(run).model_dump(),
            iteration=run.shown.iteration if run.shown else None,
            iterations_planned=run.planned,
            finished=run.finished,
            hacking=self.verdict,
            warnings=list(self.warnings),
            quarantined=[{"place": each.place, "reason": each.reason} for each in run.moved],
            html=str(html) if html else None,
        )

    def report(self, html: Path | None) -> Report:
        """Return how far the run is, its rewards, its time by stage, and where it and its page are."""
        run, verdict = self.run, self.verdict
        report = run_report(run, verdict, self.warnings)
        shares = ", ".join(f"{stage} {share:.0%}" for stage, _, share in stage_shares(run))
        facts = [
            *report.facts,
            *([("time by stage", shares)] if shares else []),
            *([("started", str(run.starts[0]))] if run.starts else []),
            ("stored in", relative(run.folder)),
        ]
        notes = [f"page written to {html}"] if html else []
        return replace(report, facts=facts, notes=notes)


def inspect_run(name: str, *, root: str, iteration: int | None = None, html: Path | None = None) -> Inspection:
    """Read a run without changing it, and write its page.

    Args:
        name: a run under the root, or the path of its folder.
        iteration: iteration to show; None for the last one whose samples have rewards.

    Raises:
        InputError: there is no such run or iteration, or the page cannot be written there.
    """
    if html is not None:
        require_page_path(html)
    reader = RunReader(find_run(name, root))
    require_iteration(reader, iteration)
    inspection = read_inspection(reader, iteration, with_page=html is not None)
    if html is not None:
        write_page(html, render_run_page(inspection.run, inspection.samples, inspection.verdict, inspection.warnings))
    return inspection


def require_iteration(reader: RunReader, iteration: int | None) -> None:
    """Raise InputError if a run has no such iteration; None stands for its last one."""
    if iteration is not None and iteration not in (known := reader.iterations()):
        raise InputError("--iteration", iteration, f"The run has iterations {spans(known)}. Choose one of these.")


def read_inspection(reader: RunReader, iteration: int | None = None, *, with_page: bool) -> Inspection:
    """Read what is shown of a run, with `with_page` also what only a page shows; the reader's memory is used."""
    run = read_run(reader, iteration)
    images_of = reader.memory.recall("images of prompts", lambda: PromptImages(LARGE, reader.store))
    with scratch_folder() as fetched:
        groups = read_groups(reader, run.shown.stages if run.shown else {}, fetched, images_of, limit=MAX_GROUPS)
        heldout = read_heldout(reader, run, fetched, images_of, limit=MAX_GROUPS)
        samples = PageSamples(groups, heldout)
        if with_page:
            excerpts = read_excerpts(reader, run, fetched, images_of)
            samples = replace(samples, rewards=read_rewards(reader, run, fetched), excerpts=excerpts)
    # Damage is found while samples are read, too.
    run = replace(run, damages=tuple(reader.damages))
    return Inspection(run, samples, tuple(_warnings(reader, run, images_of)))


def _warnings(reader: RunReader, run: RunView, images_of: PromptImages) -> Iterator[str]:
    yield from _pruned(reader, run)
    for damage in run.damages:
        yield f"{damage.place}: {damage.reason}"
    if run.damages:
        yield "damaged files are left where they are and not shown; the next start makes the files of a stage again"
    yield from images_of.warnings()


def _pruned(reader: RunReader, run: RunView) -> Iterator[str]:
    """Name the images among those shown that `grpo prune` removed."""
    shown = [(f"iteration {run.shown.iteration}", run.shown.stages)] if run.shown else []
    if len(run.evaluated) > 1:
        ends = (run.evaluated[0], run.evaluated[-1])
        shown += [(f"the evaluation of policy {each.version}", each.stages) for each in ends]
    for name, stages in shown:
        found = [reader.pruned.get(each.folder) for each in stages.get(ROLLOUTS, ())]
        pruned = [each for each in found if each is not None and IMAGES_REMOVED in removed_by(each)]
        if pruned:
            by, on = pruned[0].get("by", "grpo prune"), pruned[0].get("on", "an unknown day")
            yield f"{name}: its images were removed on {on} by `{by}`; everything else is stored"
