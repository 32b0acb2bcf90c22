"""Options that commands share, and commands whose options are the fields of a request."""

import inspect
import sys
from collections.abc import Callable, Mapping
from copy import copy
from functools import reduce
from importlib import import_module
from operator import or_
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, Union, get_args, get_origin

import typer
from typer.models import ArgumentInfo, OptionInfo, ParameterInfo

from flows.command_line.errors import Json, handle_errors
from grpo_core.errors import InputError, InputErrors

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="a YAML file, such as configs/tiny.yaml")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="change one value, as section.key=value")
]
RunName = Annotated[str | None, typer.Option("--run", help="name of the run; by default the configuration's")]

R = TypeVar("R", bound="BaseModel")


def takes_request(model: str) -> Callable[[Callable[[R, bool], None]], Callable[..., None]]:
    """Decorate `command(request, as_json)` so that Typer sees a request's fields as its arguments and options.

    Args:
        model: name of a class in flows.pipeline.requests. Every field has a description, which becomes the help, and
            Typer's Argument or Option in its annotation.
    """

    def decorate(command: Callable[[R, bool], None]) -> Callable[..., None]:
        def bound(as_json: bool = False, **values: Any) -> None:
            with handle_errors(as_json):
                command(_read(_request(model), values), as_json)

        shared = inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Json)
        parameters = [shared]
        if not _is_another_command(command.__name__):
            parameters = [*(_parameter(*field) for field in _request(model).model_fields.items()), shared]
        bound.__name__, bound.__doc__ = command.__name__, command.__doc__
        bound.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        bound.__annotations__ = {each.name: each.annotation for each in parameters}
        return bound

    return decorate


def _is_another_command(name: str) -> bool:
    """Whether this process is the program and was given another command: reading the request would import torch."""
    return Path(sys.argv[0]).stem in ("grpo", "main") and sys.argv[1:2] != [name]


def _request(name: str) -> "type[Any]":
    return getattr(import_module("flows.pipeline.requests"), name)  # type: ignore[no-any-return]


def _read(model: "type[BaseModel]", values: Mapping[str, Any]) -> Any:
    # Checking a configuration imports torch.
    from configs.loader import validated

    try:
        return validated(model, {name: value for name, value in values.items() if value is not None})
    except InputErrors as error:
        raise InputErrors([_of_option(model, each) for each in error.errors]) from error


def _parameter(name: str, field: "FieldInfo") -> inspect.Parameter:
    kind = _unconstrained(field.annotation)
    default = inspect.Parameter.empty if field.is_required() else field.default
    if get_origin(kind) is tuple:
        # Typer reads several values as a list.
        kind = list[get_args(kind)[0]]  # type: ignore[misc]
        kind, default = (kind, default) if field.is_required() else (kind | None, None)
    option = copy(_typer_info(field))
    option.help = field.description
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


def _unconstrained(kind: Any) -> Any:
    """Remove pydantic's constraints from a type; Typer would report them without a hint."""
    if get_origin(kind) is Annotated:
        return get_args(kind)[0]
    if get_origin(kind) in (Union, UnionType):
        return reduce(or_, map(_unconstrained, get_args(kind)))
    return kind


def _typer_info(field: "FieldInfo") -> ParameterInfo:
    return next(each for each in field.metadata if isinstance(each, ParameterInfo))


def _of_option(model: "type[BaseModel]", error: InputError) -> InputError:
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
