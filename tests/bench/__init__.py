"""Benchmarks and figures of the docs: run by `make bench` and `make figures`, never by the tests."""

import argparse
import subprocess
import sys
from collections.abc import Callable, Collection

import flows  # noqa: F401  (its settings must stand before Prefect is imported)
from tasks.process import code_version


def make_parts(
    module: str, parts: Collection[str], make: Callable[[str, str | None], None], *, only_named: Collection[str] = ()
) -> None:
    """Make one part here, or several one after the other, each in a process of its own: one that fails costs no other.

    Args:
        module: the program, as `python -m` starts it.
        parts: all names.
        make: makes the part of a name from a commit.
        only_named: parts that are made only where the command line names them.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(parts))
    parser.add_argument("--commit", default=code_version(), help="what runs; by default what is checked out")
    options = parser.parse_args()
    names = options.parts or [name for name in parts if name not in only_named]
    if unknown := sorted({*names} - {*parts}):
        parser.error(f"{', '.join(unknown)}: not one of {', '.join(parts)}")
    if len(names) == 1:
        make(names[0], options.commit)
        return
    # The commit is taken once: what the first part writes is a change of the checkout.
    same = ["--commit", options.commit] if options.commit else []
    commands = {name: [sys.executable, "-m", module, name, *same] for name in names}
    if failed := [name for name, command in commands.items() if subprocess.run(command).returncode]:
        raise SystemExit(f"failed: {', '.join(failed)}; make them again with ONLY='{' '.join(failed)}'")
