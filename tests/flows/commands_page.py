"""docs/commands.md: every command of grpo with every option, and every target of make.

`python -m tests.flows.commands_page` writes the page.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import typer

from flows.command_line.main import application
from tasks.process import CHECKOUT

PAGE = CHECKOUT / "docs" / "commands.md"
_TARGET = re.compile(r"^([\w-]+):.*## (.+)$", re.MULTILINE)
HEAD = """\
# Commands

`RUN` is a name below `--root`, or the path of a run's folder. `RUN@N` is version N of its policy, 0 is what training
started from, and `RUN@best` has the highest held-out reward. Exit codes: 0 success, 1 failure, 2 wrong input. All input
errors are reported together, before any model is loaded. `grpo --install-completion` completes in your shell.
"""


def page() -> str:
    """The whole page; an option that several commands have with one text stands at its head alone."""
    commands = list(_commands(typer.main.get_command(application), "grpo"))
    options = [each for _, command in commands for each in _options(command)]
    shared = {option for option, count in Counter(options).items() if count > 2}
    lines = [HEAD, "Of several commands:", "", *_listed(sorted(shared)), ""]
    for name, command in commands:
        arguments = [each for each in command.params if not each.opts[0].startswith("-")]
        usage = " ".join([name, *(each.metavar or each.name.upper() for each in arguments)])
        own = _options(command)
        also = ", ".join(sorted(option for option, _ in shared.intersection(own)))
        lines += [f"## `{usage}`", "", f"{_first(command.help)}{f' Also {also}.' if also else ''}", ""]
        if rows := [each for each in own if each not in shared]:
            lines += [*_listed(rows), ""]
    lines += ["## make", "", *_listed(_TARGET.findall((CHECKOUT / "Makefile").read_text()))]
    return "\n".join([*lines, ""])


def _listed(rows: Sequence[tuple[str, str]]) -> list[str]:
    return [f"- `{name.strip('`')}`: {text}" for name, text in rows]


def _options(command: Any) -> list[tuple[str, str]]:
    """Each option of a command with its value, and its help."""
    options = [each for each in command.params if each.opts[0].startswith("-")]
    values = [each.metavar or each.opts[0].strip("-").upper() for each in options]
    return [
        (f"`{each.opts[0]}{'' if each.is_flag else f' {value}'}`", each.help or "")
        for each, value in zip(options, values, strict=True)
    ]


def _commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    if command.hidden:
        return
    if not hasattr(command, "commands"):
        yield name, command
        return
    for inner, each in command.commands.items():
        yield from _commands(each, f"{name} {inner}")


def _first(text: str | None) -> str:
    return " ".join((text or "").partition("\n\n")[0].split())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
