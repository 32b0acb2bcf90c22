"""What a flow run may be asked for: the form of Prefect's UI, and what it becomes in the flow.

The server refuses unknown keys and wrong types when a flow run is created, by the JSON schema of the form. The flow
reads the same values again with the project's own checks, which tell every mistake at once, each with its hint.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from prefect.utilities.callables import generate_parameter_schema
from pydantic import BaseModel, GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

from configs.loader import check_config
from configs.schema import RunConfig


@dataclass(frozen=True)
class Form:
    """An annotation: people fill in the form, the flow is given the record.

    Attributes:
        asked: a model, or a union of models; its JSON schema is the form.
        read: the values of a form -> the record; raises InputError or InputErrors for what cannot be used.
    """

    requested: Any
    read: Callable[[Mapping[str, Any]], object]

    def __get_pydantic_core_schema__(self, source: type[object], handler: GetCoreSchemaHandler) -> CoreSchema:
        """The form as JSON schema; in Python the record itself, or the values that it is read from."""
        return core_schema.json_or_python_schema(
            json_schema=handler.generate_schema(self.requested),
            python_schema=core_schema.no_info_before_validator_function(
                self._as_record, core_schema.is_instance_schema(source)
            ),
        )

    def _as_record(self, value: object) -> object:
        return self.read(value) if isinstance(value, Mapping) else value


TrainConfig = Annotated[RunConfig, Form(RunConfig, check_config)]
"""The resolved configuration, section by section."""


def form_schema(parameter: str, requested: type[BaseModel]) -> dict[str, Any]:
    """The schema of a flow with one parameter, for a deployment whose form is narrower than the flow's own.

    Args:
        parameter: its name.
        asked: what it holds.
    """
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(parameter, kind, annotation=requested)])
    return generate_parameter_schema(signature, {}).model_dump()
