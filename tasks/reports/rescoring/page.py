"""The comparison as one HTML file: images embedded, no script, and nothing is asked of any server."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl
from PIL import Image

from tasks.reports.layout import counted, render
from tasks.reports.rescoring.compare import AFTER, BEFORE, labels
from tasks.reports.rescoring.drawings import histogram, scatter
from tasks.reports.rescoring.records import RescoringComparison
from tasks.reports.rescoring.table import HEADINGS, advantage_rows, reward_rows

Outputs = Mapping[tuple[str, str], Image.Image | str]
"""Images, or whole texts, by run and sample id."""


@dataclass(frozen=True)
class MovedSample:
    """One sample whose rank moved, as the page shows it.

    Attributes:
        row: its row of :func:`moved_most`.
        output: its image or text; None where none was read.
        breakdown: label, value before and value after; None where it has none, or the reward is not on that side.
    """

    row: Mapping[str, Any]
    output: Image.Image | str | None
    breakdown: tuple[tuple[str, float | None, float | None], ...]


def rescoring_page(comparison: RescoringComparison, moved: pl.DataFrame, outputs: Outputs, title: str) -> str:
    """The whole page.

    Args:
        comparison: of all samples.
        moved: those whose rank moved most, in the order to be shown.
        outputs: of these; others are not looked at, and one that is missing is said to be.
        title: in plain words.
    """
    return render(
        "rescoring/page.html.jinja",
        title=title,
        comparison=comparison,
        told=f"{counted(comparison.samples, 'sample')} in {counted(comparison.groups, 'group')} of {_runs(comparison)}",
        headings=HEADINGS,
        rewards=list(reward_rows(comparison)),
        advantages=list(advantage_rows(comparison.advantages)),
        drawings=[scatter(comparison.joint), *(histogram(comparison.joint, side) for side in (0, 1))],
        moved=list(_moved(moved, outputs)),
        several_runs=len(comparison.runs) > 1,
        several_datasets=moved["dataset"].n_unique() > 1,
    )


def _runs(comparison: RescoringComparison) -> str:
    if len(comparison.runs) <= 3:
        return ", ".join(comparison.runs)
    return f"{len(comparison.runs)} runs"


def _moved(moved: pl.DataFrame, outputs: Outputs) -> Iterator[MovedSample]:
    named = list(dict.fromkeys([*labels(moved, AFTER), *labels(moved, BEFORE)]))
    for row in moved.iter_rows(named=True):
        breakdown = tuple((label, row.get(BEFORE + label), row.get(AFTER + label)) for label in named)
        yield MovedSample(row, outputs.get((row["run"], row["sample_id"])), breakdown)
