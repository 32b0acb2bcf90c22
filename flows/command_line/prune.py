"""`grpo prune`: deletes stored policy versions and images."""

from typing import Annotated

import typer

from flows.command_line.errors import Json, handle_errors


def prune(
    sources: Annotated[list[str], typer.Argument(metavar="RUN...", help="runs under the storage root, or their paths")],
    policies_every: Annotated[
        int | None,
        typer.Option(metavar="N", help="keep policy versions N, 2N, ... and the last; the others are deleted"),
    ] = None,
    policies_last: Annotated[
        int | None, typer.Option(metavar="K", help="number of versions kept at the end; 2 by default")
    ] = None,
    images_older_than: Annotated[
        str | None,
        typer.Option(metavar="AGE", help="delete images this old: 30d, 12h, or 20i for all but the last 20 iterations"),
    ] = None,
    evaluations: Annotated[
        bool,
        typer.Option(
            "--evaluations", help="also delete images of evaluations, except the first, the best and the last"
        ),
    ] = False,
    previous_older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="delete folders this old in previous/ and quarantine/: 30d or 12h")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="report what would be deleted, and change nothing")
    ] = False,
    root: Annotated[str, typer.Option(metavar="DIR", help="where runs are stored: a folder or fsspec URL")] = "runs",
    as_json: Json = False,
) -> None:
    """Delete policy versions and images that nothing depends on; all records are kept, and runs can continue."""
    with handle_errors(as_json):
        from flows.pruning.request import PruneRequest, check_request

        request = PruneRequest(
            sources=tuple(sources),
            root=root,
            policies_every=policies_every,
            policies_last=policies_last,
            images_older_than=images_older_than,
            evaluations=evaluations,
            previous_older_than=previous_older_than,
            dry_run=dry_run,
        )
        # Wrong input is reported before Prefect and the models' libraries are imported, which takes many seconds.
        check_request(request)
        from rich.console import Console

        from flows.pruning.prune import prune as carry_out
        from flows.terminal.summaries import show_pruned

        summary = carry_out(request)
        show_pruned(summary, Console(stderr=as_json))
        if as_json:
            typer.echo(summary.model_dump_json())
