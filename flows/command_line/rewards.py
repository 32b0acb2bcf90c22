"""The commands `grpo rewards ...`: list rewards, fetch their weights, analyse stored scores, serve over HTTP."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flows.command_line.options import Json, Root, handle_errors
from grpo_core.errors import InputError

if TYPE_CHECKING:
    from grpo_core.rewards.weights.source import Weights
    from tasks.reports.report import Table

commands = typer.Typer(
    name="rewards",
    help="List rewards, fetch weights, analyse stored scores, serve rewards over HTTP.",
    no_args_is_help=True,
)


@commands.command("list")
def list_rewards(as_json: Json = False) -> None:
    """List every reward that a configuration may name, with its settings and their defaults."""
    with handle_errors(as_json):
        from rich.console import Console

        from flows.terminal.tables import show_report
        from grpo_core.rewards.registry import REWARDS, reward_settings
        from tasks.reports.report import Report

        show_report(Report("Rewards", tables=[listed_rewards()]), Console(stderr=as_json))
        if as_json:
            listed = {
                name: {setting: str(default) for setting, default in reward_settings(name).items()} for name in REWARDS
            }
            typer.echo(json.dumps(listed))


def listed_rewards() -> "Table":
    """Return each reward with what its value means, and its settings with their defaults."""
    import inspect

    from grpo_core.rewards.registry import REWARDS, reward_class
    from tasks.reports.report import Table

    rows = []
    for name in REWARDS:
        kind = reward_class(name)
        settings = [f"{each.name}={each.default!r}" for each in inspect.signature(kind).parameters.values()]
        meaning = (inspect.getdoc(kind) or "").partition("\n\n")[0].replace("\n", " ")
        rows.append({"reward": name, "value": meaning, "settings": ", ".join(settings)})
    return Table("", rows, ("value", "settings"))


@commands.command("fetch")
def fetch_weights(
    rewards: Annotated[
        list[str], typer.Argument(metavar="REWARD...|CONFIG", help="names of rewards, or YAML files with `rewards:`")
    ],
    folder: Annotated[
        Path, typer.Option("--to", metavar="DIR", help="where files go that no setting names; not those of the Hub")
    ] = Path("weights"),
    yes: Annotated[bool, typer.Option("--yes", help="do not ask")] = False,
    as_json: Json = False,
) -> None:
    """Download the published weights of rewards, checked by their sha256; says what, how large, and asks."""
    with handle_errors(as_json):
        from flows.rewards.fetching import downloads_report, fetched_report, plan_fetch
        from flows.terminal.tables import show_report

        planned = plan_fetch(rewards, folder)
        missing = {weights: reward for weights, reward in planned.items() if not weights.is_here()}
        if missing:
            show_report(downloads_report(missing))
            if not yes:
                _require_consent(missing)
        paths = {weights: weights.fetch() for weights in planned}
        show_report(fetched_report(planned))
        if as_json:
            listed = [
                {"reward": reward, "setting": weights.setting, "path": paths[weights]}
                for weights, reward in planned.items()
            ]
            typer.echo(json.dumps({"fetched": listed}))


def _require_consent(missing: Mapping["Weights", str]) -> None:
    try:
        agreed = typer.confirm("Download?", err=True)
    except typer.Abort:
        agreed = False
    if not agreed:
        raise InputError("--yes", None, f"Nothing was downloaded ({len(missing)} missing). Answer y, or give --yes.")


@commands.command()
def analyse(
    source: Annotated[str, typer.Argument(metavar="RUN", help="a run under the storage root, or its folder's path")],
    iterations: Annotated[str | None, typer.Option(metavar="A-B", help="iterations to analyse; by default all")] = None,
    rescored: Annotated[
        str | None, typer.Option(metavar="NAME", help="analyse the scores of this rescoring instead of the run's own")
    ] = None,
    repeats: Annotated[int, typer.Option(metavar="N", help="samples to score again to measure noise")] = 32,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="also write the page to this file")] = None,
    root: Root = "runs",
    as_json: Json = False,
) -> None:
    """Analyse the rewards of a run: range, saturation, spread, agreement, noise and cost."""
    with handle_errors(as_json):
        from flows.rewards.analysis import analyse_rewards
        from flows.terminal.tables import show_report

        summary = analyse_rewards(
            source, root=root, iterations=iterations, rescored=rescored, repeats=repeats, html=html
        )
        show_report(summary.report())
        if as_json:
            typer.echo(summary.model_dump_json())


@commands.command("serve")
def serve_rewards(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML with `rewards:`")],
    port: Annotated[int, typer.Option(help="0 for a free one")] = 8600,
    host: Annotated[str, typer.Option(help="address to listen on; a token is required beyond this machine")] = (
        "127.0.0.1"
    ),
    token_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="environment variable with the token that requests must bear")
    ] = None,
) -> None:
    """Serve rewards over HTTP, as docs/remote_rewards.md describes; Ctrl-C stops it."""
    with handle_errors():
        from configs.loader import read_rewards_file
        from configs.sections import PlacementSection
        from flows.rewards.server import serve
        from grpo_core.rewards.registry import build_reward
        from tasks.models.resident import configure_torch

        sections = read_rewards_file(file, "FILE").rewards
        rewards = {section.label: build_reward(section.reward, section.settings) for section in sections}
        configure_torch(PlacementSection())
        serve(rewards, host, port, token_env)
