"""Compare runs by what they stored: find them, refuse what cannot be compared at all, write the page."""

import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from grpo_core.errors import InputError, raise_all
from tasks.reports.compare_page import render_compare_page
from tasks.reports.comparison import Comparison, compare_runs
from tasks.reports.groups import MEDIUM
from tasks.reports.images import TargetReader
from tasks.reports.pages import require_page_path, write_page
from tasks.runs.lookup import find_run
from tasks.runs.reader import RunReader
from tasks.runs.run_view import RunSummary, summary_of
from tasks.storage.artifacts.store import ArtifactStore

_VERSIONED = re.compile(r"(.+)@([0-9]+)")


class ComparedSummary(RunSummary):
    """A run of a comparison.

    Attributes:
        label: name of the run in the comparison.
        policy: policy version whose held-out samples are compared; None without any.
    """

    label: str
    policy: int | None


class DifferenceSummary(BaseModel):
    """A score of a run compared with that of the first run, on the held-out prompts of both.

    Attributes:
        run: label of the run.
        score: name of the score in the first run.
        prompts: number of prompts, which are the unit of the confidence interval.
        samples: samples that were compared, in each run, or in both together where seeds differ.
        same_seeds: whether all samples of both runs have the same seeds.
        first: mean in the first run.
        second: mean in this run.
        difference: second minus first.
        low: lower end of its 95 % confidence interval; None with fewer than two prompts.
        high: upper end.
        higher: prompts that score higher in this run.
        lower: prompts that score lower in this run.
    """

    run: str
    score: str
    prompts: int
    samples: int
    same_seeds: bool
    first: float
    second: float
    difference: float
    low: float | None
    high: float | None
    higher: int
    lower: int


class CompareSummary(BaseModel):
    """What `--json` prints.

    Attributes:
        runs: in the order in which they were named; the others are compared with the first.
        settings: value by run of each setting that is not the same in all, by its path; None where unset.
        differences: each run's scores compared with those of the first.
        omissions: what is not compared and why, as sentences.
        warnings: damaged and missing files, as sentences.
        html: path of the page; None where none was requested.
    """

    runs: list[ComparedSummary]
    settings: dict[str, list[str | None]]
    differences: list[DifferenceSummary]
    omissions: list[str]
    warnings: list[str]
    html: str | None


@dataclass(frozen=True)
class ComparedRuns:
    """A comparison, and the damaged and missing files that were found, as sentences."""

    comparison: Comparison
    warnings: tuple[str, ...]

    def summary(self, html: Path | None) -> CompareSummary:
        """Return what `--json` prints, with the path of the page."""
        found = self.comparison
        return CompareSummary(
            runs=[
                ComparedSummary(**summary_of(run.view).model_dump(), label=run.label, policy=found.versions[run.label])
                for run in found.runs
            ],
            settings={path: list(values) for path, values in found.settings.items()},
            differences=[
                DifferenceSummary(
                    run=pairing.label,
                    score=score,
                    same_seeds=pairing.same_seeds,
                    prompts=each.prompts,
                    # Differences of single prompts are left out.
                    **vars(each),
                )
                for pairing in found.pairings
                for score, each in pairing.differences.items()
            ],
            omissions=list(found.omissions),
            warnings=list(self.warnings),
            html=str(html) if html else None,
        )


def compare(names: Sequence[str], *, root: str, html: Path | None = None) -> ComparedRuns:
    """Read runs without changing them, compare them with the first, and write the page.

    Args:
        names: at least two runs under the root, or paths of their folders; RUN@N for policy version N of a run.
        root: a folder or any fsspec URL.
        html: file for the page; None for no page.

    Raises:
        InputError: fewer than two runs, one that does not exist, one that is named twice, a version that
            was not evaluated, or the page cannot be written there.
    """
    if html is not None:
        require_page_path(html)
    readers, versions = _readers(names, root)
    targets = TargetReader(MEDIUM)
    with tempfile.TemporaryDirectory() as fetched:
        comparison = compare_runs(readers, Path(fetched), targets, versions)
    damages = [f"{label}: {each.place}: {each.reason}" for label, reader in readers.items() for each in reader.damages]
    missing = [f"the target image {uri} cannot be shown: {reason}" for uri, reason in targets.missing.items()]
    found = ComparedRuns(comparison, (*damages, *missing[:1]))
    if html is not None:
        write_page(html, render_compare_page(comparison, found.warnings))
    return found


def _readers(names: Sequence[str], root: str) -> tuple[dict[str, RunReader], dict[str, int]]:
    """Find the runs, by a label for each, and the policy versions that are named."""
    if len(names) < 2:
        hint = (
            "Name at least two runs, or two versions of one as RUN@N; the others are compared with the first. "
            "`grpo inspect` shows one run."
        )
        raise InputError("RUN", ", ".join(names) or None, hint)
    found: list[tuple[str, ArtifactStore, int | None]] = []
    problems = []
    for name in names:
        versioned = _VERSIONED.fullmatch(name)
        try:
            store = find_run(versioned[1] if versioned else name, root)
        except InputError as error:
            problems.append(error)
            continue
        version = int(versioned[2]) if versioned else None
        if any((store.path(), version) == (each.path(), other) for _, each, other in found):
            problems.append(InputError("RUN", name, "This run is named twice; name each run once."))
        found.append((name, store, version))
    raise_all(problems)
    folders = Counter(run for run, _ in {(store.run, store.path()) for _, store, _ in found})
    readers, versions = {}, {}
    for name, store, version in found:
        label = store.run if version is None else f"{store.run}@{version}"
        # Runs of one name in different folders go by what was typed.
        label = label if folders[store.run] == 1 else name
        readers[label] = RunReader(store)
        if version is not None:
            versions[label] = version
    return readers, versions
