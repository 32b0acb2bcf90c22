"""What `grpo inspect` shows: a run found, an iteration chosen, its figures, samples and page. Nothing is changed."""

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import fsspec

from flows.newer_runs import refuse_newer
from flows.run_figures import RunFigures
from grpo_core.errors import InputError
from tasks.figure_names import SIGNS_FILE
from tasks.input_files import nearest_names
from tasks.reports.artifact_reader import ArtifactReader
from tasks.reports.group_records import Groups
from tasks.reports.group_view import LARGE, read_groups
from tasks.reports.page import Heldout, pair_heldout, render_page
from tasks.reports.run_records import RunView
from tasks.reports.run_view import is_run, iteration_numbers, read_run
from tasks.reports.target_reader import TargetReader
from tasks.storage.failures import remote_failures_told
from tasks.storage.files import write_whole
from tasks.storage.store import ArtifactStore

MOST_GROUPS = 60
"""Groups with all their samples in a page; an iteration may have thousands."""


class InspectSummary(RunFigures):
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
        groups = read_groups(reader, stages, Path(fetched), targets, limit=MOST_GROUPS)
        heldout = _read_heldout(reader, run, Path(fetched), targets)
    inspection = Inspection(run, groups, heldout, tuple(_warnings(reader, run, targets)))
    if html is not None:
        page = render_page(run, groups, heldout, inspection.warnings, heading(inspection.summary(html)))
        write_page(html, page)
    return inspection


def write_page(place: Path, page: str) -> None:
    """Write a page, whole or not at all."""
    place = place.expanduser().absolute()
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".grpo-") as scratch:
        write_whole(fsspec.filesystem("file"), str(place), page.encode(), scratch=Path(scratch))


def require_page_place(html: Path) -> None:
    """Raise InputError unless a page can be written to this file."""
    folder = html.expanduser().absolute().parent
    if html.suffix.lower() not in (".html", ".htm"):
        raise InputError("--html", str(html), "Name a file that ends in .html.")
    if html.expanduser().is_dir():
        raise InputError("--html", str(html), "This is a folder. Name a file in it.")
    if not folder.is_dir():
        raise InputError("--html", str(html), f"There is no folder {folder}. Make it, or name another file.")
    if not os.access(folder, os.W_OK):
        raise InputError("--html", str(html), f"{folder} cannot be written. Name a file somewhere else.")


def find_run(name: str, root: str) -> ArtifactStore:
    """The run of this name under the root, or in the folder of this path.

    Raises:
        InputError: there is none, with the nearest names; or the folder is no run.
    """
    if not name.strip():
        raise InputError("RUN", name, "Name a run, or the path of its folder.")
    found = next((store for store in _places(name, root) if _is_folder(store)), None)
    if found is None:
        raise InputError("RUN", name, _which_runs(name, root))
    if not is_run(ArtifactReader(found)):
        reason = f"The folder {found.path()} is no run: it holds neither run.json nor an iteration."
        raise InputError("RUN", name, f"{reason} {_which_runs(name, root)}")
    refuse_newer(found)
    return found


def _is_folder(store: ArtifactStore) -> bool:
    with remote_failures_told(store.filesystem, store.root):
        return bool(store.filesystem.isdir(store.path()))


def _places(name: str, root: str) -> Iterator[ArtifactStore]:
    if "/" not in name and name not in (".", "..", "~"):
        yield _store(root, name, "--root")
    if "://" in name:
        parent, _, last = name.rstrip("/").rpartition("/")
        yield _store(parent, last, "RUN")
    else:
        path = Path(os.path.abspath(Path(name).expanduser()))
        yield _store(str(path.parent), path.name, "RUN")


def _store(root: str, run: str, place: str) -> ArtifactStore:
    try:
        return ArtifactStore(root, run)
    except InputError as error:
        # Its value is the root without the credentials that it may hold.
        raise InputError(place, error.value, error.mend) from error


def _which_runs(name: str, root: str) -> str:
    store = _store(root, "", "--root")
    if not store.filesystem.isdir(store.root):
        return f"There is no folder {root} either; name the storage root with --root, or the path of the run's folder."
    runs = [held for held in ArtifactReader(store).names() if is_run(ArtifactReader(_store(root, held, "--root")))]
    if not runs:
        return f"{root} holds no runs; name the storage root with --root, or the path of the run's folder."
    return f"Runs in {root}: {nearest_names(name.rstrip('/').rsplit('/', 1)[-1], runs)}."


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
    before = read_groups(reader, first.stages, fetched, targets, limit=MOST_GROUPS)
    after = read_groups(reader, last.stages, fetched, targets, limit=MOST_GROUPS)
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
            f"{count} target picture{'s' if count > 1 else ''} cannot be shown, the first {uri}: {reason} "
            "Relative paths are read from the folder that `grpo` is started in"
        )


def _pruned(reader: ArtifactReader, run: RunView) -> Iterator[str]:
    """Of what is shown, the pictures that were taken away on purpose."""
    ends = run.evaluated[:1] + run.evaluated[-1:] if len(run.evaluated) > 1 else ()
    shown = [*((f"iteration {run.shown.iteration}", run.shown.stages) for _ in range(1) if run.shown)]
    shown += [(f"the evaluation of policy {each.version}", each.stages) for each in ends]
    for name, stages in shown:
        told = [reader.pruned[each.folder] for each in stages.get("rollouts", ()) if each.folder in reader.pruned]
        if told:
            by, on = told[0].get("by", "grpo prune"), told[0].get("on", "a day that nothing says")
            yield f"{name}: its pictures were removed on {on} by `{by}`; everything else of it is there"


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
