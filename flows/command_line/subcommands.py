"""The commands that read stored runs or delete parts of them, and `grpo rewards ...`."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from flows.command_line.options import Html, Json, Root, handle_errors, is_terminal, print_result, takes_request
from flows.pruning.request import PruneRequest, check_request
from flows.requests import TRUST, ExportRequest, SampleRequest
from grpo_core.errors import InputError

commands = typer.Typer()


@commands.command()
def inspect(
    run: Annotated[str, typer.Argument(metavar="RUN", help="a run under the storage root, or the path of its folder")],
    iteration: Annotated[int | None, typer.Option(help="iteration to show; by default the last with rewards")] = None,
    html: Html = None,
    root: Root = "runs",
    everything: Annotated[bool, typer.Option("--all", help="show every curve and metric, and more prompts")] = False,
    config: Annotated[bool, typer.Option("--config", help="show the configuration with all defaults")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="serve the page, which follows the run, until Ctrl-C")] = False,
    port: Annotated[int, typer.Option(help="port of --watch; by default a free one")] = 0,
    as_json: Json = False,
) -> None:
    """Show a run: curves, best and worst samples of each prompt, reward breakdown; nothing is changed."""
    with handle_errors(as_json):
        if watch:
            _watch(run, iteration=iteration, root=root, port=port, others={"--html": html, "--json": as_json})
            return
        from flows.inspect_run import inspect_run

        inspection = inspect_run(run, root=root, iteration=iteration, html=html)
        if as_json:
            typer.echo(inspection.summary(html).model_dump_json())
            return
        from rich.console import Console

        from flows.terminal.inspection import show_run
        from flows.terminal.output import show_report

        console = Console()
        show_report(inspection.report(html), console)
        if html is None:
            found = (inspection.run, inspection.samples.groups, inspection.samples.heldout)
            show_run(*found, console, everything=everything, config=config)


def _watch(run: str, *, iteration: int | None, root: str, port: int, others: Mapping[str, object]) -> None:
    for name, value in others.items():
        if value:
            raise InputError(name, str(value), "With --watch nothing is written or printed but the page's address.")
    from flows.watch_run import watch_run

    def started(address: str) -> None:
        typer.echo(f"{address} follows the run; Ctrl-C ends it")

    watch_run(run, root=root, port=port, iteration=iteration, started=started)


@commands.command("list")
def list_runs(
    root: Annotated[str, typer.Argument(metavar="[ROOT]", help="a folder or any fsspec URL")] = "runs",
    html: Html = None,
    as_json: Json = False,
) -> None:
    """List the runs below a folder: state, iterations, rewards, when they last made progress."""
    with handle_errors(as_json):
        from flows.list_runs import list_runs as listed
        from flows.list_runs import runs_report, write_list_page

        runs = listed(root)
        if html is not None:
            write_list_page(root, runs, html)
        if as_json:
            found = [each.model_dump(mode="json") for each in runs]
            typer.echo(json.dumps({"root": root, "runs": found, "html": str(html) if html else None}))
            return
        from rich.console import Console

        from flows.terminal.output import show_report

        report = runs_report(root, runs)
        show_report(
            report if html is None else replace(report, notes=[*report.notes, f"page written to {html}"]), Console()
        )


@commands.command()
@takes_request(ExportRequest)
def export(request: ExportRequest, as_json: Json = False) -> None:
    """Write a policy version as a folder that diffusers, transformers and peft load: adapter or merged model."""
    from flows.export.plan import plan_export

    plan = plan_export(request)
    for note in plan.notes:
        typer.echo(note, err=True)
    from flows.export.export import export as write_export
    from flows.export.usage import usage

    summary = write_export(plan)
    lines = usage(plan.config, request.push_to_hub or request.folder, merged=summary.kind == "merged")
    print_result(summary.report(lines), summary, as_json)


@commands.command()
@takes_request(SampleRequest)
def sample(request: SampleRequest, as_json: Json = False) -> None:
    """Draw or answer prompts at once, with a run's policy, an exported folder or any model."""
    from flows.sample import open_source

    source = open_source(request)
    from rich.console import Console

    from flows.sample import sample as draw_samples
    from flows.terminal.inspection import show_sample
    from grpo_core.rollouts.messages import shown_prompt

    for note in source.notes:
        typer.echo(note, err=True)
    samples, console = [], Console(stderr=as_json)
    for each in draw_samples(request, source):
        about = f"{shown_prompt(each.prompt)} [{each.index}]"
        show_sample(about, each.text, each.file, console, truncated=each.truncated)
        samples.append(each.model_dump())
    if as_json:
        typer.echo(json.dumps({"source": source.name, "samples": samples}, ensure_ascii=False))


@commands.command()
def compare(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...", help="runs under the storage root, or their folders; RUN@N or RUN@best: a version"
        ),
    ],
    html: Html = None,
    evaluation: Annotated[
        str | None, typer.Option(metavar="NAME", help="compare by an evaluation of other prompts, of evaluations_of/")
    ] = None,
    root: Root = "runs",
    as_json: Json = False,
) -> None:
    """Compare runs with the first: settings, curves, held-out samples side by side, paired differences."""
    with handle_errors(as_json):
        from rich.console import Console

        from flows.compare_runs import compare as compare_runs
        from flows.compare_runs import summarize
        from flows.terminal.inspection import show_comparison
        from flows.terminal.output import show_report
        from tasks.reports.compare_page import comparison_report, settings_table, shortened

        comparison = compare_runs(runs, root=root, html=html, evaluation=evaluation)
        console = Console(stderr=as_json)
        show_report(comparison_report(comparison, html), console)
        if html is None:
            show_comparison(comparison, shortened(settings_table(comparison)), console)
        if as_json:
            typer.echo(summarize(comparison, html).model_dump_json())


@commands.command()
@takes_request(PruneRequest)
def prune(
    request: PruneRequest,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="delete without asking")] = False,
    as_json: Json = False,
) -> None:
    """Delete policy versions and images that nothing depends on; all records are kept, and runs can continue."""
    check_request(request)
    from tasks.runs.lookup import find_run

    for source in request.sources:
        find_run(source, request.root)
    from flows.pruning.prune import prune as prune_runs
    from flows.terminal.output import show_report

    if not (yes or request.dry_run):
        if not is_terminal():
            hint = "Add --yes to delete without a question, or --dry-run to see what would be deleted."
            raise InputError("grpo prune", "no terminal to ask in", hint)
        planned = prune_runs(request.model_copy(update={"dry_run": True}))
        show_report(planned.report())
        if planned.bytes:
            typer.confirm("Delete this?", abort=True, err=True)
    summary = prune_runs(request)
    print_result(summary.report(), summary, as_json, stdout=True)


reward_commands = typer.Typer(
    name="rewards",
    help="List rewards, analyse stored scores, serve rewards over HTTP.",
    no_args_is_help=True,
)


@reward_commands.command("list")
def list_rewards(as_json: Json = False) -> None:
    """List every reward that a configuration may name, with its settings and their defaults."""
    with handle_errors(as_json):
        from inspect import getdoc

        from grpo_core.rewards.registry import REWARDS, reward_class, reward_settings
        from tasks.reports.report import Report, Table

        listed = {name: reward_settings(name) for name in REWARDS}
        rows = [
            {
                "reward": name,
                "value": (getdoc(reward_class(name)) or "").partition("\n\n")[0].replace("\n", " "),
                "settings": ", ".join(f"{setting}={default!r}" for setting, default in settings.items()),
            }
            for name, settings in listed.items()
        ]
        result = {name: {setting: str(value) for setting, value in each.items()} for name, each in listed.items()}
        print_result(Report("Rewards", tables=[Table("", rows, ("value", "settings"))]), result, as_json, stdout=True)


@reward_commands.command("fetch", hidden=True, context_settings={"ignore_unknown_options": True})
def fetch_weights(arguments: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Say how weights are fetched."""
    with handle_errors():
        hint = "Weights of the Hugging Face Hub are downloaded when they are first read; name them as hf://owner/repo/file."
        hint += " `grpo doctor CONFIG` names the address of each other file that is missing."
        raise InputError("grpo rewards fetch", " ".join(arguments or ()), f"There is no such command. {hint}")


@reward_commands.command()
def analyse(
    source: Annotated[str, typer.Argument(metavar="RUN", help="a run under the storage root, or its folder's path")],
    iterations: Annotated[str | None, typer.Option(metavar="A-B", help="iterations to analyse; by default all")] = None,
    rescored: Annotated[str | None, typer.Option(metavar="NAME", help="analyse the scores of this rescoring")] = None,
    repeats: Annotated[int, typer.Option(metavar="N", help="samples to score again to measure noise")] = 32,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="write one page that needs no server")] = None,
    trust_code: Annotated[bool, typer.Option("--trust-code", help=TRUST)] = False,
    root: Root = "runs",
    as_json: Json = False,
) -> None:
    """Analyse the rewards of a run: range, saturation, spread, agreement, noise and cost."""
    with handle_errors(as_json):
        from flows.rewards.analyse import analyse_rewards

        summary = analyse_rewards(
            source,
            root=root,
            iterations=iterations,
            rescored=rescored,
            repeats=repeats,
            html=html,
            trust_code=trust_code,
        )
        print_result(summary.report(), summary, as_json)


@reward_commands.command("serve")
def serve_rewards(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML with `rewards:`")],
    port: Annotated[int, typer.Option(help="0 for a free one")] = 8600,
    host: Annotated[str, typer.Option(help="address to listen on; a token is required beyond this machine")] = (
        "127.0.0.1"
    ),
    token_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="environment variable with the token that requests must bear")
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=1.0, max=86_400.0, metavar="SECONDS", help="time limit for scoring one request")
    ] = 60.0,
    concurrency: Annotated[
        int, typer.Option(min=1, max=64, help="requests scored at a time, each in a process with its own models")
    ] = 2,
) -> None:
    """Serve rewards over HTTP, as docs/remote_rewards.md describes; Ctrl-C stops it."""
    with handle_errors():
        from configs.loader import read_rewards_file
        from flows.rewards.server import ServerLimits, serve

        sections = read_rewards_file(file, "FILE").rewards
        serve(sections, host, port, token_env, limits=ServerLimits(timeout=timeout, concurrency=concurrency))
