"""`make bench`: measure everything, or the parts that are named; the tables go to docs/performance.md.

The figures of a part are stored as soon as it is done.
"""

import sys
import time
from datetime import date
from importlib import import_module

from rich.console import Console

from flows.terminal.output import table_of
from tests.bench import make_parts
from tests.bench.page import HEADINGS, Measured, cells, store, this_machine

PARTS = {
    "text_iteration": ("text_iteration", "measure"),
    "released": ("released", "measure"),
    "denoising": ("denoising", "measure"),
    "sampling": ("policy", "measure_sampling"),
    "update": ("policy", "measure_update"),
    "orchestration": ("commands", "measure_orchestration"),
    "storage": ("storage", "measure"),
    "start": ("commands", "measure_start"),
}
"""Module and function of each part; the function's docstring begins with the title of its table."""

_WIDTH = None if sys.stdout.isatty() else 180


def measure(name: str, commit: str | None) -> None:
    """Measure a part, store it and print its table."""
    console, begun = Console(width=_WIDTH), time.perf_counter()
    module, function = PARTS[name]
    measured = getattr(import_module(f"tests.bench.{module}"), function)
    title = str(measured.__doc__).splitlines()[0].rstrip(".")
    rows = []
    for row in measured():
        rows.append(row)
        console.log(f"{name}: {row.what}", markup=False, highlight=False)
    minutes = round((time.perf_counter() - begun) / 60, 1)
    store(name, Measured(title, commit, date.today().isoformat(), minutes, this_machine(), tuple(rows)))
    console.print(table_of(f"{title} ({minutes} min)", HEADINGS, cells(rows), right=(1, 2)))


if __name__ == "__main__":
    make_parts("tests.bench", PARTS, measure)
