"""The page of a rescoring: the comparison as one HTML file, with the samples whose rank moved most."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl
from PIL import Image

from tasks.reports.pages import render
from tasks.reports.rescoring import (
    AFTER,
    BEFORE,
    HEADINGS,
    REWARDS,
    RescoringComparison,
    advantage_rows,
    labels,
    reward_rows,
)
from tasks.reports.statistics import finite
from tasks.reports.text import counted

Outputs = Mapping[tuple[str, str], Image.Image | str]
"""Images, or complete texts, by run and sample id."""


@dataclass(frozen=True)
class MovedSample:
    """One sample whose rank moved, as the page shows it.

    Attributes:
        row: row of :func:`tasks.reports.rescoring.moved_most`.
        output: image or text of the sample; None where none was read.
        breakdown: label, value before and value after; None where it has none, or the reward is not on that side.
    """

    row: Mapping[str, Any]
    output: Image.Image | str | None
    breakdown: tuple[tuple[str, float | None, float | None], ...]


def render_rescoring_page(
    comparison: RescoringComparison, samples: pl.DataFrame, moved: pl.DataFrame, outputs: Outputs, title: str
) -> str:
    """Write the page of a rescoring.

    Args:
        comparison: comparison of all samples.
        samples: the compared samples.
        moved: the samples whose rank moved most, in the order to be shown.
        outputs: outputs of these samples; others are ignored, and the page says which are missing.
        title: title of the page.
    """
    # Matplotlib takes a second to import.
    from tasks.reports.rescoring_plots import plot_joint, plot_rewards

    runs = ", ".join(comparison.runs) if len(comparison.runs) <= 3 else f"{len(comparison.runs)} runs"
    before, after = (column.to_numpy() for column in finite(samples, REWARDS).select(REWARDS).drop_nulls())
    return render(
        "rescoring.html.jinja",
        title=title,
        comparison=comparison,
        subtitle=f"{counted(comparison.samples, 'sample')} in {counted(comparison.groups, 'group')} of {runs}",
        headings=HEADINGS,
        rewards=list(reward_rows(comparison)),
        advantages=list(advantage_rows(comparison.advantages)),
        joint=plot_joint(before, after),
        previous=plot_rewards(before, "previous reward", series=0),
        later=plot_rewards(after, "later reward", series=1),
        moved=list(_moved(moved, outputs)),
        several_runs=len(comparison.runs) > 1,
        several_datasets=moved["dataset"].n_unique() > 1,
    )


def _moved(moved: pl.DataFrame, outputs: Outputs) -> Iterator[MovedSample]:
    named = dict.fromkeys([*labels(moved, AFTER), *labels(moved, BEFORE)])
    for row in moved.iter_rows(named=True):
        breakdown = tuple((label, row.get(BEFORE + label), row.get(AFTER + label)) for label in named)
        yield MovedSample(row, outputs.get((row["run"], row["sample_id"])), breakdown)
