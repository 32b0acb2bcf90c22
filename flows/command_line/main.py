"""The program `grpo`: exit code 0 for success, 1 for a failure, 2 for wrong input.

Commands import what they need when they are called: `grpo --help` imports neither torch nor Prefect, and wrong input is
reported before Prefect and the models' libraries are imported, which takes many seconds.
"""

import atexit
import contextlib
import faulthandler
import json
import logging
import os
import shlex
import signal
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from configs.policy_name import FORM
from flows import commands
from flows.command_line.options import (
    RESTART,
    Config,
    Json,
    Load,
    Memory,
    Overrides,
    RunName,
    ask_about_change,
    ask_for_init,
    handle_errors,
    is_terminal,
    print_result,
    server_is_lost,
    takes_request,
)
from flows.command_line.subcommands import commands as stored_run_commands
from flows.command_line.subcommands import reward_commands
from flows.pipeline.requests import DeployRequest, EvaluateRequest, InitRequest, ReplayRequest, RescoreRequest
from flows.server.start import ServerRequest, serve
from grpo_core.errors import InputError

application = typer.Typer(
    name="grpo",
    help="Train image generators and language models with rewards.",
    no_args_is_help=True,
    # Rich's help imports a Markdown parser: a third of the time that `grpo --help` takes.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

application.add_typer(stored_run_commands)
application.add_typer(reward_commands)


def run() -> None:
    """Run the program, and end the process with it."""
    codes: list[int] = []
    # A crash by a signal, such as in a library that a reward function uses, names the line; also in child processes.
    faulthandler.enable()
    # A script's shell starts what ends in `&` with SIGINT ignored; a run is stopped by it wherever it was started.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")
    # What is registered first is called last: then threads have ended, and everything else has cleaned up.
    atexit.register(_end, codes)
    try:
        main()
    except SystemExit as ended:
        codes.append(ended.code if isinstance(ended.code, int) else int(ended.code is not None))
        if server_is_lost():
            # Prefect's threads would try for minutes to send what nobody takes.
            _end(codes)
        raise


def _end(codes: list[int]) -> None:
    """End the process without taking its modules apart, which takes two seconds once torch has been imported."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if codes:
        os._exit(codes[-1])


def main() -> None:
    """Run the program."""
    # Its warning about a fork would interrupt the run's own lines.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    application()


def _show_version(asked: bool) -> None:
    if asked:
        import importlib.metadata

        typer.echo(f"grpo {importlib.metadata.version('grpo-staged')}")
        raise typer.Exit


@application.callback()
def program(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="print the version and stop")
    ] = False,
) -> None:
    """Train image generators and language models with rewards."""


def all_overrides(config: Path, run: str | None, overrides: list[str] | None, *chosen: str) -> list[str]:
    """Return the overrides of a configuration that is to be read, those of other options last."""
    from configs.yaml_files import yaml_value

    if config.is_file() and "torch" not in sys.modules:
        typer.echo(f"reading {config} ...", err=True)
    return [*(overrides or []), *([f"run.name={yaml_value(run)}"] if run is not None else []), *chosen]


@application.command()
def train(
    config: Config,
    run: RunName = None,
    overrides: Overrides = None,
    accept_code: Annotated[
        bool, typer.Option("--accept-code", help="resume with stored results that other code made, and record it")
    ] = False,
    continue_from: Annotated[
        str | None,
        typer.Option(metavar=FORM, help="train a new run from another's weights, by default the last"),
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="with other settings, start over; earlier results become the run NAME~1")
    ] = False,
    as_json: Json = False,
) -> None:
    """Start or resume a training run."""
    with handle_errors(as_json):
        from configs.yaml_files import yaml_value

        chosen = [f"run.continue_from={yaml_value(continue_from)}"] if continue_from is not None else []
        chosen += [RESTART] if restart else []
        given = all_overrides(config, run, overrides, *chosen)
        ask = ask_about_change if is_terminal() else None
        summary = commands.train(config, overrides=given, accept_code=accept_code, ask=ask)
        print_result(summary.report(), summary, as_json)


@application.command()
@takes_request(ReplayRequest)
def replay(request: ReplayRequest, as_json: Json = False) -> None:
    """Train a policy from another run's stored rollouts, off-policy corrected; no training rollouts are sampled."""
    summary = commands.replay(request)
    print_result(summary.report(), summary, as_json)


@application.command()
@takes_request(RescoreRequest)
def rescore(request: RescoreRequest, as_json: Json = False) -> None:
    """Score stored rollouts with other rewards or weights and report what changed; only missing scores are computed."""
    done = commands.rescore(request)
    print_result(done.report(), done.summary, as_json)


@application.command()
@takes_request(EvaluateRequest)
def evaluate(request: EvaluateRequest, as_json: Json = False) -> None:
    """Evaluate a policy version on held-out prompts with fixed seeds; stored results are not computed again."""
    summary = commands.evaluate(request)
    print_result(summary.report(), summary, as_json)


@application.command()
@takes_request(DeployRequest)
def deploy(
    request: DeployRequest,
    config: Config,
    run: RunName = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Register a configuration with Prefect's server, to be started by a schedule, in the UI or by hand."""
    import asyncio

    given = all_overrides(config, run, overrides)
    from configs.loader import read_config

    # First, since what is wrong with it is reported before Prefect is imported.
    checked = read_config(config, given)
    from flows.deploy import deploy_run

    deployed = asyncio.run(deploy_run(request, checked))
    print_result(deployed.report(), deployed, as_json)


@application.command()
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
        result = {"healthy": diagnosis.healthy, "findings": findings, "memory_bytes": needed}
        print_result(diagnosis.report(tables=memory), result, as_json)
    if not diagnosis.healthy:
        raise typer.Exit(2)


@application.command()
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


@application.command()
@takes_request(ServerRequest)
def ui(request: ServerRequest) -> None:
    """Start Prefect's server with its UI: stages, reports and images of every run, schedules and work pools."""
    serve(request, typer.echo)


@application.command()
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
            hint = (
                "A worker gets its work from a server: start one with `grpo ui` and export the address that it prints."
            )
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


if __name__ == "__main__":
    run()
