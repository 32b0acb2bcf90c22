"""What `grpo inspect` shows: a run found, an iteration chosen, its figures, samples and page. Nothing is changed."""

import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from flows.pipeline.run_summary import RunSummary
from grpo_core.errors import InputError
from tasks.metrics.names import SIGNS_FILE
from tasks.reports.group_records import Groups
from tasks.reports.group_view import LARGE, read_groups
from tasks.reports.page import Heldout, pair_heldout, render_page
from tasks.reports.page_file import require_page_place, write_page
from tasks.reports.run_records import RunView
from tasks.reports.run_view import read_run
from tasks.reports.target_reader import TargetReader
from tasks.runs.iterations import iteration_numbers
from tasks.runs.lookup import find_run
from tasks.storage.artifacts.reader import ArtifactReader

MAX_GROUPS = 60
"""Groups with all their samples in a page; an iteration may have thousands."""


class InspectSummary(RunSummary):
    """What `--json` prints.

    Attributes:
        iteration: the one that is shown; None for a run that has none.
        iterations_planned: by the configuration.
        finished: every planned iteration is made.
        warnings: what is damaged or missing.
        set_aside: place and reason of what was moved out of the way.
        html: the page that was written.
    """

    iteration: int | None
    iterations_planned: int | None
    finished: bool
    warnings: list[str]
    set_aside: list[dict[str, str]]
    html: str | None


@dataclass(frozen=True)
class Inspection:
    """A run as it is shown.

    Attributes:
        run: figures of all iterations.
        groups: samples of the chosen iteration.
        heldout: samples of the first and the last policy that were evaluated.
        warnings: what is damaged or missing, for people.
    """

    run: RunView
    groups: Groups
    heldout: Heldout | None
    warnings: tuple[str, ...]

    def summary(self, html: Path | None) -> InspectSummary:
        """The figures."""
        run, rewards, evaluated = self.run, self.run.series("reward"), self.run.evaluated
        return InspectSummary(
            run=run.name,
            iterations=run.policy_version,
            reward_first=rewards[0][1] if rewards else None,
            reward_last=rewards[-1][1] if rewards else None,
            heldout_before=evaluated[0].reward if evaluated else None,
            heldout_after=evaluated[-1].reward if len(evaluated) > 1 else None,
            policy_digest=run.policy_digest,
            seconds=run.seconds,
            folder=run.folder,
            iteration=run.shown.iteration if run.shown else None,
            iterations_planned=run.planned,
            finished=run.finished,
            warnings=list(self.warnings),
            set_aside=[{"place": aside.place, "reason": aside.reason} for aside in run.set_aside],
            html=str(html) if html else None,
        )


def inspect_run(name: str, *, root: str, iteration: int | None = None, html: Path | None = None) -> Inspection:
    """Read a run, and write its page where one is asked for.

    Args:
        name: a run under the root, or the path of its folder.
        root: a folder or any fsspec URL.
        iteration: to show; by default the last one whose samples have rewards.
        html: file for the page.

    Raises:
        InputError: no such run or iteration, a folder that is no run, or a page that cannot be written there.
    """
    if html is not None:
        require_page_place(html)
    reader = ArtifactReader(find_run(name, root))
    if iteration is not None and iteration not in (held := iteration_numbers(reader)):
        raise InputError("--iteration", iteration, f"{_ranges(held)}. Choose one of these.")
    run = read_run(reader, iteration)
    targets = TargetReader(LARGE)
    with tempfile.TemporaryDirectory() as fetched:
        stages = run.shown.stages if run.shown else {}
        groups = read_groups(reader, stages, Path(fetched), targets, limit=MAX_GROUPS)
        heldout = _read_heldout(reader, run, Path(fetched), targets)
    inspection = Inspection(run, groups, heldout, tuple(_warnings(reader, run, targets)))
    if html is not None:
        page = render_page(run, groups, heldout, inspection.warnings, heading(inspection.summary(html)))
        write_page(html, page)
    return inspection


def _ranges(numbers: Sequence[int]) -> str:
    """Numbers as people write them: `1 to 7, 9`."""
    if not numbers:
        return "There are no iterations yet"
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][-1] + 1:
            spans[-1][1:] = [number]
        else:
            spans.append([number])
    return "The run has " + ", ".join(" to ".join(map(str, span)) for span in spans)


def _read_heldout(reader: ArtifactReader, run: RunView, fetched: Path, targets: TargetReader) -> Heldout | None:
    """The first and the last evaluation; None where there are not two."""
    evaluated = run.evaluated
    if len(evaluated) < 2:
        return None
    first, last = evaluated[0], evaluated[-1]
    before = read_groups(reader, first.stages, fetched, targets, limit=MAX_GROUPS)
    after = read_groups(reader, last.stages, fetched, targets, limit=MAX_GROUPS)
    return pair_heldout(first.version, before, last.version, after)


def _warnings(reader: ArtifactReader, run: RunView, targets: TargetReader) -> Iterator[str]:
    yield from _signs(reader)
    yield from _pruned(reader, run)
    for damage in run.damages:
        yield f"{damage.place}: {damage.reason}"
    if run.damages:
        yield "what is damaged is left out here and left where it is; a stage's files are made again by the next start"
    if targets.missing:
        uri, reason = next(iter(targets.missing.items()))
        count = len(targets.missing)
        yield (
            f"{count} target image{'s' if count > 1 else ''} cannot be shown, the first {uri}: {reason} "
            "Relative paths are read from the folder that `grpo` is started in"
        )


def _pruned(reader: ArtifactReader, run: RunView) -> Iterator[str]:
    """Of what is shown, the images that were taken away on purpose."""
    ends = run.evaluated[:1] + run.evaluated[-1:] if len(run.evaluated) > 1 else ()
    shown = [*((f"iteration {run.shown.iteration}", run.shown.stages) for _ in range(1) if run.shown)]
    shown += [(f"the evaluation of policy {each.version}", each.stages) for each in ends]
    for name, stages in shown:
        told = [reader.pruned[each.folder] for each in stages.get("rollouts", ()) if each.folder in reader.pruned]
        if told:
            by, on = told[0].get("by", "grpo prune"), told[0].get("on", "a day that nothing says")
            yield f"{name}: its images were removed on {on} by `{by}`; everything else of it is there"


def _signs(reader: ArtifactReader) -> Iterator[str]:
    """What the watch told last."""
    content = reader.read_bytes(SIGNS_FILE)
    if content is None:
        return
    try:
        told = json.loads(content)
        for sign in told["signs"]:
            yield f"watch, policy {told['version']}: {sign}" + (" (the run was stopped)" if told["stopped"] else "")
    except (ValueError, KeyError, TypeError):
        yield f"{SIGNS_FILE}: it is damaged; the next evaluation writes it anew"


def heading(summary: InspectSummary) -> list[tuple[str, str]]:
    """Names and values that stand at the top."""
    return [
        ("reward, first to last", change(summary.reward_first, summary.reward_last)),
        ("held-out, before to after", change(summary.heldout_before, summary.heldout_after)),
        ("policy updates", f"{summary.iterations}"),
        ("seconds of all stages", f"{summary.seconds['total']:.1f}"),
        ("policy digest", (summary.policy_digest or "unknown")[:12]),
    ]


def change(first: float | None, last: float | None) -> str:
    """Two rewards and their difference."""
    if first is None:
        return "none"
    if last is None:
        return f"{first:.3f} → none yet"
    return f"{first:.3f} → {last:.3f} ({last - first:+.3f})"
