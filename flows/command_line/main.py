"""The program `grpo`: exit code 0 when done, 1 when it failed, 2 for wrong input."""

import asyncio
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.command_line.errors import Json, handle_errors
from flows.command_line.prune import prune
from flows.command_line.rewards import commands as reward_commands
from flows.command_line.worker import worker

if TYPE_CHECKING:
    from configs.schema import RunConfig

application = typer.Typer(
    name="grpo",
    help="GRPO training for image generators as a staged pipeline.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

application.add_typer(reward_commands)
application.command()(worker)
application.command()(prune)

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="a YAML file, such as configs/tiny.yaml")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="change one value, as section.key=value")
]
RunName = Annotated[str | None, typer.Option("--run", help="name of the run; by default the configuration's")]


def main() -> None:
    """Entry point of the program."""
    # Its warning about a fork would stand among the run's own lines.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    application()


@application.callback()
def program() -> None:
    """GRPO training for image generators as a staged pipeline."""


def resolved(config: Path, run: str | None, overrides: list[str] | None) -> "RunConfig":
    """The configuration with its overrides."""
    # Checking rewards imports torch, which a command without a configuration need not wait for.
    from configs.loader import read_config

    named = [f"run.name={json.dumps(run)}"] if run is not None else []
    return read_config(config, [*(overrides or []), *named])


@application.command()
def train(config: Config, run: RunName = None, overrides: Overrides = None, as_json: Json = False) -> None:
    """Run, or go on with, a training run."""
    with handle_errors():
        checked = resolved(config, run, overrides)
        # Wrong input is told before Prefect and the models' libraries are imported, which takes many seconds.
        from flows.preflight.inputs import require_inputs

        require_inputs(checked)
        from flows.terminal.progress import training_progress
        from flows.terminal.training import show_summary
        from flows.training.train import train as train_flow

        with training_progress():
            summary = asyncio.run(train_flow(checked))
        show_summary(summary)
        if as_json:
            typer.echo(summary.model_dump_json())


@application.command()
def replay(
    source: Annotated[str, typer.Argument(metavar="RUN", help="a run under the storage root, or its folder's path")],
    advantages: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="stored, recomputed, or a name below rescored/; stored unless --set says so"),
    ] = None,
    iterations: Annotated[
        str | None, typer.Option(metavar="A-B", help="of the source, one update each; by default all")
    ] = None,
    policy: Annotated[int, typer.Option(metavar="N", help="version of the source to start from; 0: the model")] = 0,
    max_staleness: Annotated[
        int, typer.Option(metavar="K", help="versions between a row's policy and the one that is trained, at most")
    ] = 4,
    run: Annotated[str | None, typer.Option("--run", help="name of the replay; by default RUN-replay")] = None,
    overrides: Overrides = None,
    root: Annotated[str, typer.Option(metavar="DIR", help="where runs are kept")] = "runs",
    as_json: Json = False,
) -> None:
    """Train a policy from another run's stored rollouts, off-policy corrected; nothing is sampled to train on."""
    with handle_errors():
        from flows.preflight.inputs import require_inputs
        from flows.replay.request import ReplayRequest, plan_replay

        requested = ReplayRequest(
            source, root, run, advantages, iterations, policy, max_staleness, tuple(overrides or ())
        )
        plan = plan_replay(requested)
        require_inputs(plan.config)
        from flows.replay.replay import replay as replay_flow
        from flows.terminal.progress import training_progress
        from flows.terminal.training import show_summary

        with training_progress():
            summary = asyncio.run(replay_flow(plan))
        show_summary(summary)
        if as_json:
            typer.echo(summary.model_dump_json())


@application.command()
def rescore(
    sources: Annotated[list[str], typer.Argument(metavar="RUN...", help="runs under the storage root, or their paths")],
    rewards: Annotated[Path, typer.Option(metavar="FILE", help="YAML with `rewards:`, and `advantages:` if wanted")],
    name: Annotated[str, typer.Option(metavar="NAME", help="of the rescoring: a folder below rescored/ of each run")],
    iterations: Annotated[str | None, typer.Option(metavar="A-B", help="which; by default all")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="write the report here too")] = None,
    root: Annotated[str, typer.Option(metavar="DIR", help="where runs are kept")] = "runs",
    as_json: Json = False,
) -> None:
    """Score stored rollouts with other rewards or weights, and tell what changed; only what is missing is computed."""
    with handle_errors():
        from flows.rescoring.request import RescoreRequest, plan_rescore

        plan = plan_rescore(RescoreRequest(tuple(sources), rewards, name, root, iterations, html))
        from flows.server.reachable import require_server

        require_server()
        from rich.console import Console

        from flows.rescoring.rescore import rescore as rescore_flow
        from flows.terminal.progress import training_progress
        from flows.terminal.rescoring import show_comparison, show_computed

        with training_progress():
            done = asyncio.run(rescore_flow(plan))
        console = Console(stderr=True)
        show_comparison(done.comparison, done.moved, console)
        show_computed(done.summary, console)
        if as_json:
            typer.echo(done.summary.model_dump_json())


@application.command()
def evaluate(
    run: Annotated[str, typer.Argument(metavar="RUN", help="a run under the storage root, or its folder's path")],
    policy: Annotated[
        int | None, typer.Option(metavar="N", help="version; 0: the model; by default the last whole one")
    ] = None,
    prompts: Annotated[str | None, typer.Option(metavar="FILE", help="in place of the run's held-out prompts")] = None,
    overrides: Overrides = None,
    root: Annotated[str, typer.Option(metavar="DIR", help="where runs are kept")] = "runs",
    as_json: Json = False,
) -> None:
    """Held-out scores of a policy version, with fixed seeds; what is stored is not computed again."""
    with handle_errors():
        from flows.evaluation.request import read_request

        requested = {"run": run, "policy": policy, "prompts": prompts, "overrides": overrides or [], "root": root}
        request = read_request(requested)
        # Wrong input is told before Prefect starts a server, which takes many seconds.
        _ = request.plan
        from flows.server.reachable import require_server

        require_server()
        from flows.evaluation.evaluate import evaluate as evaluate_flow
        from flows.terminal.evaluation import show_evaluation
        from flows.terminal.progress import training_progress

        with training_progress():
            summary = asyncio.run(evaluate_flow(request))
        show_evaluation(summary)
        if as_json:
            typer.echo(summary.model_dump_json())


@application.command()
def deploy(
    config: Config,
    cron: Annotated[
        str | None, typer.Option(metavar="EXPRESSION", help='when it trains, as "0 2 * * *"; "" ends the schedule')
    ] = None,
    timezone: Annotated[str | None, typer.Option(metavar="TZ", help="of --cron; by default UTC")] = None,
    pool: Annotated[str, typer.Option(help="work pool whose workers run it")] = "training",
    name: Annotated[str | None, typer.Option(help="of the deployments; by default the run's")] = None,
    with_evaluation: Annotated[bool, typer.Option("--evaluate", help="evaluations of the run too")] = False,
    rescorings: Annotated[
        list[Path] | None, typer.Option("--rescore", metavar="FILE", help="and a rescoring with these rewards")
    ] = None,
    run: RunName = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Register a configuration with Prefect's server, to be started by a schedule, in the UI or by hand."""
    with handle_errors():
        checked = resolved(config, run, overrides)
        from flows.deployment.deploy import DeployRequest, deploy_run
        from flows.terminal.deployment import show_deployed

        requested = DeployRequest(checked, name, pool, cron, timezone, with_evaluation, tuple(rescorings or ()))
        deployed = asyncio.run(deploy_run(requested))
        show_deployed(deployed)
        if as_json:
            typer.echo(deployed.model_dump_json())


@application.command()
def doctor(config: Config, overrides: Overrides = None, as_json: Json = False) -> None:
    """Check a configuration, weights, memory, storage and server: each finding with its hint."""
    with handle_errors():
        checked = resolved(config, None, overrides)
        from flows.preflight.doctor import examine
        from flows.terminal.doctor import show_diagnosis

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
    run: Annotated[str, typer.Argument(metavar="RUN", help="a run under the storage root, or its folder's path")],
    iteration: Annotated[int | None, typer.Option(help="which to show; by default the last with rewards")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="write one page that needs no server")] = None,
    root: Annotated[str, typer.Option(metavar="DIR", help="where runs are kept")] = "runs",
    as_json: Json = False,
) -> None:
    """Show a run: curves, best and worst images a prompt, reward breakdown; nothing is changed."""
    with handle_errors():
        from flows.inspection.inspect_run import inspect_run
        from flows.terminal.inspection import report

        inspection = inspect_run(run, root=root, iteration=iteration, html=html)
        report(inspection, html, to_stderr=as_json)
        if as_json:
            typer.echo(inspection.summary(html).model_dump_json())


@application.command()
def ui(
    port: Annotated[int, typer.Option(help="of the page and the API; 0 for a free one")] = 4200,
    host: Annotated[str, typer.Option(help="address to listen on; others than this machine's own need --auth")] = (
        "127.0.0.1"
    ),
    url: Annotated[str | None, typer.Option(help="where others find it, such as a TLS proxy's https://...")] = None,
    auth: Annotated[
        bool, typer.Option("--auth", help="ask for the USER:PASSWORD in PREFECT_SERVER_API_AUTH_STRING")
    ] = False,
    csrf: Annotated[bool, typer.Option("--csrf", help="protect against pages of others in the same browser")] = False,
    database: Annotated[
        str | None, typer.Option(metavar="URL", help="without a password; or PREFECT_API_DATABASE_CONNECTION_URL")
    ] = None,
) -> None:
    """Start Prefect's server with its UI: stages, reports and images of every run, schedules and work pools."""
    with handle_errors():
        from flows.server.start import ServerRequest, serve

        serve(ServerRequest(host, port, url, auth, csrf, database), typer.echo)


if __name__ == "__main__":
    main()
