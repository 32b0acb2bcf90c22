"""`make bench`: measure everything, or the parts that are named; the tables go to docs/performance.md.

Each part is measured in a process of its own, and its figures are stored as soon as it is done: nothing that one
loads weighs on another, and one that fails costs no other.
"""

import argparse
import subprocess
import sys
import time
from datetime import date
from importlib import import_module

from rich.console import Console

from flows.terminal.output import table_of
from tasks.process import code_version
from tests.bench import NEEDS_VLLM
from tests.bench.page import HEADINGS, Measured, cells, store, this_machine

PARTS = {
    "text_iteration": ("text_iteration", "measure"),
    "vision": ("vision", "measure"),
    "denoising": ("denoising", "measure"),
    "engines": ("engines", "measure"),
    "engines_large": ("engines", "measure_large"),
    "sampling": ("policy", "measure_sampling"),
    "update": ("policy", "measure_update"),
    "orchestration": ("commands", "measure_orchestration"),
    "storage": ("storage", "measure"),
    "start": ("commands", "measure_start"),
}
"""Module and function of each part; the function's docstring begins with the title of its table."""

_WIDTH = None if sys.stdout.isatty() else 180


def main() -> None:
    """Measure one part here, or several one after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--commit", default=code_version(), help="what is measured; by default what is checked out")
    options = parser.parse_args()
    names = options.parts or [name for name in PARTS if name not in NEEDS_VLLM]
    if unknown := sorted({*names} - {*PARTS}):
        parser.error(f"{', '.join(unknown)}: not one of {', '.join(PARTS)}")
    if len(names) == 1:
        measure(names[0], options.commit)
        return
    # Taken once: the figures of the first part are a change of the checkout.
    same = ["--commit", options.commit] if options.commit else []
    commands = {name: [sys.executable, "-m", "tests.bench", name, *same] for name in names}
    failed = [name for name, command in commands.items() if subprocess.run(command).returncode]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; measure them again with make bench ONLY='{' '.join(failed)}'")


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
    main()
