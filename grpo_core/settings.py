"""Check the fields of settings against their annotations.

The ranges and choices of a setting are declared in the annotation of its field only. Pydantic reads them when a
configuration embeds the settings; `check_fields` reads them when Python code builds the settings.
"""

import dataclasses
from functools import cache
from typing import TYPE_CHECKING, Any, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from grpo_core.errors import InputError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

STRICT = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
"""Unknown keys and wrong types are refused; numbers are never read from strings; NaN and infinity are refused."""


def check_fields(
    settings: "DataclassInstance", place: str, declared_by: "type[DataclassInstance] | None" = None
) -> None:
    """Refuse the first field whose value its annotation does not allow.

    Args:
        settings: a dataclass; the annotations of its fields may carry pydantic's constraints.
        declared_by: a base of its class, whose fields alone are checked; None: all fields.

    Raises:
        InputError: `place` is ``<place>.<field>``.
    """
    if isinstance(settings, BaseModel):
        return  # a section of a configuration: pydantic has checked it
    checked = declared_by or type(settings)
    values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(checked)}
    try:
        _model(checked).model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in (place, *first["loc"]))
        raise InputError(where, first["input"], f"{first['msg']}.") from None


@cache
def _model(settings: "type[DataclassInstance]") -> type[BaseModel]:
    annotations = get_type_hints(settings, include_extras=True)
    fields: dict[str, Any] = {field.name: (annotations[field.name], ...) for field in dataclasses.fields(settings)}
    return create_model(settings.__name__, __config__=STRICT, **fields)
