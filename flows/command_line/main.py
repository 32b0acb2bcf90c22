"""The program `grpo`: exit code 0 for success, 1 for a failure, 2 for wrong input.

Commands import what they need when they are called: `grpo --help` imports neither torch nor Prefect, and wrong input is
reported before Prefect and the models' libraries are imported, which takes many seconds.
"""

import atexit
import contextlib
import faulthandler
import logging
import os
import signal
import sys
from typing import Annotated

import typer

from flows.command_line.flow_commands import commands as flow_commands
from flows.command_line.options import server_is_lost
from flows.command_line.setup_commands import commands as setup_commands
from flows.command_line.subcommands import commands as stored_run_commands
from flows.command_line.subcommands import reward_commands
from flows.command_line.verification_commands import commands as verification_commands

application = typer.Typer(
    name="grpo",
    help="Train image generators and language models with rewards.",
    no_args_is_help=True,
    # Rich's help imports a Markdown parser: a third of the time that `grpo --help` takes.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

for group in (flow_commands, verification_commands, setup_commands, stored_run_commands, reward_commands):
    application.add_typer(group)


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


if __name__ == "__main__":
    run()
