"""Analyse rewards from stored scores: spread, saturation, noise, cost, agreement.

For people: what stands out, a report, and a page.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence

import polars as pl

from tasks.reports.curves import Curve, bar_plot, line_plot
from tasks.reports.report import Cells, Notice, Report, Table, render
from tasks.reports.statistics import (
    GROUP,
    SAMPLE,
    Statistics,
    finite,
    histogram_of,
    number_or_none,
    quantiles_of,
    rank_agreement,
    rounded,
    spread_of,
    with_groups,
)
from tasks.reports.text import correlation, counted, number, percent, significant
from tasks.runs.run_view import RunView

NUMBERS = ("value", "raw", "seconds")
COLUMNS = (*GROUP, "sample_id", "dataset", "label", *NUMBERS, "failure")

EDGE = 1e-6  # a value within this distance of a bound, or of the highest one, is at it

MAX_REASONS = 5


def analyse(scores: pl.DataFrame, repeats: pl.DataFrame | None = None) -> Statistics:
    """Analyse each reward, and each pair of them; ValueError without a score.

    `scores` has a row per sample and reward, with the columns run, iteration, group_id, sample_id, dataset, label,
    value, raw, seconds and failure, null where nothing failed; `repeats` has some of the same samples scored a second
    time. Values that are null or not finite count as missing.
    """
    frame = _prepare(scores)
    if frame.is_empty():
        raise ValueError("scores are empty: there is nothing to analyse")
    again = None if repeats is None else _prepare(repeats)
    labels = list(frame["label"].unique(maintain_order=True))
    # Columns have numbers, because a label may be any text.
    columns = {label: f"reward_{index}" for index, label in enumerate(labels)}
    numbered = frame.with_columns(pl.col("label").replace_strict(columns, return_dtype=pl.String))
    wide = numbered.pivot(on="label", index=[*SAMPLE, "group"], values="value")
    return {
        "runs": sorted(frame["run"].unique()),
        "samples": frame.select(SAMPLE).n_unique(),
        "groups": frame["group"].n_unique(),
        "rewards": [_analyse_reward(label, frame.filter(pl.col("label") == label), again) for label in labels],
        "agreements": [_agreement(wide, columns, first, second) for first, second in itertools.combinations(labels, 2)],
    }


def _prepare(scores: pl.DataFrame) -> pl.DataFrame:
    """Round the numbers of each reward, and keep each value to the last bit in the column `exact`."""
    assert scores.select(*SAMPLE, "label").is_unique().all(), "a sample has one score by each reward"
    frame = finite(scores.select(*COLUMNS, exact="value").with_columns(pl.col("failure").cast(pl.String)), ["exact"])
    parts = [rounded(part, NUMBERS) for part in frame.partition_by("label", maintain_order=True)]
    return with_groups(pl.concat(parts) if parts else rounded(frame, NUMBERS))


def _analyse_reward(label: str, frame: pl.DataFrame, again: pl.DataFrame | None) -> Statistics:
    spread, noise = spread_of(frame, "value"), None
    if again is not None:
        second = again.filter(pl.col("label") == label).select(*SAMPLE, again="exact")
        noise = _noise(frame.select(*SAMPLE, value="exact").join(second, on=SAMPLE, how="inner"))
    failed = frame.drop_nulls("failure")
    reasons = failed.group_by("failure").len().sort(["len", "failure"], descending=[True, False]).head(MAX_REASONS)
    trend = frame.group_by("iteration").agg(mean=pl.col("value").mean(), values=pl.col("value").count())
    return {
        "label": label,
        "spread": spread,
        # Numbers of samples without a value: it does not apply to them, or failed for them.
        "not_applicable": spread["samples"] - spread["values"] - failed["value"].null_count(),
        "failures": failed.height,
        "failure_reasons": dict(reasons.iter_rows()),
        "values": quantiles_of(frame["value"]),
        "raw": quantiles_of(frame["raw"]),
        "saturation": _saturation(frame["value"].drop_nulls()),
        # Near 0 it distinguishes prompts, but not their samples.
        "signal_ratio": _ratio(spread["within_groups"], spread["std"]),
        "noise": noise,  # None where nothing was scored twice
        "noise_to_spread": _ratio(noise["mean_difference"] if noise else None, spread["within_groups"]),
        "cost": _cost(frame["seconds"].drop_nulls()),
        "trend": trend.sort("iteration").to_dicts(),
    }


def _noise(pairs: pl.DataFrame) -> Statistics | None:
    """Compare the columns `value` and `again`, to the last bit; None where no sample has either."""
    both = pairs.drop_nulls(["value", "again"])
    difference = (both["value"] - both["again"]).abs()
    one_sided = pairs.filter(pl.col("value").is_null() != pl.col("again").is_null()).height
    if not both.height and not one_sided:
        return None
    return {
        "pairs": both.height,
        "mean_difference": number_or_none(difference.mean()),
        "max_difference": number_or_none(difference.max()),
        "share_differing": number_or_none((difference > 0).mean()),
        "one_sided": one_sided,
    }


def _saturation(values: pl.Series) -> Statistics | None:
    highest = number_or_none(values.max())
    if highest is None:
        return None
    bounds = {"at_floor": 0.0, "at_ceiling": 1.0, "at_highest": highest}
    return {name: float(((values - bound).abs() <= EDGE).sum()) / len(values) for name, bound in bounds.items()}


def _cost(seconds: pl.Series) -> Statistics | None:
    found = quantiles_of(seconds)
    if found is None:
        return None
    return {
        "total": float(seconds.sum()),
        "mean": number_or_none(seconds.mean()),
        "median": found["median"],
        "p95": found["p95"],
    }


def _ratio(part: float | None, total: float | None) -> float | None:
    return None if part is None or not total else part / total


def _agreement(wide: pl.DataFrame, columns: Mapping[str, str], first: str, second: str) -> Statistics:
    """Compare two rewards, whose rounded columns of `wide` are named by their labels, over the samples with both."""
    both = wide.select("group", first=columns[first], second=columns[second]).drop_nulls(["first", "second"])
    sides = (pl.col("first"), pl.col("second"))
    centred = both.with_columns((side - side.mean().over("group")).name.prefix("off_") for side in sides)
    if centred.height:
        centred = centred.filter(*(side.min().over("group") < side.max().over("group") for side in sides))
    centred = rounded(centred, ["off_first", "off_second"])
    off = centred.filter((pl.col("off_first") != 0) & (pl.col("off_second") != 0))
    same = off.select((pl.col("off_first").sign() == pl.col("off_second").sign()).mean()).item()
    return {
        "first": first,
        "second": second,
        "ranks": rank_agreement(wide, columns[first], columns[second]),
        "centred": off.height,  # samples that lie off their group's mean by both rewards
        "same_sign": number_or_none(same),  # share of these that lie on the same side of it
    }


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
