"""`grpo prune`: retention of what runs have stored."""

from typing import Annotated

import typer

from flows.command_line.errors import Json, handle_errors


def prune(
    sources: Annotated[list[str], typer.Argument(metavar="RUN...", help="runs under the storage root, or their paths")],
    policies_every: Annotated[
        int | None, typer.Option(metavar="N", help="keep policy versions N, 2N, ... and the last; the others go")
    ] = None,
    policies_last: Annotated[
        int | None, typer.Option(metavar="K", help="versions kept at the end; 2 unless said otherwise")
    ] = None,
    images_older_than: Annotated[
        str | None,
        typer.Option(metavar="AGE", help="of iterations: 30d, 12h, or 20i for all but the last 20 iterations"),
    ] = None,
    evaluations: Annotated[
        bool, typer.Option("--evaluations", help="images of evaluations too, but of the first, the best and the last")
    ] = False,
    set_aside_older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="what was set aside, with the reason: 30d or 12h")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="tell what would go, and change nothing")] = False,
    root: Annotated[str, typer.Option(metavar="DIR", help="where runs are kept")] = "runs",
    as_json: Json = False,
) -> None:
    """Remove policy versions and images that nothing needs any more; all records stay, and runs go on as before."""
    with handle_errors():
        from flows.pruning.request import PruneRequest, read_rules

        request = PruneRequest(
            sources=tuple(sources),
            root=root,
            policies_every=policies_every,
            policies_last=policies_last,
            images_older_than=images_older_than,
            evaluations=evaluations,
            set_aside_older_than=set_aside_older_than,
            dry_run=dry_run,
        )
        # Wrong input is told before Prefect and the models' libraries are imported, which takes many seconds.
        read_rules(request)
        from rich.console import Console

        from flows.pruning.prune import prune as carry_out
        from flows.terminal.pruning import show_pruned

        summary = carry_out(request)
        show_pruned(summary, Console(stderr=as_json))
        if as_json:
            typer.echo(summary.model_dump_json())
