"""Compare runs by what they stored: find them, refuse what cannot be compared at all, write the page."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel

from configs.policy_name import PolicyName
from grpo_core.errors import InputError, raise_all
from tasks.reports.compare_page import render_compare_page
from tasks.reports.compared_runs import PairedDifference
from tasks.reports.comparison import Comparison, compare_runs
from tasks.reports.report import require_page_path, write_page
from tasks.runs.lookup import find_run
from tasks.runs.reader import RunReader
from tasks.runs.run_view import Cost, RunSummary, summary_of
from tasks.runs.stored_policies import chosen_version
from tasks.storage.artifacts.store import ArtifactStore


class ComparedSummary(RunSummary):
    """A run of a comparison, with its label there and the policy version whose held-out samples are compared.

    `until_common` is what it took to the held-out reward that all runs reached; None where it means different things.
    """

    label: str
    policy: int | None
    until_common: Cost | None


class CompareSummary(BaseModel):
    """What `--json` prints.

    Attributes:
        runs: in the order in which they were named; the others are compared with the first.
        settings: value by run of each setting that is not the same in all, by its path; None where unset.
        omissions: what is not compared and why, as sentences.
        warnings: policy versions that differ though none was named, damaged and missing files, as sentences.
    """

    runs: list[ComparedSummary]
    settings: dict[str, list[str | None]]
    differences: list[PairedDifference]
    omissions: list[str]
    warnings: list[str]
    html: str | None


def compare(names: Sequence[str], *, root: str, html: Path | None = None, evaluation: str | None = None) -> Comparison:
    """Read runs without changing them, compare them with the first, and write the page.

    Args:
        names: at least two runs under the root, or paths of their folders; RUN@N or RUN@best for a policy version.
        evaluation: compare by this evaluation of other prompts, a folder of `evaluations_of/`.

    Raises:
        InputError: a run, version or evaluation is not there or named twice, or the page cannot be written.
    """
    if html is not None:
        require_page_path(html)
    comparison = compare_runs(*_readers(names, root), evaluation)
    if html is not None:
        write_page(html, render_compare_page(comparison))
    return comparison


def summarize(found: Comparison, html: Path | None) -> CompareSummary:
    """Return what `--json` prints, with the path of the page."""
    reached = found.common_reward
    return CompareSummary(
        runs=[
            ComparedSummary(
                **summary_of(run.view).model_dump(),
                label=run.label,
                policy=found.versions[run.label],
                until_common=None if reached is None else run.view.cost_until(reached),
            )
            for run in found.runs
        ],
        settings={path: list(values) for path, values in found.settings.items()},
        differences=list(found.differences),
        omissions=list(found.omissions),
        warnings=[*found.unequal_versions, *found.warnings],
        html=str(html) if html else None,
    )


def _readers(names: Sequence[str], root: str) -> tuple[dict[str, RunReader], dict[str, int]]:
    """Find the runs, by a label for each, and the policy versions that are named."""
    if len(names) < 2:
        hint = "Name at least two runs, or two versions of one as RUN@N; `grpo inspect` shows one run."
        raise InputError("RUN", ", ".join(names) or None, hint)
    found: list[tuple[str, ArtifactStore, int | None]] = []
    problems = []
    for name in names:
        named = PolicyName.parse(name)
        try:
            store = find_run(named.run, root)
            version = chosen_version(store, named.version)
        except InputError as error:
            problems.append(error)
            continue
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
