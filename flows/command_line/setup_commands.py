"""The commands before and beside a run: `grpo deploy`, `doctor`, `init`, `ui` and `worker`."""

import json
import shlex
from dataclasses import asdict
from functools import partial
from typing import Annotated

import typer

from flows.command_line.options import (
    Config,
    Json,
    Load,
    Memory,
    Overrides,
    RunName,
    all_overrides,
    ask_for_init,
    handle_errors,
    is_terminal,
    print_result,
    takes_request,
)
from flows.requests import DeployRequest, InitRequest
from flows.server.start import ServerRequest, serve
from grpo_core.errors import InputError

commands = typer.Typer()


@commands.command()
@takes_request(DeployRequest)
def deploy(
    request: DeployRequest,
    config: Config,
    run: RunName = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Register a configuration with Prefect's server, to be started by a schedule, in the UI or by hand."""
    given = all_overrides(config, run, overrides)
    from configs.loader import read_config

    # First, since what is wrong with it is reported before Prefect is imported.
    checked = read_config(config, given)
    import asyncio

    from flows.deploy import deploy_run

    deployed = asyncio.run(deploy_run(request, checked))
    print_result(deployed.report(), deployed, as_json)


@commands.command()
def doctor(
    config: Config, overrides: Overrides = None, memory: Memory = False, load: Load = False, as_json: Json = False
) -> None:
    """Check configuration, weights, memory, storage and server, and suggest a fix for every problem."""
    with handle_errors(as_json):
        given = all_overrides(config, None, overrides)
        from configs.loader import read_config

        checked = read_config(config, given)
        from flows.preflight.doctor import examine

        diagnosis = examine(checked, partial(typer.echo, err=True), load=load)
        if diagnosis.healthy:
            from flows.pipeline.run import start_problems

            diagnosis = diagnosis.with_problems("run", start_problems(checked))
        findings = [asdict(finding) for finding in diagnosis.findings]
        needed = diagnosis.memory.needed if diagnosis.memory else None
        loaded = asdict(diagnosis.loaded) if diagnosis.loaded else None
        result = {"healthy": diagnosis.healthy, "findings": findings, "memory_bytes": needed, "loaded": loaded}
        print_result(diagnosis.report(tables=memory), result, as_json)
    if not diagnosis.healthy:
        raise typer.Exit(2)


@commands.command()
@takes_request(InitRequest)
def init(request: InitRequest, as_json: Json = False) -> None:
    """Write a folder with a commented configuration for your own prompts, reward and model; asks without options."""
    from flows.init.write_folder import write_folder

    files, notes = write_folder(ask_for_init(request) if request.asks_for_nothing and is_terminal() else request)
    for path in files:
        typer.echo(f"wrote {path}", err=True)
    for note in notes:
        typer.echo(note, err=True)
    config = shlex.quote(str(files[0]))
    typer.echo(f"next: grpo doctor {config}, then grpo train {config}", err=True)
    if as_json:
        typer.echo(json.dumps({"files": [str(path) for path in files]}))


@commands.command()
@takes_request(ServerRequest)
def ui(request: ServerRequest) -> None:
    """Start Prefect's server with its UI: stages, reports and images of every run, schedules and work pools."""
    serve(request, typer.echo)


@commands.command()
def worker(
    pool: Annotated[str, typer.Argument(metavar="POOL", help="created if it does not exist")],
    idle: Annotated[
        float | None, typer.Option(metavar="SECONDS", min=1, help="end after so long without work; by default never")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="end after N flow runs: stages and deployed runs")
    ] = None,
) -> None:
    """Run the stages that are sent to a work pool, one at a time with a resident model, and one deployed run."""
    with handle_errors():
        from flows.server.reachable import require_server, server_database, server_url

        if server_url() is None:
            hint = "Its work comes from a server: start one with `grpo ui` and export the address that it prints."
            raise InputError("PREFECT_API_URL", None, hint)
        require_server()
        if server_database() == "sqlite":
            typer.secho(
                "the server keeps its records in SQLite, which stalls with workers: see docs/operations.md", err=True
            )
        import asyncio

        from flows.terminal.progress import training_progress
        from flows.worker import serve as serve_pool

        with training_progress():
            asyncio.run(serve_pool(pool, idle, limit))
