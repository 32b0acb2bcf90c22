"""The forms of Prefect's UI: a flow's parameter as JSON schema, and how the flow reads the submitted values.

The server checks submitted values against the JSON schema of the form. The flow reads the same values with the
project's own checks, which report every mistake at once, each with a hint.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any

from prefect.utilities.callables import generate_parameter_schema
from pydantic import BaseModel, BeforeValidator

from configs.loader import check_config
from configs.schema import RunConfig
from configs.validation import validated
from flows.pipeline.requests import EvaluateRequest, ReplayRequest, RescoreRequest


def _read_by(read: Callable[[Mapping[str, Any]], BaseModel]) -> BeforeValidator:
    """Read plain values with a function that raises InputError; pass the model itself on."""
    return BeforeValidator(lambda value: read(value) if isinstance(value, Mapping) else value)


TrainConfig = Annotated[RunConfig, _read_by(check_config)]
EvaluateForm = Annotated[EvaluateRequest, _read_by(partial(validated, EvaluateRequest))]
RescoreForm = Annotated[RescoreRequest, _read_by(partial(validated, RescoreRequest))]
ReplayForm = Annotated[ReplayRequest, _read_by(partial(validated, ReplayRequest))]


def form_schema(parameter: str, record: BaseModel) -> dict[str, Any]:
    """Return the parameter schema of a deployment whose flow takes one model.

    Args:
        parameter: name of the flow's parameter.
        record: its default; a section that may be of several kinds is one of the same kind in the form.
    """
    model = type(record)
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(parameter, kind, annotation=model)])
    schema = generate_parameter_schema(signature, {}).model_dump()
    for definition in schema["definitions"].values():
        _put_required_first(definition)
    _keep_kinds(schema["definitions"][model.__name__], record)
    _fold_optional_sections(schema["definitions"][model.__name__])
    return schema


def _keep_kinds(definition: dict[str, Any], record: BaseModel) -> None:
    """Have the form show the fields of the sections that the record has, where others would be of another kind."""
    for name, section in definition.get("properties", {}).items():
        kind = {"$ref": f"#/definitions/{type(getattr(record, name)).__name__}"}
        if kind in section.get("anyOf", ()):
            section.pop("default", None)
            section.update(kind)
            del section["anyOf"]


def _put_required_first(definition: dict[str, Any]) -> None:
    """Order the fields of a section as people fill them in; the UI shows them in this order."""
    required = definition.get("required", ())
    if properties := definition.get("properties"):
        definition["properties"] = dict(sorted(properties.items(), key=lambda each: each[0] not in required))


def _fold_optional_sections(definition: dict[str, Any]) -> None:
    """Have the UI show each optional section as a few lines of JSON, instead of all its fields.

    The UI does not know `oneOf`, and takes the section for an object of any content; the server does, and checks it.
    """
    required = definition.get("required", ())
    for name, section in definition.get("properties", {}).items():
        if name not in required and (reference := section.pop("$ref", None)) is not None:
            section.update(type="object", oneOf=[{"$ref": reference}])
