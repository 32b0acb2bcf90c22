"""Time the iterations of a flow, alternating with what it is compared with.

A function that measures something yields a Row as soon as it is known.
"""

import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch
from pydantic import TypeAdapter

from tasks.execution.fingerprint import library_versions
from tasks.process import CHECKOUT
from tasks.reports.text import markdown_table

if TYPE_CHECKING:
    from tasks.reports.iteration import IterationRecord

ROUNDS, STEPS = 6, 2


class Timings:
    """A hook that times the iterations, and lets the peers run after each round of them.

    What an iteration leaves to a thread ends in the next one, so the one after the peers does not count.
    """

    def __init__(self, run_peers: Callable[[], None], clock: Callable[[], float] = time.perf_counter) -> None:
        self.run_peers, self.clock = run_peers, clock
        self.since: float | None = None
        self.iterations: list[float] = []

    def __call__(self, record: "IterationRecord") -> None:
        now = self.clock()
        if self.since is not None:
            self.iterations.append(now - self.since)
        self.since = now
        if record.iteration % (STEPS + 1) == 0:
            self.run_peers()
            self.since = None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure of this project, with what it is compared with and what it should reach, if there is a goal.

    The goal applies to the ratio where there is something to compare with, and to our own median where there is not.

    Attributes:
        what: what was measured, with its sizes: "update, 16 groups of 4, vocabulary 151,936".
        unit: unit of the rounds: "s", "tokens/s", "MB".
        ours: this project's figure in each round; one entry for what does not vary.
        peer: what `theirs` is, "TRL 1.16 step"; empty without one.
        theirs: the peer's figure in each round, in the order of `ours`; empty without one.
        at_most: the goal where less is better; None where more is.
        at_least: the goal where more is better; None where less is.
        left_out: why there is no figure; empty where there is one.
    """

    what: str
    unit: str
    ours: tuple[float, ...]
    peer: str = ""
    theirs: tuple[float, ...] = ()
    at_most: float | None = None
    at_least: float | None = None
    left_out: str = ""

    @property
    def ratios(self) -> tuple[float, ...]:
        """Ours divided by theirs, round by round; empty without a peer."""
        return tuple(a / b for a, b in zip(self.ours, self.theirs, strict=True)) if self.theirs else ()

    @property
    def limit(self) -> float:
        """The goal, whichever is given."""
        limit = self.at_most if self.at_most is not None else self.at_least
        assert limit is not None, f"{self.what} has no goal"
        return limit

    @property
    def met(self) -> bool:
        """Whether the median reaches the goal."""
        reached = statistics.median(self.ratios or self.ours)
        return reached <= self.limit if self.at_most is not None else reached >= self.limit


def alternate(rounds: int, *actions: Callable[[], object]) -> list[tuple[float, ...]]:
    """Call the actions in turn, `rounds` times, after one call of each that does not count.

    Returns:
        For each action its seconds of wall time, round by round.
    """
    seconds: list[list[float]] = [[] for _ in actions]
    for counted in (False, *[True] * rounds):
        for action, kept in zip(actions, seconds, strict=True):
            begun = time.perf_counter()
            action()
            if counted:
                kept.append(time.perf_counter() - begun)
    return [tuple(kept) for kept in seconds]


FIGURES = CHECKOUT / "docs" / "performance.json"
PAGE = CHECKOUT / "docs" / "performance.md"
BEGIN, END = "<!-- written by make bench -->\n", "<!-- end of what make bench writes -->\n"
HEADINGS = ("", "here", "beside it", "ratio", "goal")


@dataclass(frozen=True)
class Machine:
    """Where figures were measured, and with which versions of the libraries.

    Attributes:
        instructions: the set that torch's kernels use, which decides how sums are rounded; None where it was not noted.
    """

    cpu: str
    cores: int
    memory_gib: float
    gpu: str | None
    python: str
    libraries: dict[str, str]
    instructions: str | None = None

    @property
    def processor(self) -> str:
        """The CPU, and the instructions that are used of it."""
        return self.cpu + (f" with {self.instructions}" if self.instructions else "")


@dataclass(frozen=True)
class Measured:
    """What one part measured.

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
        gpu=_gpu() if torch.cuda.is_available() else None,
        python=platform.python_version(),
        libraries=library_versions() | {name: version(name) for name in ("polars", "prefect", "trl")},
        instructions=torch.backends.cpu.get_cpu_capability(),
    )


def _gpu() -> str:
    """Describe the first GPU with its memory and its driver, which PyTorch does not know."""
    name, size = torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory / 2**30
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    found = subprocess.run(query, capture_output=True, text=True).stdout.split() if shutil.which(query[0]) else []
    return f"{name} with {size:.0f} GiB, driver {found[0] if found else 'unknown'}, CUDA {torch.version.cuda}"


def store(name: str, measured: Measured) -> None:
    """Replace a part's figures, and write the page's tables again."""
    figures = _FILE.validate_json(FIGURES.read_bytes()) if FIGURES.exists() else {}
    figures[name] = measured
    FIGURES.write_bytes(_FILE.dump_json(figures, indent=1) + b"\n")
    before, _, rest = PAGE.read_text().partition(BEGIN)
    assert END in rest, f"{PAGE} has no line {END!r} after {BEGIN!r}"
    PAGE.write_text(f"{before}{BEGIN}\n{tables(figures)}\n{END}{rest.partition(END)[2]}")


def write_results(name: str, lines: Sequence[str]) -> None:
    """Replace a table of README.md or docs/, between `<!-- results: NAME -->` and `<!-- end -->`."""
    mark, end = f"<!-- results: {name} -->\n", "<!-- end -->\n"
    pages = (CHECKOUT / "README.md", *PAGE.parent.glob("*.md"))
    page = next(each for each in pages if mark in each.read_text(encoding="utf-8"))
    before, _, rest = page.read_text(encoding="utf-8").partition(mark)
    inside = "\n".join(lines)
    page.write_text(f"{before}{mark}{inside}\n{end}{rest.partition(end)[2]}", encoding="utf-8")


def read_figures() -> dict[str, Measured]:
    """Return the stored figures of each part."""
    return _FILE.validate_json(FIGURES.read_bytes())


def tables(figures: Mapping[str, Measured]) -> str:
    """Return a table of each part's rows, each machine named where it first stands.

    Of many figures with one goal the worst stands for all.
    """
    lines: list[str] = []
    places: set[str] = set()
    for measured in figures.values():
        place = place_of(measured.machine)
        where = "" if place in places else f"; {place}"
        places.add(place)
        rows = list(cells(_with_worst(measured.rows)))
        lines += [f"### {measured.title}", "", *markdown_table(HEADINGS, rows), ""]
        lines += [f"{measured.day}, commit {measured.commit}{where}", ""]
    return "\n".join(lines)


def _with_worst(rows: Sequence[Row]) -> list[Row]:
    """Return the rows, and of more than four without a peer that share a goal the one with the largest median."""
    shared = [row for row in rows if not row.theirs and row.at_most is not None and row.at_most == rows[0].at_most]
    if len(shared) <= 4 or len({row.unit for row in shared}) > 1:
        return list(rows)
    worst = max(shared, key=lambda row: statistics.median(row.ours))
    kept = [row for row in rows if row not in shared]
    return [replace(worst, what=f"the most of {len(shared)}: {worst.what}"), *kept]


def cells(rows: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    """Format rows under HEADINGS, as medians."""
    for row in rows:
        if row.left_out:
            yield row.what, row.left_out, "", "", ""
            continue
        yield (
            row.what,
            f"{_number(statistics.median(row.ours))} {row.unit}",
            f"{_number(statistics.median(row.theirs))} {row.unit}: {row.peer}" if row.theirs else "",
            f"{statistics.median(row.ratios):.2f}" if row.ratios else "",
            _goal(row),
        )


def _goal(row: Row) -> str:
    if row.at_most is None and row.at_least is None:
        return ""
    words = "at most" if row.at_most is not None else "at least"
    return f"{words} {_number(row.limit)}{'' if row.theirs else ' ' + row.unit}{'' if row.met else ', missed'}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def place_of(machine: Machine) -> str:
    """Describe a machine and its libraries in a line."""
    named = ", ".join(f"{name} {machine.libraries[name]}" for name in ("torch", "transformers", "prefect", "trl"))
    place = f"{machine.processor}, {machine.cores} cores, {machine.memory_gib} GiB, {machine.gpu or 'no GPU'}"
    return f"{place}; Python {machine.python}, {named}."
