"""What commands share: options, requests whose fields are options, questions, and how errors are reported."""

import inspect
import itertools
import json
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from typer.models import ArgumentInfo, OptionInfo, ParameterInfo

from configs.validation import Section, validated
from configs.yaml_files import yaml_value
from flows.requests import SET
from grpo_core.errors import InputError, joined
from tasks.process import openable

if TYPE_CHECKING:
    from configs.schema import RunConfig
    from flows.pipeline.lineage import ChangedRunError
    from flows.requests import InitRequest
    from tasks.reports.report import Report

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="a YAML file, such as configs/tiny.yaml")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object as the last line")]
Memory = Annotated[bool, typer.Option("--memory", help="also show the estimate of GPU memory by part and by phase")]
Load = Annotated[
    bool, typer.Option("--load", help="load the model, sample, score and update a little, show what it took")
]
Overrides = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=SET)]
Html = Annotated[Path | None, typer.Option(metavar="FILE", help="write one page that needs no server")]
Root = Annotated[str, typer.Option(metavar="DIR", help="where runs are stored: a folder or any fsspec URL")]
RunName = Annotated[str | None, typer.Option("--run", help="name of the run; by default the configuration's")]

# By name, since the import of Prefect, which raises the second instead of ending by SIGTERM, takes seconds.
_SIGNALS = {"KeyboardInterrupt": "stopped", "TerminationSignal": "ended by SIGTERM"}

R = TypeVar("R", bound=Section)


@contextmanager
def handle_errors(as_json: bool = False) -> Iterator[None]:
    """Turn an exception into messages on stderr, also as one JSON object, and exit code 1, or 2 for wrong input."""
    try:
        yield
    except InputError as error:
        for problem in error.errors:
            _say(openable(f"error: {problem}"))
        if as_json:
            errors = [{"place": each.place, "value": each.value, "hint": each.hint} for each in error.errors]
            typer.echo(json.dumps({"errors": errors}, default=str))
        raise typer.Exit(2) from error
    except BaseException as error:
        name = _signal_behind(error)
        if name is not None:
            typer.secho(f"{_SIGNALS[name]}; the same command resumes it: {own_command()}", err=True)
            if name == "TerminationSignal":
                _end_by_sigterm()
            raise typer.Exit(1) from None
        if not isinstance(error, Exception) or isinstance(error, typer.Exit):
            raise
        _say(f"failed: {type(error).__name__}: {error}")
        if server_is_lost():
            typer.secho(f"the same command resumes it: {own_command()}", err=True)
        if os.environ.get("GRPO_TRACEBACK"):
            raise
        raise typer.Exit(1) from error


def _say(problem: str) -> None:
    """Print a problem; what it quotes may be a stranger's, and a terminal obeys control characters."""
    # No command needs it before it fails.
    from tasks.reports.text import printable

    typer.secho(printable(problem, keep="\n\t"), fg="red", err=True)


def own_command() -> str:
    """Return the command that this process was started with, as a person types it."""
    program = Path(sys.argv[0])
    if program.suffix == ".py":
        # `python -m` or a file, whose interpreter belongs to it.
        return shlex.join(sys.orig_argv)
    found = shutil.which(program.name)
    return shlex.join(
        [program.name if found and Path(found).resolve() == program.resolve() else sys.argv[0], *sys.argv[1:]]
    )


def server_is_lost() -> bool:
    """Return whether the temporary server of this process is gone for good."""
    # Most commands have no server, and do not import it.
    module = sys.modules.get("flows.server.temporary")
    return module is not None and bool(module.is_lost())


def _end_by_sigterm() -> None:
    """End this process as one that does not catch SIGTERM, so that who sent it sees that it was obeyed."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


def _signal_behind(error: BaseException | None) -> str | None:
    """Return the class of the signal's exception that ended a command; the last requests to a server may fail then."""
    while error is not None and type(error).__name__ not in _SIGNALS:
        error = error.__context__
    return type(error).__name__ if error is not None else None


def print_result(
    report: "Report", result: BaseModel | Mapping[str, object], as_json: bool, *, stdout: bool = False
) -> None:
    """Print a command's report, on stderr unless it was asked for, and with --json its result as stdout's last line."""
    from rich.console import Console

    from flows.terminal.output import show_report

    show_report(report, Console(stderr=as_json or not stdout))
    if as_json:
        typer.echo(result.model_dump_json() if isinstance(result, BaseModel) else json.dumps(result))


def takes_request(model: type[Section]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate `command(request, ...)` so that Typer sees the request's fields as arguments and options.

    A field's description becomes the help; its annotation may have Typer's Argument or Option.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def bound(**values: Any) -> None:
            fields = {name: values.pop(name) for name in model.model_fields}
            with handle_errors(values.get("as_json", False)):
                command(_read(model, fields), **values)

        _, *own = inspect.signature(command).parameters.values()
        parameters = [_parameter(*field) for field in model.model_fields.items()]
        parameters += [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own]
        bound.__name__, bound.__doc__ = command.__name__, command.__doc__
        bound.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        bound.__annotations__ = {each.name: each.annotation for each in parameters}
        return bound

    return decorate


def _read(model: type[R], values: Mapping[str, Any]) -> R:
    try:
        return validated(model, {name: value for name, value in values.items() if value is not None})
    except InputError as error:
        raise joined(_of_option(model, each) for each in error.errors) from error


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    kind: Any = field.annotation
    default = inspect.Parameter.empty if field.is_required() else field.default
    if get_origin(kind) is tuple:
        # Typer reads several values as a list.
        kind, default = (list[str], default) if field.is_required() else (list[str] | None, None)
    option = copy(_typer_info(field))
    option.help = field.description
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _typer_info(field: FieldInfo) -> ParameterInfo:
    return next((each for each in field.metadata if isinstance(each, ParameterInfo)), typer.Option())


def _of_option(model: type[Section], error: InputError) -> InputError:
    """Replace the model's field in an error by the option that people type."""
    name, _, rest = error.place.partition(".")
    info = _typer_info(model.model_fields[name])
    if isinstance(info, OptionInfo):
        # Typer stores the first name of an annotated option as its default.
        given = [each for each in (info.default, *(info.param_decls or ())) if isinstance(each, str)]
        name = next(iter(given), f"--{name.replace('_', '-')}")
    elif isinstance(info, ArgumentInfo):
        # Without what may follow it, as in RUN[@N|@best].
        name = (info.metavar or name).partition("[")[0]
    return InputError(f"{name}.{rest}" if rest else name, error.value, error.hint)


def all_overrides(config: Path, run: str | None, overrides: list[str] | None, *chosen: str) -> list[str]:
    """Return the overrides of a configuration that is to be read, those of other options last."""
    if config.is_file() and "torch" not in sys.modules:
        typer.echo(f"reading {config} ...", err=True)
    return [*(overrides or []), *([f"run.name={yaml_value(run)}"] if run is not None else []), *chosen]


RESTART = "run.on_change=restart"


def is_terminal() -> bool:
    """Whether there is a person to ask: both the input and the messages are a terminal's."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def ask_about_change(change: "ChangedRunError") -> list[str]:
    """Ask what becomes of a run that is started with other settings; return the overrides that carry it out."""
    from rich.prompt import IntPrompt

    from flows.terminal.output import stderr
    from tasks.reports.text import counted

    name = change.config.run.name
    named = [f"run.name={json.dumps(other := _free_name(change.config))}"]
    lines = (
        f"{name} has trained {counted(change.iterations, 'iteration')}, and {change.difference}.",
        f"  1  train in a new run, {other}, which reuses the stages that are unchanged",
        f"  2  train a new run, {other}, from the weights of {name}",
        f"  3  begin {name} at iteration 1; its results become the run {name}~1",
        "  4  stop",
    )
    for line in lines:
        typer.echo(line, err=True)
    chosen = IntPrompt.ask("Which", choices=["1", "2", "3", "4"], default=4, console=stderr())
    if chosen == len(lines) - 1:
        raise typer.Exit(1)
    return (named, [*named, f"run.continue_from={json.dumps(name)}"], [RESTART])[chosen - 1]


def ask_for_init(request: "InitRequest") -> "InitRequest":
    """Ask for what `grpo init` can be given as options; an empty answer keeps the default."""
    from rich.prompt import Prompt

    from configs.validation import validated
    from flows.requests import InitRequest
    from flows.terminal.output import stderr
    from grpo_core.pipeline_files import PolicyKind

    console = stderr()
    answers = {
        "model": Prompt.ask("Model, a folder or hub name (empty: a shipped tiny model)", default="", console=console)
    }
    if not answers["model"]:
        answers["kind"] = Prompt.ask(
            "Tiny model: glm_image, diffusers (a pipeline), causal_lm (texts), or vision_lm (texts about images)",
            choices=list(get_args(PolicyKind)),
            default="glm_image",
            console=console,
        )
    answers |= {
        "prompts": Prompt.ask("Prompt file (empty: examples)", default="", console=console),
        "heldout": Prompt.ask("File of held-out prompts (empty: none, or examples)", default="", console=console),
        "reward": Prompt.ask("Reward, of `grpo rewards list`, or own for a function", default="own", console=console),
    }
    given = {name: answer for name, answer in answers.items() if answer}
    return validated(InitRequest, {"folder": request.folder, **given})


def _free_name(config: "RunConfig") -> str:
    from tasks.runs.reader import RunReader
    from tasks.storage.artifacts.store import open_store

    taken = RunReader(open_store(config.storage, "")).names()
    names = (f"{config.run.name}-{number}" for number in itertools.count(2))
    return next(name for name in names if name not in taken)


Changes = Mapping[str, object] | Sequence[str]
"""Settings to change: values by dotted key, `{"update.learning_rate": 1e-4}`, or texts as of `--set`."""


def as_request(model: type[R], first: object, field: str, options: Mapping[str, Any]) -> R:
    """Return the request that was given, or build one from the options of a call."""
    if isinstance(first, model):
        if options:
            raise TypeError(f"a {model.__name__} has all options; change its fields instead of {', '.join(options)}")
        return first
    given = {**options, field: first}
    if "overrides" in given:
        given["overrides"] = override_texts(given["overrides"])
    return validated(model, given)


def override_texts(overrides: Changes) -> tuple[str, ...]:
    """Return settings to change as texts, `section.key=value`."""
    if not isinstance(overrides, Mapping):
        return tuple(overrides)
    return tuple(f"{key}={yaml_value(value)}" for key, value in overrides.items())
