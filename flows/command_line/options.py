"""What commands share: options, requests whose fields are options, and how errors are reported."""

import inspect
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_origin

import typer
from pydantic.fields import FieldInfo
from typer.models import ArgumentInfo, OptionInfo, ParameterInfo

from configs.validation import Section, validated
from grpo_core.errors import InputError, joined

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="a YAML file, such as configs/tiny.yaml")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object as the last line")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="change one value, as section.key=value")
]
Html = Annotated[Path | None, typer.Option(metavar="FILE", help="write one page that needs no server")]
Root = Annotated[str, typer.Option(metavar="DIR", help="where runs are stored: a folder or any fsspec URL")]
RunName = Annotated[str | None, typer.Option("--run", help="name of the run; by default the configuration's")]

# By name, since the import of Prefect, which raises the second instead of ending by SIGTERM, takes seconds.
_SIGNALS = {
    "KeyboardInterrupt": "stopped; start it again with the same command and it resumes where it was",
    "TerminationSignal": "ended by SIGTERM; start it again with the same command",
}

R = TypeVar("R", bound=Section)


@contextmanager
def handle_errors(as_json: bool = False) -> Iterator[None]:
    """Turn an exception into messages on stderr and an exit code: 1 for a failure, 2 for wrong input.

    Args:
        as_json: also print the input errors as one JSON object on stdout, each with place, value and hint.
    """
    try:
        yield
    except InputError as error:
        for problem in error.errors:
            typer.secho(f"error: {problem}", fg="red", err=True)
        if as_json:
            errors = [{"place": each.place, "value": each.value, "hint": each.hint} for each in error.errors]
            typer.echo(json.dumps({"errors": errors}, default=str))
        raise typer.Exit(2) from error
    except BaseException as error:
        name = _signal_behind(error)
        if name is not None:
            typer.secho(_SIGNALS[name], err=True)
            raise typer.Exit(1) from None
        if not isinstance(error, Exception) or isinstance(error, typer.Exit):
            raise
        typer.secho(f"failed: {type(error).__name__}: {error}", fg="red", err=True)
        if os.environ.get("GRPO_TRACEBACK"):
            raise
        raise typer.Exit(1) from error


def _signal_behind(error: BaseException | None) -> str | None:
    """Return the class of the signal's exception that ended a command; the last requests to a server may fail then."""
    while error is not None and type(error).__name__ not in _SIGNALS:
        error = error.__context__
    return type(error).__name__ if error is not None else None


def takes_request(model: type[Section]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate `command(request, ...)` so that Typer sees the request's fields as arguments and options.

    Further parameters of the command are Typer's as they are.

    Args:
        model: every field has a description, which becomes the help, and may have Typer's Argument or Option in its
            annotation.
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
        name = info.metavar or name
    return InputError(f"{name}.{rest}" if rest else name, error.value, error.hint)
