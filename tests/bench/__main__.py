"""`make bench`: measure everything, or the modules that are named; the tables go to docs/performance.md.

Each module's figures are stored as soon as it is done, so that one that fails costs no other.
"""

import argparse
import time
from datetime import date
from importlib import import_module

from rich.console import Console

from flows.terminal.tables import table_of
from tasks.checkout import code_version
from tests.bench.page import HEADINGS, Measured, cells, store, this_machine

MODULES = ("text_iteration", "sampling", "update", "orchestration", "storage", "start")


def main() -> None:
    """Measure one module after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=", ".join(MODULES))
    chosen = parser.parse_args().modules
    if unknown := sorted({*chosen} - {*MODULES}):
        parser.error(f"{', '.join(unknown)}: not one of {', '.join(MODULES)}")
    console = Console()
    for name in chosen or MODULES:
        begun, rows = time.perf_counter(), []
        module = import_module(f"tests.bench.{name}")
        title = module.__doc__.splitlines()[0].rstrip(".")
        for row in module.measure():
            rows.append(row)
            console.log(f"{name}: {row.what}", markup=False, highlight=False)
        minutes = round((time.perf_counter() - begun) / 60, 1)
        store(name, Measured(title, code_version(), date.today().isoformat(), minutes, this_machine(), tuple(rows)))
        console.print(table_of(f"{title} ({minutes} min)", HEADINGS, cells(rows), right=(1, 2)))


if __name__ == "__main__":
    main()
