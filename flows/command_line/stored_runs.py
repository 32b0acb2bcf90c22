"""The commands that read stored runs, or delete parts of them: inspect, list, compare, export, sample, prune."""

import json
from typing import Annotated

import typer

from flows import functions
from flows.command_line.options import Html, Json, Root, handle_errors, takes_request
from flows.command_line.questions import is_terminal
from flows.pipeline.requests import ExportRequest, SampleRequest
from flows.pruning.request import PruneRequest, check_request
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
    as_json: Json = False,
) -> None:
    """Show a run: curves, best and worst samples of each prompt, reward breakdown; nothing is changed."""
    with handle_errors(as_json):
        from flows.inspection.inspect_run import inspect_run

        inspection = inspect_run(run, root=root, iteration=iteration, html=html)
        if as_json:
            typer.echo(inspection.summary(html).model_dump_json())
            return
        from rich.console import Console

        from flows.terminal.inspection import show_run
        from flows.terminal.tables import show_report

        console = Console()
        show_report(inspection.report(html), console)
        if html is None:
            found = (inspection.run, inspection.groups, inspection.heldout)
            show_run(*found, console, everything=everything, config=config)


@commands.command("list")
def list_runs(
    root: Annotated[str, typer.Argument(metavar="[ROOT]", help="a folder or any fsspec URL")] = "runs",
    as_json: Json = False,
) -> None:
    """List the runs below a folder: state, iterations, rewards, when they last made progress."""
    with handle_errors(as_json):
        from flows.inspection.list_runs import list_runs as listed
        from flows.inspection.list_runs import runs_report

        runs = listed(root)
        if as_json:
            typer.echo(json.dumps({"root": root, "runs": [each.model_dump(mode="json") for each in runs]}))
            return
        from rich.console import Console

        from flows.terminal.tables import show_report

        show_report(runs_report(root, runs), Console())


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
    from flows.terminal.tables import show_report

    summary = write_export(plan)
    lines = usage(plan.config, request.push_to_hub or request.folder, merged=summary.kind == "merged")
    show_report(summary.report(lines))
    if as_json:
        typer.echo(summary.model_dump_json())


@commands.command()
@takes_request(SampleRequest)
def sample(request: SampleRequest, as_json: Json = False) -> None:
    """Draw or answer prompts at once, with a run's policy, an exported folder or any model."""
    from flows.sampling.source import open_source

    source = open_source(request)
    from rich.console import Console

    from flows.sampling.sample import sample as draw_samples
    from flows.terminal.inspection import show_sample

    for note in source.notes:
        typer.echo(note, err=True)
    samples, console = [], Console(stderr=as_json)
    for each in draw_samples(request, source):
        show_sample(f"{each.prompt} [{each.index}]", each.text, each.file, console)
        samples.append(each.model_dump())
    if as_json:
        typer.echo(json.dumps({"source": source.name, "samples": samples}, ensure_ascii=False))


@commands.command()
def compare(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="runs under the storage root, or their folders; RUN@N: a version"),
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

        from flows.comparison.compare_runs import compare as compare_runs
        from flows.comparison.compare_runs import summarize
        from flows.terminal.inspection import show_comparison
        from flows.terminal.tables import show_report
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
    functions.require_runs(request.sources, request.root)
    from rich.console import Console

    from flows.pruning.prune import prune as prune_runs
    from flows.terminal.tables import show_report

    if not (yes or request.dry_run):
        if not is_terminal():
            hint = "Add --yes to delete without a question, or --dry-run to see what would be deleted."
            raise InputError("grpo prune", "no terminal to ask in", hint)
        planned = prune_runs(request.model_copy(update={"dry_run": True}))
        show_report(planned.report())
        if planned.bytes:
            typer.confirm("Delete this?", abort=True, err=True)
    summary = prune_runs(request)
    show_report(summary.report(), Console(stderr=as_json))
    if as_json:
        typer.echo(summary.model_dump_json())
