"""What changed when stored rollouts were scored again: rewards, ranks and advantages before and after, and the page."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import polars as pl
from PIL import Image

from grpo_core.rollouts.messages import shown_question
from grpo_core.rollouts.streams import STREAMS
from tasks.reports.curves import bar_plot, joint_plot
from tasks.reports.groups import read_shown_samples
from tasks.reports.report import Cells, Fact, Report, Table, render
from tasks.reports.statistics import (
    BINS,
    SAMPLE,
    Statistics,
    finite,
    number_or_none,
    rank_agreement,
    rounded,
    spread_of,
    with_groups,
)
from tasks.reports.text import correlation, counted, number, one_line, percent
from tasks.runs.layout import ADVANTAGE_COLUMN, REWARD_COLUMN, SCORES_FILE, STATES, StoredIteration
from tasks.runs.samples import join_samples, tables_of, with_advantages, with_scores
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore

BEFORE, AFTER = "before:", "after:"  # prefixes of the columns of single rewards, followed by their labels

COLUMNS = ("sample_id", "group_id", "prompt", "dataset")
TOKEN_SAMPLE = "token_sample"
REWARDS = ("reward_before", "reward_after")
ADVANTAGES = ("advantage_before", "advantage_after")
MAX_MOVED = 20
PROMPT_LETTERS = 60

Outputs = Mapping[tuple[str, str], Image.Image | str]  # images, or complete texts, by run and sample id


def read_rescored(
    store: ArtifactStore, previous: Sequence[StoredIteration], later: Sequence[StoredIteration]
) -> pl.DataFrame:
    """Read a row per sample, as :func:`compare` needs them, from the same iterations with both scorings."""
    sides = []
    with store.reading(without=(STATES,)) as read:
        for each in previous:
            pairs, rollouts = _scores(each), [part.rollouts for part in each.rounds]
            samples = join_samples(read, rollouts, pairs, [each.advantages], (*COLUMNS, TOKEN_SAMPLE))
            sides.append(samples.with_columns(iteration=each.number))
        samples = _with_token_samples_apart(pl.concat(sides, how="diagonal"))
        samples = _renamed(samples, "before", BEFORE)
        samples = with_advantages(samples, [path for each in later for path in tables_of(read(each.advantages))])
        scores: dict[str, list[Path]] = {}
        for label, reference in (pair for each in later for pair in _scores(each)):
            scores.setdefault(label, []).append(read(reference) / SCORES_FILE)
        samples = _renamed(with_scores(samples, scores), "after", AFTER)
    return samples.with_columns(run=pl.lit(store.run))


def _scores(iteration: StoredIteration) -> list[tuple[str, ArtifactRef]]:
    return [pair for part in iteration.rounds for pair in part.rewards.items()]


def _renamed(samples: pl.DataFrame, side: str, prefix: str) -> pl.DataFrame:
    """Say of reward, advantage and single rewards whose they are, and drop what is not compared."""
    samples = samples.select(pl.exclude("dropped", "streams", f"^{ADVANTAGE_COLUMN}.*$"))
    names = {name: f"{name}_{side}" for name in ("reward", "advantage")}
    rewards = [name for name in samples.columns if name.startswith(REWARD_COLUMN)]
    return samples.rename({**names, **{name: prefix + name.removeprefix(REWARD_COLUMN) for name in rewards}})


def _with_token_samples_apart(samples: pl.DataFrame) -> pl.DataFrame:
    """Give samples that have no reward of the first stream a group by their token sample."""
    streams = [stream for stream in STREAMS if ADVANTAGE_COLUMN + stream in samples.columns]
    if len(streams) < 2:
        return samples.drop(TOKEN_SAMPLE, strict=False)
    leading = pl.col("streams").list.contains(streams[0])
    own = pl.when(leading).then("group_id").otherwise(pl.format("{}, token sample {}", "group_id", TOKEN_SAMPLE))
    return samples.with_columns(group_id=own).drop(TOKEN_SAMPLE)


def read_outputs(store: ArtifactStore, iterations: Sequence[StoredIteration], samples: pl.DataFrame) -> Outputs:
    """Read images or texts of those samples that are of this run; iterations without any are not opened."""
    wanted = samples.filter(pl.col("run") == store.run)
    outputs: dict[tuple[str, str], Image.Image | str] = {}
    with store.reading(without=(STATES,)) as read:
        for each in iterations:
            names = wanted.filter(pl.col("iteration") == each.number)["sample_id"].to_list()
            if not names:
                continue
            rollouts = [part.rollouts for part in each.rounds]
            table = read_shown_samples(read, rollouts, (), (), ("sample_id", "completion"))
            if table.is_text:
                texts = {row["sample_id"]: row["completion"] for row in table.rows}
                outputs |= {(store.run, name): texts[name] for name in names}
            else:
                outputs |= {(store.run, name): image for name, image in table.images(names).items()}
    return outputs


def compare(samples: pl.DataFrame) -> Statistics:
    """Compare two scorings of the same samples; ValueError if no sample has a reward on both sides.

    The samples have a row each, with the columns run, iteration, group_id, sample_id, prompt, dataset, reward_before,
    reward_after, advantage_before, advantage_after, and `before:LABEL` and `after:LABEL` of each reward. Values that
    are null or not finite count as missing.
    """
    frame = _prepare(samples)
    before, after = _labels(frame, BEFORE), _labels(frame, AFTER)
    labels = [label for label in after if label in before]
    labels += [label for label in after if label not in before]
    labels += [label for label in before if label not in after]
    return {
        "runs": sorted(frame["run"].unique()),
        "samples": frame.height,
        "groups": frame["group"].n_unique(),
        "combined": _compare_reward(frame, "reward", *REWARDS),
        # Those of both sides first, then the added, then the removed.
        "rewards": [_compare_reward(frame, label, BEFORE + label, AFTER + label) for label in labels],
        "advantages": _compare_advantages(frame),
    }


def _prepare(samples: pl.DataFrame) -> pl.DataFrame:
    """Round the numbers of the samples, and number their groups."""
    assert samples.select(SAMPLE).is_unique().all(), "a sample is compared once"
    rewards = [column for column in samples.columns if column.startswith((BEFORE, AFTER))]
    frame = with_groups(rounded(samples, [*REWARDS, *ADVANTAGES, *rewards]))
    if frame.drop_nulls(REWARDS).is_empty():
        counts = ", ".join(f"{frame[side].count()} have a {side.replace('_', ' ')}" for side in REWARDS)
        raise ValueError(f"none of {frame.height} samples has a reward before and after ({counts}): nothing compares")
    return frame


def _labels(frame: pl.DataFrame, side: str) -> list[str]:
    return [column.removeprefix(side) for column in frame.columns if column.startswith(side)]


def _compare_reward(frame: pl.DataFrame, label: str, before: str, after: str) -> Statistics:
    """Compare one reward, or the combined one, on both sides; one of its columns may be missing."""
    known = [column for column in (before, after) if column in frame.columns]
    return {
        "label": label,
        "before": spread_of(frame, before) if before in known else None,
        "after": spread_of(frame, after) if after in known else None,
        "own": rank_agreement(frame, before, after) if len(known) == 2 else None,  # of both sides
        "with_previous": rank_agreement(frame, REWARDS[0], known[-1]),  # with the previous combined reward
    }


def _compare_advantages(frame: pl.DataFrame) -> Statistics:
    was, now = (pl.col(column) for column in ADVANTAGES)
    both = frame.drop_nulls(ADVANTAGES)
    non_zero = both.filter((was != 0) & (now != 0))
    zero = both.filter(was == 0)
    return {
        "compared": both.height,  # samples with an advantage on both sides
        "gained": frame.filter(was.is_null() & now.is_not_null()).height,
        "lost": frame.filter(was.is_not_null() & now.is_null()).height,
        "non_zero_before": _share(both, was != 0),  # shares of the compared
        "non_zero_after": _share(both, now != 0),
        "both_non_zero": non_zero.height,
        "turned": _share(non_zero, was.sign() != now.sign()),  # of those with neither side zero
        "zero_before": zero.height,
        "from_zero": _share(zero, now != 0),  # of those that were zero
        "to_zero": _share(both.filter(was != 0), now == 0),  # of those that were not
    }


def _share(frame: pl.DataFrame, condition: pl.Expr) -> float | None:
    return number_or_none(frame.select(condition.mean()).item())


def moved_most(samples: pl.DataFrame, count: int = MAX_MOVED) -> pl.DataFrame:
    """Find the samples whose rank moved furthest; fewer where fewer moved. ValueError as :func:`compare`.

    Ranks count from 1, the highest reward, among the siblings that have a reward on both sides; equal rewards share
    the mean of their ranks. Samples are ordered by the places that they moved within their group, then by the points
    that they moved among all samples, then by run and sample id. Columns are added: siblings, rank_before, rank_after,
    places (positive if it rose), percentile_before, percentile_after (100 is the highest reward of all samples, 0 the
    lowest, 50 with a single sample) and points.
    """
    rated = _prepare(samples).drop_nulls(REWARDS)
    before, after = (pl.col(side) for side in REWARDS)
    ranked = rated.with_columns(
        siblings=pl.len().over("group"),
        rank_before=before.rank(descending=True).over("group"),
        rank_after=after.rank(descending=True).over("group"),
        percentile_before=_percentile(before, rated.height),
        percentile_after=_percentile(after, rated.height),
    ).with_columns(
        places=pl.col("rank_before") - pl.col("rank_after"),
        points=pl.col("percentile_after") - pl.col("percentile_before"),
    )
    moved = ranked.filter((pl.col("places") != 0) | (pl.col("points") != 0))
    furthest = [pl.col("places").abs(), pl.col("points").abs(), pl.col("run"), pl.col("sample_id")]
    return moved.sort(furthest, descending=[True, True, False, False]).head(count).drop("group")


def _percentile(reward: pl.Expr, count: int) -> pl.Expr:
    return (reward.rank() - 1) / (count - 1) * 100 if count > 1 else pl.lit(50.0)


def reward_rows(comparison: Statistics) -> Iterator[Cells]:
    """List the combined reward, then each one alone: cells by heading, both sides with an arrow between them."""
    for change in (comparison["combined"], *comparison["rewards"]):
        note = "" if change["before"] and change["after"] else " (added)" if change["after"] else " (removed)"
        sides = [side for side in (change["before"], change["after"]) if side]
        yield {
            "reward": "combined" if change is comparison["combined"] else change["label"] + note,
            "mean": " → ".join(number(side["mean"]) for side in sides),
            "spread in groups": " → ".join(number(side["within_groups"]) for side in sides),
            "groups without spread": " → ".join(percent(side["groups_without_spread"]) for side in sides),
            "without a value": " → ".join(percent(side["null_share"]) for side in sides),
            "order kept, all / in groups": _order(change["own"]),
            "order by the previous reward, all / in groups": _order(change["with_previous"]),
        }


def _order(ranks: Statistics | None) -> str:
    return f"{correlation(ranks['overall'], 3)} / {correlation(ranks['within_groups'], 3)}" if ranks else ""


def advantage_facts(advantages: Statistics) -> Iterator[Fact]:
    """List what changed in advantages, and how much of it there is."""
    shares = {name: percent(advantages[name]) for name in ("turned", "non_zero_before", "non_zero_after")}
    compared, zero = advantages["compared"], advantages["zero_before"]
    yield "advantages on both sides", f"{compared:,}"
    yield "sign turned", f"{shares['turned']} of {advantages['both_non_zero']:,} that are not zero on either side"
    yield "not zero", f"{shares['non_zero_before']} → {shares['non_zero_after']}"
    yield "zero only before", f"{percent(advantages['from_zero'])} of {zero:,} that were zero"
    yield "zero only after", f"{percent(advantages['to_zero'])} of {compared - zero:,} that were not"
    yield "on one side only", f"{advantages['lost']:,} before, {advantages['gained']:,} after"


def title_of(runs: Sequence[str], name: str) -> str:
    """Name the runs, and the rescoring."""
    return f"{', '.join(runs)}: scored again as {name}"


def comparison_tables(comparison: Statistics) -> list[Table]:
    """Return what changed in rewards and in advantages."""
    size = f"{counted(comparison['samples'], 'sample')} in {counted(comparison['groups'], 'group')}"
    advantages = [{"measure": name, "value": value} for name, value in advantage_facts(comparison["advantages"])]
    return [
        Table(
            f"Rewards before → after, {size}",
            list(reward_rows(comparison)),
            meaning="Spread is the mean over groups of the reward's standard deviation; order is Spearman's rank "
            "correlation, 1 where it was kept, over all samples and as the mean over groups.",
        ),
        Table(
            "Advantages",
            advantages,
            texts=("value",),
            meaning="A sample whose advantage turns its sign is pushed away from where it was pulled before.",
        ),
    ]


def moved_table(moved: pl.DataFrame) -> Table:
    """Return the samples that :func:`moved_most` found."""
    several = moved["run"].n_unique() > 1
    rows = [
        {
            "rank in group": f"{row['rank_before']:g} → {row['rank_after']:g} of {row['siblings']}",
            "reward": f"{number(row['reward_before'])} → {number(row['reward_after'])}",
            "sample": f"{row['run']} {row['sample_id']}" if several else row["sample_id"],
            "prompt": one_line(shown_question(row["prompt"]), PROMPT_LETTERS),
        }
        for row in moved.iter_rows(named=True)
    ]
    note = "" if rows else "no sample's rank moved"
    return Table("Samples whose rank moved most", rows, ("sample", "prompt"), note=note)


def render_rescoring_page(
    comparison: Statistics, samples: pl.DataFrame, moved: pl.DataFrame, outputs: Outputs, title: str
) -> str:
    """Write the page of a rescoring; it says which of the outputs of the samples that moved most are missing."""
    runs = comparison["runs"]
    before, after = (column.to_numpy() for column in finite(samples, REWARDS).select(REWARDS).drop_nulls())
    return render(
        "rescoring.html.jinja",
        title=title,
        subtitle=", ".join(runs) if len(runs) <= 3 else f"{len(runs)} runs",
        summary=Report(title, tables=comparison_tables(comparison)),
        pairs=comparison["combined"]["with_previous"]["pairs"],
        joint=joint_plot(*np.histogram2d(before, after, BINS)),
        previous=bar_plot(np.histogram(before, BINS), "previous reward"),
        later=bar_plot(np.histogram(after, BINS), "later reward", series=1),
        moved=[(row, outputs.get((row["run"], row["sample_id"]))) for row in moved.iter_rows(named=True)],
        labels=list(dict.fromkeys([*_labels(moved, AFTER), *_labels(moved, BEFORE)])),
        several_runs=len(runs) > 1,
        several_datasets=moved["dataset"].n_unique() > 1,
    )
