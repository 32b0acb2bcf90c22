"""The analysis of rewards for people: what stands out, its report, and its page."""

from collections.abc import Iterator, Sequence

import polars as pl

from tasks.reports.curves import Curve, bar_plot, line_plot
from tasks.reports.report import Cells, Notice, Report, Table, render
from tasks.reports.statistics import Statistics, histogram_of, rounded
from tasks.reports.text import correlation, counted, number, percent, significant
from tasks.runs.run_view import RunView

MANY_FLAT_GROUPS = 0.5  # share of groups without spread, from which nothing is learned
SATURATED = 0.5  # share of values at the floor or the ceiling
MANY_FAILURES = 0.01  # share of samples
NOISY = 0.2  # mean difference between two scorings over the spread within groups: a fifth of what siblings differ by
WEAK_SIGNAL = 0.1  # spread within groups over that of all values; below it the prompt decides the reward

NEARLY_THE_SAME, AGAINST = 0.95, -0.3
"""Rank correlation within groups, beyond which two rewards measure the same, or oppose each other."""


def findings(analysis: Statistics) -> list[tuple[str, str]]:
    """List what to check before training on the rewards: of each reward in order, then of pairs, with the number."""
    alone = [(reward["label"], text) for reward in analysis["rewards"] for text in _findings_of(reward)]
    return [*alone, *_findings_of_pairs(analysis)]


def _findings_of(reward: Statistics) -> Iterator[str]:
    spread, saturation, noise = reward["spread"], reward["saturation"], reward["noise"]
    if reward["failures"] > MANY_FAILURES * spread["samples"]:
        reasons = "; ".join(f"{reason} ({count:,})" for reason, count in reward["failure_reasons"].items())
        share = percent(reward["failures"] / spread["samples"])
        yield f"failed for {counted(reward['failures'], 'sample')} ({share}): {reasons}"
    if saturation is None:
        yield "has no value for any sample: nothing is learned from it"
        return
    if (flat := spread["groups_without_spread"]) is not None and flat >= MANY_FLAT_GROUPS:
        yield f"is the same for all siblings in {percent(flat)} of the groups: nothing is learned from these"
    for bound, at_bound in (("floor, 0", saturation["at_floor"]), ("ceiling, 1", saturation["at_ceiling"])):
        if at_bound >= SATURATED:
            yield f"is at the {bound}, for {percent(at_bound)} of the samples"
    if (signal := reward["signal_ratio"]) is not None and 0 < signal < WEAK_SIGNAL:
        yield f"distinguishes prompts, not samples: spread within groups is {signal:.3f} of the total"
    if noise is not None and noise["one_sided"]:
        yield f"gave a value in only one of two scorings for {counted(noise['one_sided'], 'sample')}"
    if (share := reward["noise_to_spread"]) is not None and share >= NOISY:
        mean = significant(noise["mean_difference"])
        yield f"is noisy: two scorings differ by {mean} on average, {percent(share)} of the spread within groups"


def _findings_of_pairs(analysis: Statistics) -> Iterator[tuple[str, str]]:
    for pair in analysis["agreements"]:
        rho, subject = pair["ranks"]["within_groups"], f"{pair['first']} and {pair['second']}"
        if rho is not None and rho >= NEARLY_THE_SAME:
            yield subject, f"order siblings nearly alike (rank correlation {rho:.2f}): one counts twice"
        if rho is not None and rho <= AGAINST:
            yield subject, f"oppose each other within groups (rank correlation {rho:.2f})"


def reward_rows(analysis: Statistics) -> Iterator[Cells]:
    """List the rewards with their cells by heading."""
    for reward in analysis["rewards"]:
        spread, edges, signal = reward["spread"], reward["saturation"], number(reward["signal_ratio"], 2)
        yield {
            "reward": reward["label"],
            "mean ± std": _cell(" ± ", reward["values"] and spread, "mean", "std"),
            "minimum | median | maximum": _cell(" | ", reward["values"], "minimum", "median", "maximum"),
            "at 0 | at 1 | at highest": " | ".join(map(percent, edges.values())) if edges else "none",
            "no value | failed": f"{percent(spread['null_share'])} | {reward['failures']:,}",
            "groups without spread": percent(spread["groups_without_spread"]),
            "spread in groups | of total": f"{significant(spread['within_groups'])} | {signal}",
            "noise, mean | maximum": _cell(" | ", reward["noise"], "mean_difference", "max_difference", none="unknown"),
            "seconds, mean | p95": _cell(" | ", reward["cost"], "mean", "p95"),
        }


def _cell(separator: str, values: Statistics | None, *names: str, none: str = "none") -> str:
    return separator.join(significant(values[name]) for name in names) if values else none


def agreement_rows(analysis: Statistics) -> Iterator[Cells]:
    """List pairs of rewards: the most related within groups first, those that are not comparable last."""

    def strength(pair: Statistics) -> float:
        within = pair["ranks"]["within_groups"]
        return 1.0 if within is None else -abs(within)

    for pair in sorted(analysis["agreements"], key=strength):
        yield {
            "rewards": f"{pair['first']}, {pair['second']}",
            "rank correlation": correlation(pair["ranks"]["overall"]),
            "within groups": correlation(pair["ranks"]["within_groups"]),
            "same side of the group's mean": percent(pair["same_sign"]),
            "samples": f"{pair['ranks']['pairs']:,}",
        }


def analysis_report(analysis: Statistics, title: str, signs: Sequence[str]) -> Report:
    """Return what stands out, the metrics of each reward, how far they agree, and signs of reward hacking."""
    size = f"{counted(analysis['samples'], 'sample')} in {counted(analysis['groups'], 'group')}"
    repeated = any(reward["noise"] for reward in analysis["rewards"])
    noise = "Noise is the difference between two scorings of the same sample."
    meaning = (
        "Spread in groups is the mean over groups of the standard deviation among siblings, and its share of the "
        "standard deviation of all values: near 0 a reward distinguishes prompts, but not their samples. "
        f"{noise if repeated else 'Nothing was scored twice, so noise is not known.'}"
    )
    agreement = (
        "Spearman's rank correlation over all samples, and its mean over groups; of the samples that lie off their "
        "group's mean by both rewards, the share that lies on the same side."
    )
    return Report(
        title,
        tables=[
            Table(f"Rewards, {size}", list(reward_rows(analysis)), meaning=meaning),
            Table("Agreement between rewards", list(agreement_rows(analysis)), meaning=agreement),
        ],
        notices=[
            Notice("check before training on these", [" ".join(finding) for finding in findings(analysis)]),
            Notice("signs of reward hacking", signs),
        ],
    )


def render_reward_page(report: Report, analysis: Statistics, scores: pl.DataFrame, run: RunView) -> str:
    """Write the page of an analysis of these scores, with the guardrails of their run."""
    means = {reward["label"]: _means(reward) for reward in analysis["rewards"]}
    curves = [
        Curve(f"{label}: mean", "of this reward alone", {label: points}, legend=False)
        for label, points in means.items()
    ]
    if run.guardrail_series:
        meaning = "mean over the held-out samples, never trained on; one that falls while the reward rises is a warning"
        heldout = {"held-out reward": run.heldout_series()}
        curves += [
            Curve("Held-out reward", "of the run", heldout, legend=False),
            Curve("Guardrails", meaning, run.guardrail_series),
        ]
    plots = [line_plot(each, width=460, height=200) for each in curves]
    histograms = {
        label: histogram_of(rounded(scores.filter(pl.col("label") == label), ["value"])["value"]) for label in means
    }
    return render(
        "rewards.html.jinja",
        title=report.title,
        subtitle=", ".join(analysis["runs"]),
        summary=report,
        distributions={
            label: bar_plot(histogram, "value") for label, histogram in histograms.items() if histogram is not None
        },
        plots=[plot for plot in plots if plot],
    )


def _means(reward: Statistics) -> list[tuple[float, float]]:
    """Return the mean of a reward by iteration; none with fewer than two."""
    points = [(float(each["iteration"]), each["mean"]) for each in reward["trend"] if each["mean"] is not None]
    return points if len(points) > 1 else []
