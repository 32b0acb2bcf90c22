"""The stored figures, docs/performance.json, and the tables of docs/performance.md that are made from them."""

import platform
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import psutil
import torch
from pydantic import TypeAdapter

from tasks.checkout import CHECKOUT
from tasks.execution.fingerprint import library_versions
from tasks.reports.text import markdown_table
from tests.bench.table import Row

FIGURES = CHECKOUT / "docs" / "performance.json"
PAGE = CHECKOUT / "docs" / "performance.md"
BEGIN, END = "<!-- written by make bench -->\n", "<!-- end of what make bench writes -->\n"
HEADINGS = ("", "here", "beside it", "", "ratio", "quartiles", "goal", "met")


@dataclass(frozen=True)
class Machine:
    """Where figures were measured, and with which versions of the libraries."""

    cpu: str
    cores: int
    memory_gib: float
    gpu: str | None
    python: str
    libraries: dict[str, str]


@dataclass(frozen=True)
class Measured:
    """What one module of this package measured.

    Attributes:
        title: what that is.
        commit: of the project, with `-dirty` where files were changed; None outside a git checkout.
        day: ISO date.
        minutes: how long it took.
    """

    title: str
    commit: str | None
    day: str
    minutes: float
    machine: Machine
    rows: tuple[Row, ...]


_FILE = TypeAdapter(dict[str, Measured])


def this_machine() -> Machine:
    """Describe the machine of this process, with the cores that it may use."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return Machine(
        cpu=names[0].partition(":")[2].strip() if names else platform.machine(),
        cores=len(psutil.Process().cpu_affinity()),
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        python=platform.python_version(),
        libraries=library_versions() | {name: version(name) for name in ("polars", "prefect", "trl")},
    )


def store(name: str, measured: Measured) -> None:
    """Replace a module's figures, and write the page's tables again."""
    figures = _FILE.validate_json(FIGURES.read_bytes()) if FIGURES.exists() else {}
    figures[name] = measured
    FIGURES.write_bytes(_FILE.dump_json(figures, indent=1) + b"\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    assert END in rest, f"{PAGE} has no line {END!r} after {BEGIN!r}"
    tables = "\n".join(line for each in figures.values() for line in _section(each))
    PAGE.write_text(f"{before}{BEGIN}\n{tables}\n{END}{rest.partition(END)[2]}")


def cells(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Format rows under HEADINGS: medians, and the quartiles of the ratios, or of our rounds without a peer."""
    for row in rows:
        limit, words = (row.at_most, "at most") if row.at_most is not None else (row.at_least, "at least")
        yield (
            row.what,
            f"{_number(statistics.median(row.ours))} {row.unit}",
            f"{_number(statistics.median(row.theirs))} {row.unit}" if row.theirs else "",
            row.peer,
            f"{statistics.median(row.ratios):.2f}" if row.ratios else "",
            _quartiles(row.ratios or row.ours),
            "" if limit is None else f"{words} {_number(limit)}{'' if row.theirs else ' ' + row.unit}",
            {True: "yes", False: "no", None: ""}[row.met],
        )


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _quartiles(rounds: Sequence[float]) -> str:
    if len(rounds) < 2:
        return ""
    low, _, high = statistics.quantiles(rounds, n=4, method="inclusive")
    return f"{_number(low)} to {_number(high)}"


def _section(measured: Measured) -> Iterator[str]:
    """A heading, the table, and where it was measured."""
    machine = measured.machine
    named = ", ".join(f"{name} {machine.libraries[name]}" for name in ("torch", "transformers", "prefect", "trl"))
    place = f"{machine.cpu}, {machine.cores} cores, {machine.memory_gib} GiB, {machine.gpu or 'no GPU'}"
    yield from (f"### {measured.title}", "", *markdown_table(HEADINGS, list(cells(measured.rows))), "")
    yield from (f"{measured.day}, commit {measured.commit}; {place}; Python {machine.python}, {named}.", "")
