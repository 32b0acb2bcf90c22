"""The analysis as one HTML file: plots embedded, no script, and nothing is asked of any server."""

from collections.abc import Mapping

from tasks.reports.images import data_uri
from tasks.reports.layout import counted, render
from tasks.reports.rewards_analysis.findings import findings
from tasks.reports.rewards_analysis.records import RewardAnalysis
from tasks.reports.rewards_analysis.table import HEADINGS, PAIR_HEADINGS, agreement_rows, figure_rows


def analysis_page(analysis: RewardAnalysis, plots: Mapping[str, bytes], title: str) -> str:
    """The whole page.

    Args:
        analysis: of the rewards.
        plots: PNG files by name, shown in this order.
        title: in plain words.
    """
    return render(
        "rewards_analysis/page.html.jinja",
        title=title,
        told=f"{counted(len(analysis.rewards), 'reward')} over {counted(analysis.samples, 'sample')} in "
        f"{counted(analysis.groups, 'group')} of {', '.join(analysis.runs)}",
        findings=findings(analysis),
        headings=HEADINGS,
        rows=list(figure_rows(analysis)),
        pair_headings=PAIR_HEADINGS,
        pairs=list(agreement_rows(analysis)),
        plots={name.rsplit(".", 1)[0]: data_uri(content, "image/png") for name, content in plots.items()},
        repeated=any(reward.noise for reward in analysis.rewards),
    )
