"""A run as one HTML file, plots and images embedded."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from tasks.metrics import HELDOUT, split_stream
from tasks.reports.images import PromptImages
from tasks.reports.report import Notice, Report, render, reward_facts, signs_notice
from tasks.reports.samples import MEDIUM, SMALL, TRAITS, Group, Groups, read_groups, varying
from tasks.reports.text import PLOTTED, metric_rows, metric_title, with_streams
from tasks.runs.layout import ADVANTAGES, ADVANTAGES_FILE
from tasks.runs.reader import RunReader
from tasks.runs.run_view import RunView, summary_of
from tasks.runs.signs import Verdict
from tasks.storage.files import is_local
from tasks.storage.parquet import leading_stream, read_advantages

Points = list[tuple[float, float]]


class Curve(NamedTuple):
    """A plot over iterations: title, meaning, points by series, and whether its lines need a legend."""

    title: str
    meaning: str
    series: Mapping[str, Sequence[tuple[float, float]]]
    legend: bool = True


MAX_VERSIONS = 8
"""Versions that the history of a held-out prompt shows."""

MAX_ITERATIONS = 200
"""Iterations, back from the shown one, in which earlier appearances of its prompts are looked for."""

Appearance = tuple[int, float]
"""An iteration that sampled a prompt, and the prompt's mean reward there."""


@dataclass(frozen=True)
class Heldout:
    """The held-out prompts over the versions of the policy.

    Attributes:
        versions: evaluated versions that are shown, in order; the first and the last of all are among them.
        prompts: each prompt's group by every version, their samples ordered by id.
        total: number of prompts.
        same_seeds: whether all versions sampled with the same seeds.
    """

    versions: Sequence[int]
    prompts: Sequence[Sequence[Group]]
    total: int
    same_seeds: bool

    @property
    def pairs(self) -> list[tuple[Group, Group]]:
        """Each prompt's group by the first and by the last version."""
        return [(groups[0], groups[-1]) for groups in self.prompts]


def read_heldout(
    reader: RunReader, run: RunView, fetched: Path, images_of: PromptImages, *, limit: int
) -> Heldout | None:
    """Read the first groups of evaluations, the first and the last among them; None with fewer than two."""
    count = len(run.evaluated)
    if count < 2:
        return None
    chosen = sorted({round(place * (count - 1) / (MAX_VERSIONS - 1)) for place in range(MAX_VERSIONS)})
    versions, sides, total = [], [], 0
    for index in chosen:
        ends = index in (0, count - 1)
        side = MEDIUM if ends else SMALL
        found = read_groups(reader, run.evaluated[index].stages, fetched, images_of, limit=limit, side=side)
        # Only the ends are certain to be valid.
        if ends or found.shown:
            versions.append(run.evaluated[index].version)
            groups = [replace(each, samples=sorted(each.samples, key=itemgetter("sample_id"))) for each in found.shown]
            sides.append({group.samples[0]["group_id"]: group for group in groups})
            total = max(total, found.total)
    prompts = [[side[name] for side in sides] for name in sides[0] if all(name in side for side in sides)]
    seeds = [[[row["seed"] for row in group.samples] for group in groups] for groups in prompts]
    return Heldout(versions, prompts, total, all(each == first for first, *others in seeds for each in others))


def read_appearances(reader: RunReader, run: RunView, groups: Groups, fetched: Path) -> dict[str, list[Appearance]]:
    """Return when the prompts of these groups were sampled, by prompt id, over the last MAX_ITERATIONS iterations."""
    wanted = {group.samples[0]["prompt_id"] for group in groups.shown}
    if run.shown is None or not wanted or not is_local(reader.store.filesystem):
        # A remote run would be copied table by table.
        return {}
    found: dict[str, list[Appearance]] = {}
    for view in [view for view in run.iterations if view.iteration <= run.shown.iteration][-MAX_ITERATIONS:]:
        rewards: dict[str, list[float]] = {}
        for part in view.stages.get(ADVANTAGES, ()):
            path = reader.local_folder(part, fetched) / ADVANTAGES_FILE
            rows = leading_stream(read_advantages([path], ["prompt_id", "reward"]))
            for prompt, reward in zip(rows["prompt_id"].to_pylist(), rows["reward"].to_pylist(), strict=True):
                if prompt in wanted and reward is not None:
                    rewards.setdefault(prompt, []).append(reward)
        for prompt, known in rewards.items():
            found.setdefault(prompt, []).append((view.iteration, fmean(known)))
    return found


def run_report(run: RunView, verdict: Verdict, warnings: Sequence[str]) -> Report:
    """Return how far a run is, its rewards, and what is damaged or missing."""
    summary = summary_of(run)
    facts = [
        *reward_facts(summary),
        ("policy updates", f"{summary.iterations}"),
        ("seconds of all stages", f"{summary.seconds['total']:.1f}"),
        ("reward hacking", verdict.summary),
        ("policy digest", (summary.policy_digest or "unknown")[:12]),
    ]
    notices = [signs_notice(run.signs), Notice("not everything could be shown", warnings)]
    return Report(f"{run.name}: {progress(run)}", facts, notices=notices)


def render_run_page(
    run: RunView,
    groups: Groups,
    appearances: Mapping[str, Sequence[Appearance]],
    heldout: Heldout | None,
    verdict: Verdict,
    warnings: Sequence[str],
) -> str:
    """Write the page of a run, with the groups of the shown iteration."""
    # Matplotlib takes a second to import.
    from tasks.reports.plots import line_plot

    titles = [metric_title(name, trained_on=run.trained_on)[0] for name in ("reward", HELDOUT)]
    reward = dict(zip(titles, (run.series("reward"), run.heldout_series()), strict=True))
    title = ("Reward", metric_title("reward", run.noun)[1])
    pairs = heldout.pairs if heldout else ()
    shown = [group.samples for group in (*groups.shown, *(before for before, _ in pairs))]
    return render(
        "run.html.jinja",
        title=run.name,
        run=run,
        groups=groups,
        appearances=appearances,
        heldout=heldout,
        verdict=verdict,
        summary=run_report(run, verdict, warnings),
        progress=progress(run),
        stages=stage_shares(run),
        reward_plot=line_plot(*title, reward, width=1120, height=250),
        narrow_reward_plot=line_plot(*title, reward, width=360, height=200),
        plots=[plot for each in _curves(run) if (plot := line_plot(*each[:3], legend=each.legend))],
        metrics=metric_rows(run.shown.metrics, run.noun, run.stream, run.trained_on) if run.shown else [],
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
    """List the metrics with a plot of their own: the mean of each reward, then PLOTTED, by stream."""
    names = {name for view in run.iterations for name in view.metrics}
    means = sorted(name for name in names if name.startswith("rewards/") and name.endswith("/mean"))
    return [*means, *with_streams(("reward", *PLOTTED), names)[1:]]


def _curves(run: RunView) -> Iterator[Curve]:
    meaning = "mean of the weighted rewards of each dataset alone"
    rewards = run.dataset_rewards.items()
    yield Curve("Reward by dataset", meaning, {name: run.series(metric) for name, metric in rewards})
    heldout = {name: run.heldout_series(metric) for name, metric in rewards}
    yield Curve("Held-out reward by dataset", meaning, heldout)
    meaning = "mean over the held-out samples, never trained on; one that falls while the reward rises is a warning"
    yield Curve("Guardrails", meaning, run.guardrail_series)
    for name in plotted_metrics(run):
        title, meaning = metric_title(name, run.noun, run.stream, run.trained_on)
        series = {title: run.series(name)}
        # Of the first stream, the reward has a plot of its own.
        if split_stream(name)[1] == "reward" and run.heldout_series(name):
            series[f"held-out {title}"] = run.heldout_series(name)
        yield Curve(title, meaning, series, legend=len(series) > 1)
