"""A run as one HTML file: plots and images embedded, no script, no request to any server."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tasks.reports.images import TargetReader
from tasks.reports.metric_titles import PLOTTED, metric_rows, metric_title
from tasks.reports.pages import render
from tasks.reports.samples import TRAITS, Group, Groups, read_groups, varying
from tasks.runs.reader import RunReader
from tasks.runs.run_view import RunView


@dataclass(frozen=True)
class Heldout:
    """The held-out prompts of two policies, paired.

    Attributes:
        first: version of the earlier policy.
        last: version of the later policy.
        pairs: each prompt's group by the earlier and by the later policy, their samples ordered by id.
        total: number of prompts.
        same_seeds: every pair of samples was sampled with the same seed.
    """

    first: int
    last: int
    pairs: Sequence[tuple[Group, Group]]
    total: int
    same_seeds: bool


def read_heldout(
    reader: RunReader, run: RunView, fetched: Path, targets: TargetReader, *, limit: int
) -> Heldout | None:
    """Pair the first groups of the first and the last evaluation by their ids; None with fewer than two evaluations."""
    if len(run.evaluated) < 2:
        return None
    first, last = run.evaluated[0], run.evaluated[-1]
    before, after = (read_groups(reader, each.stages, fetched, targets, limit=limit) for each in (first, last))
    sides = [{group.samples[0]["group_id"]: _by_sample_id(group) for group in side.shown} for side in (before, after)]
    pairs = [(group, sides[1][name]) for name, group in sides[0].items() if name in sides[1]]
    seeds = [[[row["seed"] for row in group.samples] for group in pair] for pair in pairs]
    same = all(earlier == later for earlier, later in seeds)
    return Heldout(first.version, last.version, pairs, before.total, same)


def _by_sample_id(group: Group) -> Group:
    return replace(group, samples=sorted(group.samples, key=lambda row: row["sample_id"]))


def render_run_page(
    run: RunView, groups: Groups, heldout: Heldout | None, warnings: Sequence[str], heading: Sequence[tuple[str, str]]
) -> str:
    """Write the page of a run, with the groups of the shown iteration and the names and values of its heading."""
    # Matplotlib takes a second to import.
    from tasks.reports.plots import line_plot

    reward = {"reward": run.series("reward"), "held-out reward": run.heldout_series()}
    title = ("Reward", metric_title("reward", run.noun)[1])
    pairs = heldout.pairs if heldout else ()
    shown = [group.samples for group in (*groups.shown, *(before for before, _ in pairs))]
    return render(
        "run.html.jinja",
        title=run.name,
        run=run,
        groups=groups,
        heldout=heldout,
        warnings=warnings,
        heading=heading,
        progress=progress(run),
        stages=stage_shares(run),
        reward_plot=line_plot(*title, reward, width=1120, height=250),
        narrow_reward_plot=line_plot(*title, reward, width=360, height=200),
        plots=[plot for each in _plots(run) if (plot := line_plot(*each[:3], legend=each[3]))],
        metrics=metric_rows(run.shown.metrics, run.noun) if run.shown else [],
        traits=[name for name in TRAITS if name in {*groups.varying, *varying(shown)}],
    )


def progress(run: RunView) -> str:
    """Describe how many iterations of the run are done."""
    if run.finished:
        return f"finished: {run.policy_version} iterations"
    planned = f" of {run.planned}" if run.planned is not None else ""
    begun = next((view for view in reversed(run.iterations) if not view.complete), None)
    text = f"unfinished, or still running: {run.policy_version}{planned} iterations"
    if begun is not None and begun.iteration > run.policy_version:
        sampling = f", sampling round {begun.rounds}," if begun.rounds > 1 else ""
        text += f"; iteration {begun.iteration}{sampling} has {', '.join(begun.stages)}"
    return text


def stage_shares(run: RunView) -> list[tuple[str, float, float]]:
    """List stage, seconds, and share of the total."""
    seconds = run.seconds
    total = seconds.pop("total") or 1.0
    return [(stage, spent, spent / total) for stage, spent in seconds.items()]


def plotted_metrics(run: RunView) -> list[str]:
    """List the metrics with a plot of their own: the mean of each reward, then PLOTTED."""
    names = {name for view in run.iterations for name in view.metrics}
    return [*sorted(name for name in names if name.startswith("rewards/") and name.endswith("/mean")), *PLOTTED]


def _plots(run: RunView) -> Iterator[tuple[str, str, Mapping[str, Sequence[tuple[float, float]]], bool]]:
    """Yield title, meaning, series, and whether the lines need a legend."""
    meaning = "mean of the weighted rewards of each dataset alone"
    rewards = run.dataset_rewards.items()
    yield "Reward by dataset", meaning, {name: run.series(metric) for name, metric in rewards}, True
    yield "Held-out reward by dataset", meaning, {name: run.heldout_series(metric) for name, metric in rewards}, True
    meaning = "mean over the held-out samples, never trained on; one that falls while the reward rises is a warning"
    yield "Guardrails", meaning, run.guardrail_series, True
    for name in plotted_metrics(run):
        title, meaning = metric_title(name, run.noun)
        yield title, meaning, {title: run.series(name)}, False
