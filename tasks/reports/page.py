"""A run as one HTML file: images embedded, no script, and nothing is asked of any server."""

import dataclasses
import functools
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from PIL import Image

from tasks.reports.chart import Chart, line_chart
from tasks.reports.group_records import Groups, GroupView
from tasks.reports.group_view import SMALL
from tasks.reports.images import data_uri, shrunk
from tasks.reports.metric_titles import metric_title
from tasks.reports.passages import ends
from tasks.runs.run_view import IterationView, Noun, RunView

CHARTED = (
    "reward_std_within_groups",
    "kl",
    "entropy",
    "grad_norm",
    "clip_ratio/region_mean",
    "sampling/sampling_logp_difference/max",
)
"""Figures with a chart of their own, beside the reward's and each reward's mean."""

LOSSLESS_SIDE = 128
"""Images up to this many pixels a side are embedded as they are: a pixel of theirs is a thing to look at."""


@dataclass(frozen=True)
class HeldoutPair:
    """One held-out prompt before and after.

    Attributes:
        before: by the first policy that was evaluated.
        after: by the last.
    """

    before: GroupView
    after: GroupView


@dataclass(frozen=True)
class Heldout:
    """The held-out prompts of two policies, paired.

    Attributes:
        first: version of the earlier policy.
        last: version of the later policy.
        pairs: by prompt.
        total: prompts that there are.
        same_seeds: every pair of samples was drawn with the same seed.
    """

    first: int
    last: int
    pairs: tuple[HeldoutPair, ...]
    total: int
    same_seeds: bool


def pair_heldout(first: int, before: Groups, last: int, after: Groups) -> Heldout:
    """Pair the groups of two evaluations by their names, samples in the order of theirs."""
    later = {group.group_id: in_drawn_order(group) for group in after.shown}
    pairs = tuple(
        HeldoutPair(in_drawn_order(group), later[group.group_id]) for group in before.shown if group.group_id in later
    )
    seeds = [
        ([sample.seed for sample in pair.before.samples], [sample.seed for sample in pair.after.samples])
        for pair in pairs
    ]
    return Heldout(first, last, pairs, before.total, all(left == right for left, right in seeds))


def in_drawn_order(group: GroupView) -> GroupView:
    """The group with its samples by name, so that two evaluations stand side by side."""
    ordered = tuple(sorted(group.samples, key=lambda sample: sample.sample_id))
    return dataclasses.replace(group, samples=ordered)


def render_page(
    run: RunView, groups: Groups, heldout: Heldout | None, warnings: Sequence[str], heading: Sequence[tuple[str, str]]
) -> str:
    """The whole page.

    Args:
        run: read from its artifacts.
        groups: of the iteration that is shown.
        heldout: two evaluations, if there are any.
        warnings: what a person must know of what is missing.
        heading: names and values of the summary.
    """
    return _template().render(
        run=run,
        groups=groups,
        heldout=heldout,
        warnings=warnings,
        heading=heading,
        progress=progress(run),
        stages=stage_shares(run),
        main_chart=_reward_chart(run, 1120, 250),
        narrow_chart=_reward_chart(run, 360, 200),
        charts=list(_charts(run)),
        metrics=metric_rows(run.shown, run.noun) if run.shown else [],
        datasets=set(groups.datasets) | {pair.before.dataset for pair in heldout.pairs} if heldout else groups.datasets,
        counted=counted,
    )


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "image": image_uri,
        "small_image": small_image_uri,
        "ends": ends,
        "number": number,
        "signed": signed,
    }
    return environment.get_template("page.html.jinja")


def progress(run: RunView) -> str:
    """How far the run is, in words."""
    if run.finished:
        return f"finished: {run.policy_version} iterations"
    planned = f" of {run.planned}" if run.planned is not None else ""
    begun = next((view for view in reversed(run.iterations) if not view.complete), None)
    text = f"unfinished, or still running: {run.policy_version}{planned} iterations"
    if begun is not None and begun.iteration > run.policy_version:
        draw = f", draw {begun.rounds}," if begun.rounds > 1 else ""
        text += f"; iteration {begun.iteration}{draw} has {', '.join(begun.stages)}"
    return text


def counted(groups: Groups) -> str:
    """How many groups were drawn, how often, and how many of them teach nothing."""
    times = "1 draw" if groups.rounds == 1 else f"{groups.rounds} draws"
    return f"{groups.total} groups in {times}, {groups.dropped} without spread left out of the update"


def stage_shares(run: RunView) -> list[tuple[str, float, float]]:
    """Stage, seconds, and share of the total."""
    seconds = run.seconds
    total = seconds.pop("total") or 1.0
    return [(stage, spent, spent / total) for stage, spent in seconds.items()]


def metric_rows(view: IterationView, noun: Noun) -> list[tuple[str, str, str, float]]:
    """Title, meaning, name and value of each figure: those that are charted first, then by name."""
    first = ["reward", "heldout_reward", *CHARTED]
    names = [name for name in first if name in view.metrics]
    names += [name for name in sorted(view.metrics) if name not in first]
    titles = [metric_title(name, noun) for name in names]
    return [(title.title, title.meaning, name, view.metrics[name]) for name, title in zip(names, titles, strict=True)]


def reward_means(run: RunView) -> list[str]:
    """Names of the figures that are a single reward's mean, in the order of the configuration's table."""
    names = {name for view in run.iterations for name in view.metrics}
    return sorted(name for name in names if name.startswith("rewards/") and name.endswith("/mean"))


def _reward_chart(run: RunView, width: float, height: float) -> Chart | None:
    series = {"reward": run.series("reward"), "held-out reward": run.heldout_series()}
    return line_chart("Reward", metric_title("reward", run.noun).meaning, series, width=width, height=height)


def _charts(run: RunView) -> Iterator[Chart]:
    yield from _dataset_charts(run)
    meaning = "mean over the held-out samples, never trained on; one that falls while the reward rises is a warning"
    if chart := line_chart("Guardrails", meaning, run.guardrail_series, legend=True):
        yield chart
    for name in [*reward_means(run), *CHARTED]:
        title = metric_title(name, run.noun)
        if chart := line_chart(title.title, title.meaning, {title.title: run.series(name)}):
            yield chart


def _dataset_charts(run: RunView) -> Iterator[Chart]:
    rewards = run.dataset_rewards
    trained = {dataset: run.series(name) for dataset, name in rewards.items()}
    heldout = {dataset: run.heldout_series(name) for dataset, name in rewards.items()}
    for title, series in (("Reward by dataset", trained), ("Held-out reward by dataset", heldout)):
        if chart := line_chart(title, "mean of the weighted rewards, each dataset by itself", series, legend=True):
            yield chart


def image_uri(image: Image.Image) -> str:
    """An image as a data link: PNG where it is small, JPEG for large photographs."""
    png = io.BytesIO()
    image.save(png, "PNG", optimize=True)
    if max(image.size) <= LOSSLESS_SIDE:
        return data_uri(png.getvalue(), "image/png")
    jpeg = io.BytesIO()
    image.save(jpeg, "JPEG", quality=88)
    if png.tell() <= jpeg.tell():
        return data_uri(png.getvalue(), "image/png")
    return data_uri(jpeg.getvalue(), "image/jpeg")


def small_image_uri(image: Image.Image) -> str:
    """The same, for a row of small ones."""
    return image_uri(shrunk(image, SMALL))


def number(value: float | None, digits: int = 3) -> str:
    """A reward for people."""
    return "none" if value is None else f"{value:.{digits}f}"


def signed(value: float | None) -> str:
    """An advantage for people."""
    return "none" if value is None else f"{value:+.2f}"
