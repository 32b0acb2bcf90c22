"""A comparison of runs as one HTML file, and its tables for the page and the terminal."""

from collections.abc import Sequence

from tasks.reports.comparison import Comparison
from tasks.reports.pages import render
from tasks.reports.pairing import PairedDifference
from tasks.reports.samples import TRAITS, varying
from tasks.reports.text import Cells, change, counted, number
from tasks.runs.run_view import summary_of


def run_rows(comparison: Comparison) -> list[Cells]:
    """List what identifies each run, and how far it came."""
    rows, dated = [], any(run.view.starts for run in comparison.runs)
    for run in comparison.runs:
        summary, version = summary_of(run.view), comparison.versions[run.label]
        rows.append(
            {
                "run": run.label,
                "reward, first to last": change(summary.reward_first, summary.reward_last),
                "held-out, before to after": change(summary.heldout_before, summary.heldout_after),
                "policy compared": "none" if version is None else f"{version} of {summary.iterations}",
                "seconds": f"{summary.seconds['total']:.0f}",
                **({"started": str(run.view.starts[0]) if run.view.starts else "unknown"} if dated else {}),
            }
        )
    return rows


def difference_rows(comparison: Comparison) -> list[tuple[str, str, PairedDifference]]:
    """List run, score and difference, score by score."""
    scores = dict.fromkeys(score for each in comparison.pairings for score in each.differences)
    return [
        (each.label, score, each.differences[score])
        for score in scores
        for each in comparison.pairings
        if score in each.differences
    ]


def difference_cells(label: str, score: str, found: PairedDifference) -> Cells:
    """Format a difference as a row of a table."""
    known = found.low is not None and found.high is not None
    return {
        "score": score,
        "run": label,
        "difference": f"{found.difference:+.3f}",
        "95 % interval": f"{found.low:+.3f} to {found.high:+.3f}" if known else "needs two prompts",
        "first run": number(found.first),
        "this run": number(found.second),
        "prompts higher, lower": f"{found.higher}, {found.lower} of {found.prompts}",
    }


def verdict(found: PairedDifference) -> str:
    """Say in words whether the interval leaves zero out."""
    if found.low is None or found.high is None:
        return "one prompt tells nothing"
    if found.low > 0:
        return "higher"
    return "lower" if found.high < 0 else "not clear"


def interval_bar(found: PairedDifference, width: float) -> tuple[float, float, float] | None:
    """Return left end, length and centre of the interval as shares of an axis from -width to width."""
    if found.low is None or found.high is None or not width:
        return None
    low, high = ((each + width) / (2 * width) for each in (found.low, found.high))
    return low, high - low, (found.difference + width) / (2 * width)


def title_of(comparison: Comparison) -> str:
    """Name the runs."""
    first, *others = (run.label for run in comparison.runs)
    return f"{', '.join(others)} against {first}"


def render_compare_page(comparison: Comparison, warnings: Sequence[str]) -> str:
    """Write the page of a comparison."""
    # Matplotlib takes a second to import.
    from tasks.reports.plots import line_plot

    runs, rows = comparison.runs, difference_rows(comparison)
    noun = runs[0].view.noun
    width = max((abs(end) for *_, each in rows for end in (each.low, each.high) if end is not None), default=0.0)
    groups = [group for each in comparison.prompts for group in each.values()]
    plots = [line_plot(*each[:3], legend=True, width=460, height=200) for each in comparison.curves]
    return render(
        "compare.html.jinja",
        title=title_of(comparison),
        labels=[run.label for run in runs],
        comparison=comparison,
        noun=noun,
        is_text=noun == "completion",
        warnings=warnings,
        runs=run_rows(comparison),
        differences=[
            (difference_cells(label, score, each), verdict(each), interval_bar(each, width))
            for label, score, each in rows
        ],
        width=width,
        plots=[plot for plot in plots if plot],
        traits=[name for name in TRAITS if name in varying([group.samples for group in groups])],
        shown=counted(len(comparison.prompts), "prompt"),
    )
