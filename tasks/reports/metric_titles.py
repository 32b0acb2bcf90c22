"""The metrics of a run in plain words, and where they are shown: on the page, in the terminal and in Prefect's UI.

The table is metrics.csv. `{label}` in a name stands for a reward, a dataset, a guardrail or a stage; `{noun}` is what
people call a sample of the run, and `{action}` an action of the stream. A metric is shown in the table of all metrics,
and, in the order of the file, with a `plot` of its own, in the `report` of an iteration, or there for a run of `text`
only. A second stream's metrics are titled and shown as those of the first.
"""

import csv
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType

from grpo_core.streams import STREAMS, Stream
from tasks.metrics.names import split_stream
from tasks.runs.run_view import Noun

with (Path(__file__).parent / "metrics.csv").open(newline="") as _file:
    METRICS = {row["name"]: row for row in csv.DictReader(_file)}

PLOTTED = tuple(name for name, row in METRICS.items() if "plot" in row["shown"])
"""Metrics with a plot of their own, after the reward and the mean of each reward."""

REPORTED = tuple(name for name, row in METRICS.items() if "report" in row["shown"])
REPORTED_OF_TEXTS = tuple(name for name, row in METRICS.items() if "text" in row["shown"])


ACTIONS: Mapping[Stream, str] = MappingProxyType({"tokens": "token", "denoising": "noisy step"})
"""What people call an action of a stream."""


def metric_title(name: str, noun: Noun = "image", stream: Stream = "tokens") -> tuple[str, str]:
    """Look up a metric's title and meaning; an unknown name is its own title, without a meaning.

    Args:
        stream: the first that the run trains; the name of another one's metric says its stream.
    """
    later, own = split_stream(name)
    if later is not None:
        title, meaning = metric_title(own, noun, later)
        return f"{title}, {later}", meaning
    for pattern, row in METRICS.items():
        prefix, labelled, suffix = pattern.partition("{label}")
        label = name.removeprefix(prefix).removesuffix(suffix) if labelled else ""
        if name == (f"{prefix}{label}{suffix}" if label else pattern):
            words = {"noun": noun, "action": ACTIONS[stream]}
            return row["title"].format(**words, label=label), row["meaning"].format(**words)
    return name, ""


def with_streams(names: Iterable[str], known: Collection[str]) -> list[str]:
    """Return the names, each before those of the same metric of other streams that are known."""
    return [
        each
        for name in names
        for each in (name, *(f"{stream}/{name}" for stream in STREAMS if f"{stream}/{name}" in known))
    ]


def metric_rows(
    metrics: Mapping[str, float], noun: Noun, stream: Stream = "tokens"
) -> list[tuple[str, str, str, float]]:
    """List title, meaning, name and value of each metric: the reward and the plotted ones first, then by name."""
    names = with_streams(("reward", "heldout_reward", *PLOTTED), metrics)
    first = [name for name in names if name in metrics]
    names = [*first, *sorted(set(metrics) - set(first))]
    return [(*metric_title(name, noun, stream), name, metrics[name]) for name in names]
