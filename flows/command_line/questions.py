"""What commands ask in a terminal: how a run with other settings goes on, and what `grpo init` writes."""

import itertools
import json
import sys
from typing import TYPE_CHECKING, get_args

import typer

if TYPE_CHECKING:
    from configs.schema import RunConfig
    from flows.init.write import InitRequest
    from flows.pipeline.lineage import ChangedRunError

RESTART = "run.on_change=restart"


def is_terminal() -> bool:
    """Whether there is a person to ask: both the input and the messages are a terminal's."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def ask_about_change(change: "ChangedRunError") -> list[str]:
    """Let a person choose what becomes of a run that is started with other settings.

    Returns:
        Overrides of the configuration that carry out the choice.

    Raises:
        typer.Exit: the person wants to stop.
    """
    from rich.prompt import IntPrompt

    from flows.terminal.tables import stderr
    from tasks.reports.text import counted

    name = change.config.run.name
    named = [f"run.name={json.dumps(other := _free_name(change.config))}"]
    lines = (
        f"{name} has trained {counted(change.iterations, 'iteration')}, and {change.difference}.",
        f"  1  train in a new run, {other}, which reuses the stages that are unchanged",
        f"  2  train a new run, {other}, from the weights of {name}",
        f"  3  begin {name} at iteration 1; its results become the run {name}~1",
        "  4  stop",
    )
    for line in lines:
        typer.echo(line, err=True)
    chosen = IntPrompt.ask("Which", choices=["1", "2", "3", "4"], default=4, console=stderr())
    if chosen == len(lines) - 1:
        raise typer.Exit(1)
    return (named, [*named, f"run.continue_from={json.dumps(name)}"], [RESTART])[chosen - 1]


def ask_for_init(request: "InitRequest") -> "InitRequest":
    """Ask for what `grpo init` can be given as options; an empty answer keeps the default."""
    from rich.prompt import Prompt

    from configs.validation import validated
    from flows.init.templates import Kind
    from flows.init.write import InitRequest
    from flows.terminal.tables import stderr

    console = stderr()
    answers = {
        "kind": Prompt.ask(
            "Model: image (GLM-Image), diffusers (a text-to-image pipeline) or text",
            choices=list(get_args(Kind)),
            default="image",
            console=console,
        ),
        "model": Prompt.ask("Model, a folder or hub name (empty: the shipped tiny model)", default="", console=console),
        "prompts": Prompt.ask("Prompt file (empty: examples)", default="", console=console),
        "reward": Prompt.ask("Reward, of `grpo rewards list`, or own for a function", default="own", console=console),
    }
    given = {name: answer for name, answer in answers.items() if answer}
    return validated(InitRequest, {"folder": request.folder, **given})


def _free_name(config: "RunConfig") -> str:
    from tasks.runs.reader import RunReader
    from tasks.storage.artifacts.store import open_store

    taken = RunReader(open_store(config.storage, "")).names()
    names = (f"{config.run.name}-{number}" for number in itertools.count(2))
    return next(name for name in names if name not in taken)
