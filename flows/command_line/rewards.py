"""The commands `grpo rewards ...`: what there is, what stored scores are worth, and a server that scores for others."""

import json
from pathlib import Path
from typing import Annotated

import typer

from flows.command_line.errors import Json, handle_errors

commands = typer.Typer(
    name="rewards", help="Rewards: list them, analyse stored scores, serve them.", no_args_is_help=True
)


@commands.command("list")
def list_rewards(as_json: Json = False) -> None:
    """Every reward that a configuration may name, with its settings and their defaults."""
    with handle_errors():
        from rich.console import Console

        from flows.terminal.rewards import show_rewards
        from grpo_core.rewards.registry import REWARDS, reward_class, reward_settings

        show_rewards({name: reward_class(name) for name in REWARDS}, Console(stderr=as_json))
        if as_json:
            listed = {
                name: {setting: str(default) for setting, default in reward_settings(name).items()} for name in REWARDS
            }
            typer.echo(json.dumps(listed))


@commands.command()
def analyse(
    source: Annotated[str, typer.Argument(metavar="RUN", help="a run under the storage root, or its folder's path")],
    iterations: Annotated[str | None, typer.Option(metavar="A-B", help="which; by default all")] = None,
    rescored: Annotated[
        str | None, typer.Option(metavar="NAME", help="scores of this rescoring, not those that were trained on")
    ] = None,
    repeats: Annotated[int, typer.Option(metavar="N", help="samples to score once more, for the noise")] = 32,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="write the page here too")] = None,
    root: Annotated[str, typer.Option(metavar="DIR", help="where runs are kept")] = "runs",
    as_json: Json = False,
) -> None:
    """Range, saturation, spread, agreement, noise and cost of each reward of a run; plots as PNG."""
    with handle_errors():
        from rich.console import Console

        from flows.rewards.analysis import AnalysisRequest, analyse_rewards
        from flows.terminal.rewards import show_analysis, show_notes

        summary, analysis = analyse_rewards(AnalysisRequest(source, root, iterations, rescored, repeats, html))
        console = Console(stderr=True)
        show_analysis(analysis, console)
        show_notes(summary, console)
        if as_json:
            typer.echo(summary.model_dump_json())


@commands.command("serve")
def serve_rewards(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="YAML with `rewards:`")],
    port: Annotated[int, typer.Option(help="0 for a free one")] = 8600,
    host: Annotated[str, typer.Option(help="address to listen on; others than this machine's own need a token")] = (
        "127.0.0.1"
    ),
    token_env: Annotated[
        str | None, typer.Option(metavar="NAME", help="environment variable with the token that requests must bear")
    ] = None,
) -> None:
    """Score for others over HTTP, as docs/remote_rewards.md describes; Ctrl-C ends it."""
    with handle_errors():
        from configs.loader import read_rewards_file
        from configs.sections import PlacementSection
        from flows.rewards.server import serve
        from grpo_core.errors import InputError, InputErrors
        from grpo_core.rewards.registry import build_reward
        from tasks.models.resident import configure_torch

        sections = read_rewards_file(file, "FILE").rewards
        rewards = {section.label: build_reward(section.reward, section.settings) for section in sections}
        problems = [
            InputError(f"rewards.{label}", dict(reward.settings()), problem)
            for label, reward in rewards.items()
            for problem in reward.preflight()
        ]
        if problems:
            raise InputErrors(problems)
        configure_torch(PlacementSection())
        serve(rewards, host, port, token_env)
