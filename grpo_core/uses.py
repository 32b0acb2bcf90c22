"""What a setting can make a machine do, marked where the setting is declared: ``url: Annotated[str, Uses.ADDRESS]``.

Whoever reads a stranger's run asks by these marks before a value of it is used.
"""

import dataclasses
from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel


class Uses(Enum):
    """What a value is used for, in words that go before it; those of the first four do nothing by themselves."""

    NOTHING = "This is a name or a text, with which nothing is done:"
    ARGUMENTS = "This would be passed to the code that the same settings name:"
    ROOT = "This is where the run itself is:"
    OF_REWARD = "Each of these is marked in the settings of the reward:"
    CODE = "This would run"
    COMMAND = "This would run the command"
    ADDRESS = "This would connect to"
    VARIABLE = "The content of this variable would be sent to"
    PLACE = "This would read, or download,"
    FOLDER = "This would read images below"
    WRITTEN = "This would write to"


@cache
def declared_uses(settings: type) -> Mapping[str, Uses]:
    """Return what the marked fields of a settings class are used for; TypeError for a field with several marks."""
    return {name: use for name, kind in settings_fields(settings).items() if (use := use_of(kind)) is not None}


def settings_fields(settings: type) -> Mapping[str, Any]:
    """Return the annotation of each field of a settings class."""
    hints = get_type_hints(settings, include_extras=True)
    return {name: hints[name] for name in settings_defaults(settings)}


def settings_defaults(settings: type) -> Mapping[str, object]:
    """Return the default of each field of a settings class; another object where there is none."""
    if issubclass(settings, BaseModel):
        return {name: field.default for name, field in settings.model_fields.items()}
    return {field.name: field.default for field in dataclasses.fields(settings)}  # type: ignore[arg-type]


def use_of(annotation: Any) -> Uses | None:
    """Return the mark in an annotation, on the type or any part of it; None without one, TypeError for several."""
    found = set(_marks(annotation))
    if len(found) > 1:
        raise TypeError(f"{annotation} is marked as {' and '.join(sorted(each.name for each in found))}")
    return found.pop() if found else None


def _marks(annotation: Any) -> list[Uses]:
    own = [each for each in getattr(annotation, "__metadata__", ()) if isinstance(each, Uses)]
    inner = get_args(annotation)[:1] if get_origin(annotation) is Annotated else get_args(annotation)
    return own + [mark for each in inner for mark in _marks(each)]
