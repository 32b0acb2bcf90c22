"""`grpo worker`: a process that runs the stages of a work pool."""

import asyncio
from typing import Annotated

import typer

from flows.command_line.errors import handle_errors
from grpo_core.errors import InputError


def worker(
    pool: Annotated[str, typer.Argument(metavar="POOL", help="created if it does not exist")],
) -> None:
    """Run the stages that are sent to a work pool, one at a time with a resident model, and one deployed run."""
    with handle_errors():
        from flows.server.reachable import require_server, server_database, server_url

        if server_url() is None:
            hint = (
                "A worker gets its work from a server: start one with `grpo ui` and export the address that it prints."
            )
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
