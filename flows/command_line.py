"""The program `grpo`: exit code 0 when done, 1 when it failed, 2 for wrong input."""

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from configs.loader import read_config
from configs.schema import RunConfig
from flows.prefect_settings import apply_settings
from grpo_core.errors import InputError, InputErrors

application = typer.Typer(
    name="grpo",
    help="GRPO training for image generators as a staged pipeline.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="a YAML file, such as configs/tiny.yaml")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="change one value, as section.key=value")
]
RunName = Annotated[str | None, typer.Option("--run", help="name of the run; by default the configuration's")]
Json = Annotated[bool, typer.Option("--json", help="one JSON object on the last line")]


def main() -> None:
    """Entry point of the program."""
    # Weights are read from folders or an existing cache; a run never waits for a hub it cannot reach.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    apply_settings()
    application()


@application.callback()
def program() -> None:
    """GRPO training for image generators as a staged pipeline."""


@contextmanager
def told_in_one_message() -> Iterator[None]:
    """Turn an error into one message on stderr and the exit code for its kind."""
    try:
        yield
    except (InputError, InputErrors) as error:
        problems = error.errors if isinstance(error, InputErrors) else (error,)
        for problem in problems:
            typer.secho(f"error: {problem}", fg="red", err=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        typer.secho("stopped; start it again with the same command and it goes on where it was", err=True)
        raise typer.Exit(1) from None
    except Exception as error:
        typer.secho(f"failed: {type(error).__name__}: {error}", fg="red", err=True)
        if os.environ.get("GRPO_TRACEBACK"):
            raise
        raise typer.Exit(1) from error


def resolved(config: Path, run: str | None, overrides: list[str] | None) -> RunConfig:
    """The configuration with its overrides."""
    named = [f"run.name={json.dumps(run)}"] if run is not None else []
    return read_config(config, [*(overrides or []), *named])


@application.command()
def train(config: Config, run: RunName = None, overrides: Overrides = None, as_json: Json = False) -> None:
    """Run, or go on with, a training run."""
    with told_in_one_message():
        checked = resolved(config, run, overrides)
        # Wrong input is told before Prefect and the models' libraries are imported, which takes many seconds.
        from flows.inputs import require_inputs

        require_inputs(checked)
        from flows.terminal import show_summary, training_progress
        from flows.train import train as train_flow

        with training_progress():
            summary = asyncio.run(train_flow(checked))
        show_summary(summary)
        if as_json:
            typer.echo(summary.model_dump_json())


if __name__ == "__main__":
    main()
