"""What all commands share: how errors are reported, and the option `--json`."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from grpo_core.errors import InputError, InputErrors

Json = Annotated[bool, typer.Option("--json", help="print one JSON object as the last line")]


@contextmanager
def handle_errors(as_json: bool = False) -> Iterator[None]:
    """Turn an exception into messages on stderr and an exit code: 1 for a failure, 2 for wrong input.

    Args:
        as_json: also print the input errors as one JSON object on stdout, each with place, value and hint.
    """
    try:
        yield
    except (InputError, InputErrors) as error:
        problems = error.errors if isinstance(error, InputErrors) else (error,)
        for problem in problems:
            typer.secho(f"error: {problem}", fg="red", err=True)
        if as_json:
            errors = [{"place": each.place, "value": each.value, "hint": each.hint} for each in problems]
            typer.echo(json.dumps({"errors": errors}, default=str))
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        typer.secho("stopped; start it again with the same command and it resumes where it was", err=True)
        raise typer.Exit(1) from None
    except BaseException as error:
        # Prefect raises it instead of ending by SIGTERM; compared by name, since the import takes seconds.
        if type(error).__name__ == "TerminationSignal":
            typer.secho("ended by SIGTERM; start it again with the same command", err=True)
            raise typer.Exit(1) from None
        if not isinstance(error, Exception) or isinstance(error, typer.Exit):
            raise
        typer.secho(f"failed: {type(error).__name__}: {error}", fg="red", err=True)
        if os.environ.get("GRPO_TRACEBACK"):
            raise
        raise typer.Exit(1) from error
