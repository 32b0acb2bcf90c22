"""Texts and numbers for people: excerpts, escaped Markdown, sparklines, and the metrics in plain words.

The table is metrics.csv. `{label}` in a name stands for a reward, a dataset, a guardrail or a stage; `{noun}` is what
people call a sample of the run, and `{action}` an action of the stream. A metric is shown in the table of all metrics,
and, in the order of the file, with a `plot` of its own, in the `report` of an iteration, or there for a run of `text`
only. A second stream's metrics are titled and shown as those of the first.
"""

import csv
import itertools
import math
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from grpo_core.rollouts.streams import STREAMS, Stream
from tasks.metrics import HELDOUT, split_stream

if TYPE_CHECKING:
    from tasks.runs.run_view import Noun

MAX_LINES = 12
TRUNCATED = " (truncated)"  # beside a completion that was cut at its maximum length
ROUNDING = 1e-6  # share of the values by which those of a metric that stays the same may differ
SPARK_WIDTH = 32
UNICODE_BLOCKS, ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-:=+*#"
_MARKUP = re.compile(r"[|*_~`<>\[\]\\&#]")
_ADDRESS = re.compile(r"://|www\.|.@.", re.IGNORECASE)
_BETWEEN_WORDS = re.compile(r"([\s|`]+)")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
# Controls but tab and line ends; zero-width spaces, marks and overrides of direction, tags; lone surrogates.
_INVISIBLE = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    r"\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]|\r(?!\n)"
)
_JOINERS_AND_SPACES = "\u200c\u200d\xa0\u202f\u3000"
_BREAKS = re.compile(r"\r\n|[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]")


def excerpt(text: str, letters: int, lines: int = MAX_LINES) -> str:
    """Shorten a text that exceeds this many letters or lines to its beginning and, half as long, its end."""
    split = text.split("\n")
    if len(text) <= letters and len(split) <= lines:
        return text
    first, last = "\n".join(split[: lines * 2 // 3]), "\n".join(split[-(lines // 3) :])
    return f"{first[: letters * 2 // 3]} … {last[-(letters // 3) :]}"


def one_line(text: str, letters: int) -> str:
    """Shorten a text to one line of this many letters, line ends marked and both ends kept."""
    return excerpt(_BREAKS.sub(" ⏎ ", text.strip()), letters)


def in_cell(text: str) -> str:
    """Escape a line for a cell of a Markdown table: no markup, no link, no column, nothing invisible.

    The escapes are backslashes: Prefect's UI shows character references as they are written. Addresses are code,
    because GitHub's Markdown, which Prefect's second UI reads too, makes links of escaped ones.
    """
    words = _BETWEEN_WORDS.split(printable(text))
    return "".join(f"`{word}`" if _ADDRESS.search(word) else _MARKUP.sub(r"\\\g<0>", word) for word in words)


def fenced(text: str) -> str:
    """Wrap a text in a Markdown code block whose fence is longer than any fence in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{printable(_BREAKS.sub(chr(10), text), keep=chr(10) + chr(9))}\n{fence}"


def visible(text: str) -> str:
    """Name controls and changes of the reading direction by code points, but line ends, tabs and joiners."""
    return _INVISIBLE.sub(lambda found: _code_point(found[0]), text)


def printable(text: str, keep: str = "") -> str:
    """Name everything invisible by its code point, such as controls, but joiners, and spaces that people type."""
    keep += _JOINERS_AND_SPACES
    return "".join(each if each.isprintable() or each in keep else _code_point(each) for each in text)


def _code_point(letter: str) -> str:
    return f"⟨U+{ord(letter):04X}⟩"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Format the lines of a Markdown table; cells must already be escaped."""
    return [f"| {' | '.join(header)} |", "|" + "---|" * len(header), *(f"| {' | '.join(row)} |" for row in rows)]


def number(value: float | None, digits: int = 3) -> str:
    """Format a reward."""
    return "none" if value is None else f"{value:.{digits}f}"


def signed(value: float | None) -> str:
    """Format an advantage."""
    return "none" if value is None else f"{value:+.2f}"


def percent(share: float | None) -> str:
    """Format a share from 0 to 1."""
    return "none" if share is None else f"{share:.1%}"


def significant(value: float | None) -> str:
    """Format a number of any magnitude with four significant digits."""
    return "none" if value is None else f"{value:.4g}"


def correlation(value: float | None, digits: int = 2) -> str:
    """Format a correlation; zero has no sign."""
    return "none" if value is None else f"{round(value, digits) + 0.0:.{digits}f}"


def counted(count: int, noun: str) -> str:
    """Format a count with its noun in the right number: `1 sample`, `1,024 samples`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def duration(seconds: float) -> str:
    """Format a duration as `0:03:05`, or `1 day, 2:10:00`."""
    return str(timedelta(seconds=round(seconds)))


def size(count: int) -> str:
    """Format a number of bytes."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{count} B"


def relative(path: str) -> str:
    """Shorten a path below the working directory."""
    below = os.path.relpath(path)
    return path if below.startswith("..") else below


def change(first: float | None, last: float | None) -> str:
    """Format two rewards and their difference; only the first where there is no last."""
    if first is None:
        return "none"
    if last is None:
        return f"{first:.3f} → none yet"
    return f"{first:.3f} → {last:.3f} ({last - first:+.3f})"


def is_flat(low: float, high: float) -> bool:
    """Return whether a curve between these values shows nothing but rounding."""
    return high - low <= ROUNDING * max(abs(low), abs(high))


def sparkline(
    values: Sequence[float],
    width: int = SPARK_WIDTH,
    blocks: str = UNICODE_BLOCKS,
    scale: tuple[float, float] | None = None,
) -> str:
    """Format finite values as rising blocks, averaged to `width`, on the line's own or a common scale."""
    if not values:
        return ""
    if len(values) > width:
        edges = [index * len(values) // width for index in range(width + 1)]
        values = [math.fsum(values[start:end]) / (end - start) for start, end in itertools.pairwise(edges)]
    low, high = scale or (min(values), max(values))
    if is_flat(low, high):
        return blocks[len(blocks) // 2] * len(values)
    return "".join(blocks[min(len(blocks) - 1, int((value - low) / (high - low) * len(blocks)))] for value in values)


with (Path(__file__).parent / "metrics.csv").open(newline="") as _file:
    METRICS = {row["name"]: row for row in csv.DictReader(_file)}

PLOTTED = tuple(name for name, row in METRICS.items() if "plot" in row["shown"])
"""Metrics with a plot of their own, after the reward and the mean of each reward."""

REPORTED = tuple(name for name, row in METRICS.items() if "report" in row["shown"])
REPORTED_OF_TEXTS = tuple(name for name, row in METRICS.items() if "text" in row["shown"])


ACTIONS: Mapping[Stream, str] = MappingProxyType({"tokens": "token", "denoising": "noisy step"})
"""What people call an action of a stream."""


def reward_origin(metric: str, trained_on: str | None) -> str:
    """Say whose rewards a metric is of, to follow its title, where a replay is trained on a rescoring."""
    if trained_on is None:
        return ""
    if metric == HELDOUT:
        return " (original rewards)"
    return f" (rescoring {trained_on})" if metric == "reward" or metric.startswith("datasets/") else ""


def metric_title(
    name: str, noun: "Noun" = "image", stream: Stream = "tokens", trained_on: str | None = None
) -> tuple[str, str]:
    """Look up title and meaning of a metric of this first stream or of a later one, else its name alone."""
    later, own = split_stream(name)
    if later is not None:
        title, meaning = metric_title(own, noun, later, trained_on)
        return f"{title}, {later}", meaning
    for pattern, row in METRICS.items():
        prefix, labelled, suffix = pattern.partition("{label}")
        label = name.removeprefix(prefix).removesuffix(suffix) if labelled else ""
        if name == (f"{prefix}{label}{suffix}" if label else pattern):
            words = {"noun": noun, "action": ACTIONS[stream]}
            title = row["title"].format(**words, label=label) + reward_origin(name, trained_on)
            return title, row["meaning"].format(**words)
    return name, ""


def with_streams(names: Iterable[str], known: Collection[str]) -> list[str]:
    """Return the names, each before those of the same metric of other streams that are known."""
    return [
        each
        for name in names
        for each in (name, *(f"{stream}/{name}" for stream in STREAMS if f"{stream}/{name}" in known))
    ]


def metric_rows(
    metrics: Mapping[str, float], noun: "Noun", stream: Stream = "tokens", trained_on: str | None = None
) -> list[tuple[str, str, str, float]]:
    """List title, meaning, name and value of each metric: the reward and the plotted ones first, then by name."""
    names = with_streams(("reward", "heldout_reward", *PLOTTED), metrics)
    first = [name for name in names if name in metrics]
    names = [*first, *sorted(set(metrics) - set(first))]
    return [(*metric_title(name, noun, stream, trained_on), name, metrics[name]) for name in names]
