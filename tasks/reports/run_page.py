"""A run as one HTML file, plots and images embedded."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import fmean, quantiles
from typing import NamedTuple, TypeVar

from tasks.metrics import HELDOUT, split_stream
from tasks.reports.curves import Curve, line_plot
from tasks.reports.groups import MEDIUM, SMALL, TRAITS, Group, Groups, read_groups, varying
from tasks.reports.images import PromptImages
from tasks.reports.report import Notice, Report, render, reward_facts, signs_notice
from tasks.reports.text import PLOTTED, metric_rows, metric_title, with_streams
from tasks.runs.hacking import Verdict
from tasks.runs.layout import ADVANTAGES, ADVANTAGES_FILE, UPDATE
from tasks.runs.reader import RunReader
from tasks.runs.run_view import RunView, summary_of
from tasks.storage.files import is_local
from tasks.storage.parquet import leading_stream, read_advantages

MAX_VERSIONS = 30  # versions that are shown of the held-out prompts; of more, evenly spaced ones and both ends
MAX_FRAMES = 1000  # samples that are read of all these together; of both ends, every shown prompt is
MAX_ITERATIONS = 1000  # iterations whose rewards are read one by one; of more, some that are evenly spaced
MAX_EXCERPTS, EXCERPT_GROUPS = 24, 6  # iterations besides the shown one of which samples are shown, and prompts of each
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)  # of the rewards of an iteration's samples
Appearance = tuple[int, float]  # an iteration that sampled a prompt, and the prompt's mean reward there

T = TypeVar("T")


@dataclass(frozen=True)
class Heldout:
    """The held-out prompts over the versions of the policy."""

    versions: Sequence[int]  # evaluated versions that are shown, in order; the first and the last of all are among them
    # Each prompt's group by version, their samples ordered by id; versions in between may lack it.
    prompts: Sequence[Mapping[int, Group]]
    total: int  # number of prompts
    same_seeds: bool  # whether all versions sampled with the same seeds

    @property
    def pairs(self) -> list[tuple[Group, Group]]:
        """Each prompt's group by the first and by the last version."""
        return [(groups[self.versions[0]], groups[self.versions[-1]]) for groups in self.prompts]


def read_heldout(
    reader: RunReader, run: RunView, fetched: Path, images_of: PromptImages, *, limit: int
) -> Heldout | None:
    """Read the first groups of evaluations, the first and the last among them; None with fewer than two."""
    if len(run.evaluated) < 2:
        return None
    chosen = _evenly(run.evaluated, MAX_VERSIONS)
    by_version: dict[int, dict[str, Group]] = {}
    total, per_version = 0, MAX_FRAMES // len(chosen)
    for view in chosen:
        is_end = view in (chosen[0], chosen[-1])
        known = next(iter(by_version[chosen[0].version].values()), None) if by_version else None
        count = limit if is_end or known is None else min(limit, max(1, per_version // len(known.samples)))
        # Only the ends are certain to be valid.
        stages = view.stages if is_end else reader.valid_stages(view.stages)
        found = read_groups(reader, stages, fetched, images_of, limit=count, side=MEDIUM)
        if is_end or found.shown:
            groups = [replace(each, samples=sorted(each.samples, key=itemgetter("sample_id"))) for each in found.shown]
            by_version[view.version] = {group.samples[0]["group_id"]: group for group in groups}
            total = max(total, found.total)
    first, *_, last = by_version.values()
    names = [name for name in first if name in last]
    prompts = [{version: found[name] for version, found in by_version.items() if name in found} for name in names]
    seeds = [[[row["seed"] for row in group.samples] for group in groups.values()] for groups in prompts]
    return Heldout(list(by_version), prompts, total, all(each == one for one, *others in seeds for each in others))


def _evenly(items: Sequence[T], most: int) -> list[T]:
    """Choose at most this many, evenly spaced, the first and the last among them."""
    last = len(items) - 1
    if last < most:
        return list(items)
    return [items[place] for place in sorted({round(step * last / (most - 1)) for step in range(most)})]


class RewardHistory(NamedTuple):
    """Rewards at QUANTILES over the samples of iterations, and when each prompt, by its id, was sampled."""

    quantiles: Sequence[tuple[float, Sequence[float]]]
    appearances: Mapping[str, Sequence[Appearance]]


NO_REWARDS = RewardHistory((), {})


def read_rewards(reader: RunReader, run: RunView, fetched: Path) -> RewardHistory:
    """Read the rewards of the leading stream of every iteration, as far as MAX_ITERATIONS allows."""
    spread: list[tuple[float, Sequence[float]]] = []
    appearances: dict[str, list[Appearance]] = {}
    # A remote run would be copied table by table.
    views = _evenly(run.iterations, MAX_ITERATIONS) if is_local(reader.store.filesystem) else []
    for view in views:
        parts = reader.valid_stages({ADVANTAGES: view.stages.get(ADVANTAGES, ())}).get(ADVANTAGES, ())
        for part in parts:
            path = reader.local_folder(part, fetched) / ADVANTAGES_FILE
            levels, means = reader.memory.recall(("rewards", part.uri, part.sha256), partial(_rewards_of, path))
            if levels:
                spread.append((float(view.iteration), levels))
            for prompt, mean in means.items():
                appearances.setdefault(prompt, []).append((view.iteration, mean))
    return RewardHistory(spread, appearances)


def _rewards_of(path: Path) -> tuple[Sequence[float], Mapping[str, float]]:
    """Return the quantiles of the rewards of a table, and the mean by prompt id."""
    rows = leading_stream(read_advantages([path], ["prompt_id", "reward"]))
    by_prompt: dict[str, list[float]] = {}
    for prompt, reward in zip(rows["prompt_id"].to_pylist(), rows["reward"].to_pylist(), strict=True):
        if reward is not None:
            by_prompt.setdefault(prompt, []).append(reward)
    rewards = [reward for each in by_prompt.values() for reward in each]
    # The first of 19 cuts has a twentieth of the rewards below it.
    cuts = quantiles(rewards, n=20, method="inclusive") if len(rewards) > 1 else []
    levels = [cuts[round(20 * each) - 1] for each in QUANTILES] if cuts else []
    return levels, {prompt: fmean(each) for prompt, each in by_prompt.items()}


class Excerpt(NamedTuple):
    """The best and the worst sample of the first prompts of an iteration."""

    iteration: int
    reward: float | None
    groups: Groups


def read_excerpts(reader: RunReader, run: RunView, fetched: Path, images_of: PromptImages) -> list[Excerpt]:
    """Read samples of some iterations besides the shown one; of a remote run none, which would be copied."""
    others = [view for view in run.iterations if view is not run.shown and ADVANTAGES in view.stages]
    found = []
    for view in _evenly(others, MAX_EXCERPTS) if is_local(reader.store.filesystem) else []:
        stages = reader.valid_stages({stage: parts for stage, parts in view.stages.items() if stage != UPDATE})
        groups = read_groups(reader, stages, fetched, images_of, limit=EXCERPT_GROUPS, side=SMALL, ends=True)
        if groups.shown:
            found.append(Excerpt(view.iteration, view.metrics.get("reward"), groups))
    return found


def run_report(run: RunView, verdict: Verdict, warnings: Sequence[str]) -> Report:
    """Return how far a run is, its rewards, and what is damaged or missing."""
    summary = summary_of(run)
    facts = [
        *reward_facts(summary),
        ("policy updates", f"{summary.iterations}"),
        ("seconds, all stages", f"{summary.seconds['total']:.1f}"),
        ("reward hacking", verdict.summary),
        ("policy digest", (summary.policy_digest or "unknown")[:12]),
    ]
    notices = [signs_notice(run.signs), Notice("not everything could be shown", warnings)]
    return Report(f"{run.name}: {progress(run)}", facts, notices=notices)


@dataclass(frozen=True)
class PageSamples:
    """The samples on the page of a run: of the shown iteration, of evaluations, all rewards, some of others."""

    groups: Groups
    heldout: Heldout | None
    rewards: RewardHistory = NO_REWARDS
    excerpts: Sequence[Excerpt] = ()


def render_run_page(
    run: RunView, samples: PageSamples, verdict: Verdict, warnings: Sequence[str], *, watched: str = ""
) -> str:
    """Write the page of a run; `watched` is what it asks its server for, to be written again when it changes."""
    titles = [metric_title(name, trained_on=run.trained_on)[0] for name in ("reward", HELDOUT)]
    series = dict(zip(titles, (run.series("reward"), run.heldout_series()), strict=True))
    reward = Curve("Reward", metric_title("reward", run.noun)[1], series)
    heldout = samples.heldout
    pairs = heldout.pairs if heldout else ()
    shown = [group.samples for group in (*samples.groups.shown, *(before for before, _ in pairs))]
    wide = {"width": 620, "height": 330} if pairs else {"width": 1120, "height": 250}
    return render(
        "run.html.jinja",
        title=run.name,
        run=run,
        samples=samples,
        groups=samples.groups,
        heldout=heldout,
        verdict=verdict,
        summary=run_report(run, verdict, warnings),
        progress=progress(run),
        stages=stage_shares(run),
        reward_plot=line_plot(reward, **wide),
        narrow_reward_plot=line_plot(reward, width=360, height=200),
        plots=[plot for each in _curves(run, samples.rewards) if (plot := line_plot(each))],
        metrics=metric_rows(run.shown.metrics, run.noun, run.stream, run.trained_on) if run.shown else [],
        traits=[name for name in TRAITS if name in {*samples.groups.varying, *varying(shown)}],
        watched=watched,
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
    elif not run.evaluated_last and run.policy_version == run.planned:
        text += "; the last policy is not evaluated"
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


def _spread(run: RunView, rewards: RewardHistory) -> Curve:
    """Return the middle reward of the samples of each iteration, in the ranges around it."""
    levels = [(iteration, *each) for iteration, each in rewards.quantiles]
    bands = [[(each[0], each[1 + low], each[-1 - low]) for each in levels] for low in (0, 1)]
    meaning = f"median over the {run.noun}s of an iteration; half of them lie in the darker band, 80 % in the lighter"
    median = 1 + QUANTILES.index(0.5)
    series = {"median": [(each[0], each[median]) for each in levels]}
    return Curve("Spread of the reward", meaning, series, legend=False, bands={"median": bands})


def _curves(run: RunView, rewards_read: RewardHistory) -> Iterator[Curve]:
    yield _spread(run, rewards_read)
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
