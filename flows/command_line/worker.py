"""`grpo worker`: a process that does the stages of a work pool."""

import asyncio
from typing import Annotated

import typer

from flows.command_line.errors import handle_errors
from grpo_core.errors import InputError


def worker(
    pool: Annotated[str, typer.Argument(metavar="POOL", help="made if there is none of this name")],
) -> None:
    """Do the stages that runs send to a work pool, one by one, the model kept; beside them, one run deployed to it."""
    with handle_errors():
        from flows.server.reachable import require_server, server_database, server_url

        if server_url() is None:
            hint = "A worker asks a server for work: start one with `grpo ui` and export the address that it prints."
            raise InputError("PREFECT_API_URL", None, hint)
        require_server()
        if server_database() == "sqlite":
            typer.secho(
                "the server keeps its records in SQLite, which stalls with workers: see docs/operations.md", err=True
            )
        from flows.terminal.progress import training_progress
        from flows.workers.worker import serve

        with training_progress():
            asyncio.run(serve(pool))
