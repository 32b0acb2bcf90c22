"""The forms of Prefect's UI: a flow's parameter as JSON schema, and how the flow reads the submitted values.

The server checks submitted values against the JSON schema of the form. The flow reads the same values with the
project's own checks, which report every mistake at once, each with a hint.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from prefect.utilities.callables import generate_parameter_schema
from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from configs.loader import check_config, validated
from configs.schema import RunConfig
from flows.pipeline.requests import EvaluateRequest, ReplayRequest, RescoreRequest


@dataclass(frozen=True)
class Form:
    """An annotation of a flow's parameter: people submit plain values, the flow gets the model.

    Attributes:
        read: turns plain values into the model; raises InputError or InputErrors for unusable values.
    """

    read: Callable[[Mapping[str, Any]], BaseModel]

    def __get_pydantic_core_schema__(self, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the model's JSON schema for the server; in Python accept the model, or values to read it from."""
        return core_schema.json_or_python_schema(
            json_schema=handler.generate_schema(source),
            python_schema=core_schema.no_info_before_validator_function(
                lambda value: self.read(value) if isinstance(value, Mapping) else value,
                core_schema.is_instance_schema(source),
            ),
        )


TrainConfig = Annotated[RunConfig, Form(check_config)]
EvaluateForm = Annotated[EvaluateRequest, Form(partial(validated, EvaluateRequest))]
RescoreForm = Annotated[RescoreRequest, Form(partial(validated, RescoreRequest))]
ReplayForm = Annotated[ReplayRequest, Form(partial(validated, ReplayRequest))]


def form_schema(parameter: str, model: type[BaseModel]) -> dict[str, Any]:
    """Return the parameter schema of a deployment whose flow takes one model.

    Args:
        parameter: name of the flow's parameter.
        model: its type, which may be a subclass of the flow's own.
    """
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(parameter, kind, annotation=model)])
    return generate_parameter_schema(signature, {}).model_dump()
