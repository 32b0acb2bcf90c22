"""The page of many runs: their states, their curves with the seeds of a configuration as one band, what differs."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from configs.scoring import reward_label
from tasks.reports.compared_runs import flat_settings, inputs_of, rescoring_in_words, reward_mix, written_setting
from tasks.reports.curves import Curve, Points, line_plot
from tasks.reports.report import Cells, Notice, Report, Table, render
from tasks.reports.text import counted, number

MAX_LINES = 18  # configurations with a line of their own in a plot; as many lines differ in colour or in dashes
_OWN = ("run.name", "run.seed", "storage.root")  # settings in which the runs of one configuration differ


@dataclass(frozen=True)
class RunCurves:
    """What the page of many runs shows of one."""

    name: str
    config: Mapping[str, Any]  # content of config.yaml and run.json; empty without a readable one
    described: Mapping[str, Any]
    reward: Points  # (iteration, mean training reward)
    heldout: Points  # (policy version, mean held-out reward)


@dataclass(frozen=True)
class Configuration:
    """Runs that differ in their seed alone, at least one, and the settings that they have in common, by path."""

    settings: Mapping[str, object]
    runs: Sequence[RunCurves]

    @property
    def label(self) -> str:
        """The first run's name, and how many there are."""
        count = len(self.runs)
        return self.runs[0].name if count == 1 else f"{self.runs[0].name} and {count - 1} more"

    @property
    def seeds(self) -> str:
        """The seeds of its runs."""
        sections = [run.config.get("run") for run in self.runs]
        return ", ".join(str(each.get("seed", "?")) if isinstance(each, Mapping) else "?" for each in sections)


def configurations(runs: Sequence[RunCurves]) -> list[Configuration]:
    """Put runs of one configuration together; one whose configuration cannot be read stays alone."""
    found: dict[str, Configuration] = {}
    for run in runs:
        given = flat_settings({**run.config, **inputs_of(run.config, run.described)} if run.config else {})
        settings = {path: value for path, value in given if path not in _OWN}
        key = json.dumps(settings, sort_keys=True, default=str) if settings else f"alone: {run.name}"
        known = found.get(key)
        found[key] = Configuration(settings, [*known.runs, run] if known else [run])
    return list(found.values())


def over_seeds(series: Sequence[Points]) -> tuple[list[tuple[float, float]], list[tuple[float, float, float]]]:
    """Return the mean of several runs by iteration, of those that got there, and the range from lowest to highest."""
    values: dict[float, list[float]] = {}
    for points in series:
        for x, y in points:
            values.setdefault(x, []).append(y)
    ordered = sorted(values.items())
    return [(x, fmean(ys)) for x, ys in ordered], [(x, min(ys), max(ys)) for x, ys in ordered]


def render_list_page(title: str, listed: Report, runs: Sequence[RunCurves]) -> str:
    """Write the page of runs in the order of their list, `listed`, as the terminal shows it."""
    groups = configurations(runs)
    shown = groups[-MAX_LINES:]
    left_out = [f"The plots have the last {MAX_LINES} of {len(groups)} configurations."] if shown != groups else []
    summary = Report(
        "",
        tables=[*listed.tables, _seeds_table(groups), _settings_table(shown)],
        notices=[Notice("not everything is shown", [*listed.notes, *left_out])],
    )
    plots = [line_plot(each, width=460, height=230) for each in _curves(shown)]
    return render(
        "list.html.jinja",
        title=title,
        count=f"{counted(len(runs), 'run')}, {counted(len(groups), 'configuration')}",
        summary=summary,
        plots=[plot for plot in plots if plot],
    )


def _curves(groups: Sequence[Configuration]) -> Iterator[Curve]:
    """Yield the rewards of configurations with the same rewards, and those of the same held-out prompts."""
    for name, meaning in (("reward", "training reward"), ("heldout", "held-out reward")):
        families: dict[str, list[Configuration]] = {}
        for group in groups:
            run = group.runs[0]
            asked = [reward_mix(run.described) or run.config.get("rewards")]
            asked += [run.config.get("evaluate") if name == "heldout" else rescoring_in_words(run.config)]
            families.setdefault(json.dumps(asked, sort_keys=True, default=str), []).append(group)
        for each in families.values():
            rewards = f": {_rewards(each[0], name)}" if len(families) > 1 else ""
            found = {group.label: over_seeds([getattr(run, name) for run in group.runs]) for group in each}
            bands = {group.label: [found[group.label][1]] for group in each if len(group.runs) > 1}
            ranges = "; the mean over the seeds that got there, in the range from the lowest to the highest"
            yield Curve(
                f"{meaning.capitalize()}{rewards}",
                meaning + (ranges if bands else ""),
                {label: mean for label, (mean, _) in found.items()},
                bands=bands,
            )


def _rewards(group: Configuration, curve: str) -> str:
    config = group.runs[0].config
    if curve == "reward" and (rescoring := rescoring_in_words(config)) is not None:
        return rescoring
    rewards = config.get("rewards")
    sections = [each for each in rewards if isinstance(each, Mapping)] if isinstance(rewards, list) else []
    return ", ".join(reward_label(each) for each in sections if each.get("weight") != 0) or "unknown rewards"


def _seeds_table(groups: Sequence[Configuration]) -> Table:
    rows: list[Cells] = [
        {
            "configuration": group.label,
            "seeds": group.seeds,
            "reward, last": _range([run.reward[-1][1] for run in group.runs if run.reward]),
            "held-out, last": _range([run.heldout[-1][1] for run in group.runs if run.heldout]),
            "runs": ", ".join(run.name for run in group.runs),
        }
        for group in groups
        if len(group.runs) > 1
    ]
    return Table("Seeds of one configuration", rows, ("seeds", "runs"), "Mean over the runs, lowest to highest.")


def _range(values: Sequence[float]) -> str:
    if not values:
        return ""
    spread = f" ({number(min(values))} to {number(max(values))})" if len(values) > 1 else ""
    return f"{number(fmean(values))}{spread}"


def _settings_table(groups: Sequence[Configuration]) -> Table:
    paths = dict.fromkeys(path for group in groups for path in group.settings)
    rows = []
    for path in paths:
        values = [written_setting(group.settings[path]) if path in group.settings else "not set" for group in groups]
        if len(set(values)) > 1:
            rows.append({"": path, **dict(zip((group.label for group in groups), values, strict=True))})
    labels = [group.label for group in groups]
    return Table("Settings that differ", rows, labels, "Of config.yaml and run.json, without names, seeds and places.")
