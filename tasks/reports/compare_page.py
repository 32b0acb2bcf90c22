"""The report of a comparison of runs, and its page: one HTML file."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from markupsafe import Markup

from tasks.metrics import HELDOUT
from tasks.reports.compared_runs import PairedDifference
from tasks.reports.comparison import Comparison
from tasks.reports.curves import line_plot
from tasks.reports.groups import TRAITS, varying
from tasks.reports.report import Cells, Notice, Report, Table, cost_in_words, render
from tasks.reports.text import change, counted, number, one_line, reward_origin
from tasks.runs.run_view import summary_of

MAX_SETTINGS, LETTERS = 30, 160  # settings that the terminal shows, and letters of their values; the page has all


def comparison_report(comparison: Comparison, html: Path | None = None) -> Report:
    """Return the runs, their held-out differences, what is not compared and why, and where the page is."""
    first, *others = (run.label for run in comparison.runs)
    rows = [
        {**difference_cells(each, comparison.versions), "finding": finding(each)} for each in comparison.differences
    ]
    note = "" if rows else "no held-out score can be paired"
    base = with_version(first, comparison.versions)
    return Report(
        f"{', '.join(others)} against {first}",
        tables=[
            Table("", run_rows(comparison), ("started",)),
            Table(f"Held-out differences from {base}, paired by prompt", rows, ("run", "finding"), _DIFFERENCES, note),
        ],
        notices=[
            Notice("different policy versions are compared", comparison.unequal_versions),
            Notice("not everything could be read", comparison.warnings),
            Notice("not compared", comparison.omissions),
        ],
        notes=[f"page written to {html}"] if html else [],
    )


_DIFFERENCES = (
    "On the prompts that both runs have, with the samples of equal seeds where there are any. The interval covers the "
    "mean difference over such prompts in 95 % of cases; the prompt is its unit, since the samples of one prompt "
    "resemble one another. It says nothing about another training seed."
)


def settings_table(comparison: Comparison) -> Table:
    """Return the value of every run for each setting that differs."""
    labels = [run.label for run in comparison.runs]
    rows = [
        {"": path, **dict(zip(labels, ("not set" if each is None else each for each in values), strict=True))}
        for path, values in comparison.settings.items()
    ]
    meaning = "Of config.yaml and run.json; everything else is the same."
    return Table("Settings that differ", rows, labels, meaning, "" if rows else "none")


def shortened(settings: Table) -> Table:
    """Return as many settings as fit on a screen, with short values."""
    shown = settings.head(MAX_SETTINGS, "settings")
    return replace(shown, rows=[{name: one_line(cell, LETTERS) for name, cell in row.items()} for row in shown.rows])


def run_rows(comparison: Comparison) -> list[Cells]:
    """List what identifies each run, and how far it came."""
    rows, dated = [], any(run.view.starts for run in comparison.runs)
    reached = comparison.common_reward
    for run in comparison.runs:
        summary, version = summary_of(run.view), comparison.versions[run.label]
        rows.append(
            {
                "run": run.label,
                "reward, first → last iteration": change(summary.reward_first, summary.reward_last)
                + reward_origin("reward", summary.trained_on),
                "held-out reward, before → after": change(summary.heldout_before, summary.heldout_after)
                + reward_origin(HELDOUT, summary.trained_on),
                "policy compared": "none" if version is None else f"{version} of {summary.iterations}",
                **(
                    {f"until held-out {number(reached)}": cost_in_words(run.view.cost_until(reached))}
                    if reached is not None
                    else {}
                ),
                "samples per device-second": number(summary.samples_per_device_second),
                "seconds": f"{summary.seconds['total']:.0f}",
                **({"started": str(run.view.starts[0]) if run.view.starts else "unknown"} if dated else {}),
            }
        )
    return rows


def with_version(label: str, versions: Mapping[str, int | None]) -> str:
    """Say which policy version of a run is compared; a label that names it is enough."""
    version = versions.get(label)
    return label if version is None or label.endswith(f"@{version}") else f"{label} (policy {version})"


def difference_cells(found: PairedDifference, versions: Mapping[str, int | None]) -> Cells:
    """Format a difference as a row of a table."""
    known = found.low is not None and found.high is not None
    return {
        "score": found.score,
        "run": with_version(found.run, versions),
        "difference": f"{found.difference:+.3f}",
        "95 % interval": f"{found.low:+.3f} to {found.high:+.3f}" if known else "needs two prompts",
        "first run": number(found.first),
        "this run": number(found.second),
        "prompts higher, lower": f"{found.higher}, {found.lower} of {found.prompts}",
    }


def finding(found: PairedDifference) -> str:
    """Say in words whether the interval leaves zero out."""
    if found.low is None or found.high is None:
        return "one prompt tells nothing"
    if found.low > 0:
        return "higher"
    return "lower" if found.high < 0 else "not clear"


def interval_bar(found: PairedDifference, width: float) -> Markup:
    """Draw the interval, and the difference as a dot in it, on an axis from -width to width; empty without one."""
    if found.low is None or found.high is None or not width:
        return Markup("")
    low, high, centre = (50 * (1 + each / width) for each in (found.low, found.high, found.difference))
    return Markup(
        f'<span class="interval {finding(found)}"><i style="left:{low:.2f}%;width:{high - low:.2f}%"></i>'
        f'<b style="left:{centre:.2f}%"></b></span>'
    )


def render_compare_page(comparison: Comparison) -> str:
    """Write the page of a comparison."""
    runs, report = comparison.runs, comparison_report(comparison)
    noun = runs[0].view.noun
    ends = [end for each in comparison.differences for end in (each.low, each.high) if end is not None]
    width = max(map(abs, ends), default=0.0)
    by_run, differences = report.tables
    rows = [
        {**row, "the line is 0": interval_bar(each, width)}
        for row, each in zip(differences.rows, comparison.differences, strict=True)
    ]
    differences = replace(differences, rows=rows, texts=(*differences.texts, "the line is 0"))
    groups = [group for each in comparison.prompts for group in each.values()]
    plots = [line_plot(each, width=460, height=200) for each in comparison.curves]
    return render(
        "compare.html.jinja",
        title=report.title,
        labels=[run.label for run in runs],
        comparison=comparison,
        noun=noun,
        is_text=noun == "completion",
        summary=replace(report, tables=[by_run, differences, settings_table(comparison)]),
        plots=[plot for plot in plots if plot],
        traits=[name for name in TRAITS if name in varying([group.samples for group in groups])],
        shown=counted(len(comparison.prompts), "prompt"),
    )
