"""The program `grpo`: exit code 0 for success, 1 for a failure, 2 for wrong input.

Commands import what they need when they are called: `grpo --help` imports neither torch nor Prefect, and wrong input is
reported before Prefect and the models' libraries are imported, which takes many seconds.
"""

import asyncio
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.command_line.errors import Json, handle_errors
from flows.command_line.options import Config, Overrides, RunName, takes_request
from flows.command_line.prune import prune
from flows.command_line.rewards import commands as reward_commands
from flows.command_line.worker import worker

if TYPE_CHECKING:
    from configs.schema import RunConfig
    from flows.pipeline.requests import EvaluateRequest, ReplayRequest, RescoreRequest

application = typer.Typer(
    name="grpo",
    help="Train image generators and language models with rewards.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

application.add_typer(reward_commands)
application.command()(worker)
application.command()(prune)


def main() -> None:
    """Run the program."""
    # Its warning about a fork would interrupt the run's own lines.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    application()


@application.callback()
def program() -> None:
    """Train image generators and language models with rewards."""


def resolved(config: Path, run: str | None, overrides: list[str] | None) -> "RunConfig":
    """Read the configuration with its overrides."""
    # Checking rewards imports torch, which a command without a configuration does not need.
    from configs.loader import read_config

    named = [f"run.name={json.dumps(run)}"] if run is not None else []
    return read_config(config, [*(overrides or []), *named])


@application.command()
def train(
    config: Config,
    run: RunName = None,
    overrides: Overrides = None,
    accept_code: Annotated[
        bool, typer.Option("--accept-code", help="resume with stored results that other code made, and record it")
    ] = False,
    as_json: Json = False,
) -> None:
    """Start or resume a training run."""
    with handle_errors(as_json):
        checked = resolved(config, run, overrides)
        from flows.preflight.inputs import check_inputs

        check_inputs(checked)
        from flows.terminal.progress import training_progress
        from flows.terminal.summaries import show_training
        from flows.training.train import train as train_flow

        with training_progress():
            summary = asyncio.run(train_flow(checked, accept_code=accept_code))
        show_training(summary)
        if as_json:
            typer.echo(summary.model_dump_json())


@application.command()
@takes_request("ReplayRequest")
def replay(request: "ReplayRequest", as_json: bool) -> None:
    """Train a policy from another run's stored rollouts, off-policy corrected; no training rollouts are sampled."""
    _ = request.plan
    from flows.replay.replay import replay as replay_flow
    from flows.terminal.progress import training_progress
    from flows.terminal.summaries import show_training

    with training_progress():
        summary = asyncio.run(replay_flow(request))
    show_training(summary)
    if as_json:
        typer.echo(summary.model_dump_json())


@application.command()
@takes_request("RescoreRequest")
def rescore(request: "RescoreRequest", as_json: bool) -> None:
    """Score stored rollouts with other rewards or weights and report what changed; only missing scores are computed."""
    _ = request.plan
    from flows.server.reachable import require_server

    require_server()
    from flows.rescoring.rescore import rescore as rescore_flow
    from flows.terminal.progress import training_progress
    from flows.terminal.rewards import show_rescoring

    with training_progress():
        done = asyncio.run(rescore_flow(request))
    show_rescoring(done)
    if as_json:
        typer.echo(done.summary.model_dump_json())


@application.command()
@takes_request("EvaluateRequest")
def evaluate(request: "EvaluateRequest", as_json: bool) -> None:
    """Evaluate a policy version on held-out prompts with fixed seeds; stored results are not computed again."""
    _ = request.plan
    from flows.server.reachable import require_server

    require_server()
    from flows.evaluation.evaluate import evaluate as evaluate_flow
    from flows.terminal.progress import training_progress
    from flows.terminal.summaries import show_evaluation

    with training_progress():
        summary = asyncio.run(evaluate_flow(request))
    show_evaluation(summary)
    if as_json:
        typer.echo(summary.model_dump_json())


@application.command()
def deploy(
    config: Config,
    cron: Annotated[
        str | None, typer.Option(metavar="EXPRESSION", help='when to train, such as "0 2 * * *"; "" ends the schedule')
    ] = None,
    timezone: Annotated[str | None, typer.Option(metavar="TZ", help="time zone of --cron; by default UTC")] = None,
    pool: Annotated[str, typer.Option(help="work pool whose workers run it")] = "training",
    name: Annotated[str | None, typer.Option(help="name of the deployments; by default the run's")] = None,
    with_evaluation: Annotated[bool, typer.Option("--evaluate", help="also register evaluations of the run")] = False,
    rescorings: Annotated[
        list[Path] | None,
        typer.Option("--rescore", metavar="FILE", help="also register a rescoring with these rewards"),
    ] = None,
    run: RunName = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Register a configuration with Prefect's server, to be started by a schedule, in the UI or by hand."""
    with handle_errors(as_json):
        checked = resolved(config, run, overrides)
        from flows.deployment.deploy import DeployRequest, deploy_run
        from flows.terminal.summaries import show_deployed

        requested = DeployRequest(checked, name, pool, cron, timezone, with_evaluation, tuple(rescorings or ()))
        deployed = asyncio.run(deploy_run(requested))
        show_deployed(deployed)
        if as_json:
            typer.echo(deployed.model_dump_json())


@application.command()
def doctor(config: Config, overrides: Overrides = None, as_json: Json = False) -> None:
    """Check configuration, weights, memory, storage and server, and suggest a fix for every problem."""
    with handle_errors(as_json):
        checked = resolved(config, None, overrides)
        from flows.preflight.doctor import examine
        from flows.terminal.summaries import show_diagnosis

        diagnosis = examine(checked)
        show_diagnosis(diagnosis)
        if as_json:
            findings = [asdict(finding) for finding in diagnosis.findings]
            needed = diagnosis.memory.needed if diagnosis.memory else None
            typer.echo(json.dumps({"healthy": diagnosis.healthy, "findings": findings, "memory_bytes": needed}))
    if not diagnosis.healthy:
        raise typer.Exit(2)


@application.command()
def inspect(
    run: Annotated[str, typer.Argument(metavar="RUN", help="a run under the storage root, or the path of its folder")],
    iteration: Annotated[int | None, typer.Option(help="iteration to show; by default the last with rewards")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="write one page that needs no server")] = None,
    root: Annotated[
        str, typer.Option(metavar="DIR", help="where runs are stored: a folder or any fsspec URL")
    ] = "runs",
    as_json: Json = False,
) -> None:
    """Show a run: curves, best and worst samples of each prompt, reward breakdown; nothing is changed."""
    with handle_errors(as_json):
        from flows.inspection.inspect_run import inspect_run
        from flows.terminal.inspection import report

        inspection = inspect_run(run, root=root, iteration=iteration, html=html)
        report(inspection, html, to_stderr=as_json)
        if as_json:
            typer.echo(inspection.summary(html).model_dump_json())


@application.command()
def ui(
    port: Annotated[int, typer.Option(help="port of the page and the API; 0 for a free one")] = 4200,
    host: Annotated[str, typer.Option(help="address to listen on; --auth is required beyond this machine")] = (
        "127.0.0.1"
    ),
    url: Annotated[str | None, typer.Option(help="address that others use, such as a TLS proxy's https://...")] = None,
    auth: Annotated[
        bool, typer.Option("--auth", help="require the USER:PASSWORD in PREFECT_SERVER_API_AUTH_STRING")
    ] = False,
    csrf: Annotated[bool, typer.Option("--csrf", help="protect against cross-site requests in the browser")] = False,
    database: Annotated[
        str | None,
        typer.Option(metavar="URL", help="database URL without a password; or set PREFECT_API_DATABASE_CONNECTION_URL"),
    ] = None,
) -> None:
    """Start Prefect's server with its UI: stages, reports and images of every run, schedules and work pools."""
    with handle_errors():
        from flows.server.start import ServerRequest, serve

        serve(ServerRequest(host, port, url, auth, csrf, database), typer.echo)


if __name__ == "__main__":
    main()
