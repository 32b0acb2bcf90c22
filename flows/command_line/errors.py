"""What every command tells in the same way: an error as one message, and one JSON object at the end."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from grpo_core.errors import InputError, InputErrors

Json = Annotated[bool, typer.Option("--json", help="one JSON object on the last line")]


@contextmanager
def handle_errors() -> Iterator[None]:
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
    except BaseException as error:
        # Prefect's own, in the place of what SIGTERM does elsewhere; by name, since it takes seconds to import.
        if type(error).__name__ == "TerminationSignal":
            typer.secho("ended by SIGTERM; start it again with the same command", err=True)
            raise typer.Exit(1) from None
        if not isinstance(error, Exception) or isinstance(error, typer.Exit):
            raise
        typer.secho(f"failed: {type(error).__name__}: {error}", fg="red", err=True)
        if os.environ.get("GRPO_TRACEBACK"):
            raise
        raise typer.Exit(1) from error
