"""Check the fields of settings against their annotations; how tokens are sampled and images are made.

Pydantic reads the annotations when a configuration embeds the settings, `check_fields` when Python code builds them.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    create_model,
)

from grpo_core.errors import InputError
from grpo_core.rollouts.streams import ImageSize

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from pydantic_core import ErrorDetails

STRICT = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)
"""Unknown keys and wrong types are refused; numbers are never read from strings; NaN and infinity are refused."""


_TYPES = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text, in quotes",
    "tuple_type": "a list, as in [a, b]",
    "list_type": "a list, as in [a, b]",
    "dict_type": "keys and values, as in {{a: b}}",
    "mapping_type": "keys and values, as in {{a: b}}",
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "string_too_short": "text of {min_length} or more characters",
    "string_too_long": "text of at most {max_length} characters",
    "too_short": "a list of {min_length} or more",
    "too_long": "a list of at most {max_length}",
    "literal_error": "{expected}",
}
"""What is needed, by the type of pydantic's error."""


def type_hint(details: Sequence["ErrorDetails"]) -> str:
    """Say what a value has to be, in the words of YAML; pydantic has an error for each of several types."""
    first = details[0]
    same = [each for each in details if each["loc"][:1] == first["loc"][:1] and each["input"] is first["input"]]
    if any(each["type"] not in _TYPES for each in same):
        return f"{first['msg']}."
    needed = [_TYPES[each["type"]].format(**each.get("ctx", {})) for each in same]
    text = ", or ".join(dict.fromkeys(needed)).replace("'", "").replace("True", "true")
    return f"It has to be {text}."


def check_fields(
    settings: "DataclassInstance", place: str, declared_by: "type[DataclassInstance] | None" = None
) -> None:
    """Refuse the first field whose value its annotation does not allow; `place` of the error is ``<place>.<field>``.

    Args:
        declared_by: a base of its class, whose fields alone are checked; None: all fields.
    """
    if isinstance(settings, BaseModel):
        return  # a section of a configuration: pydantic has checked it
    checked = declared_by or type(settings)
    values = {field.name: getattr(settings, field.name) for field in dataclasses.fields(checked)}
    try:
        _model(checked).model_validate(values)
    except ValidationError as error:
        details = error.errors()
        where = ".".join(str(part) for part in (place, *details[0]["loc"]))
        raise InputError(where, details[0]["input"], type_hint(details)) from None


@cache
def _model(settings: "type[DataclassInstance]") -> type[BaseModel]:
    annotations = get_type_hints(settings, include_extras=True)
    fields: dict[str, Any] = {field.name: (annotations[field.name], ...) for field in dataclasses.fields(settings)}
    return create_model(settings.__name__, __config__=STRICT, **fields)


@dataclass(frozen=True, kw_only=True)
class Truncation:
    """Which ids of a distribution can be sampled; the cuts apply in this order, each to the ids that are left.

    Attributes:
        top_k: the k likeliest ids, with ties; 0: all.
        top_p: the fewest likeliest ids whose probabilities add up to at least this (Holtzman et al., 2020,
            arXiv:1904.09751).
        min_p: ids at least this times as probable as the likeliest (Nguyen et al., 2024, arXiv:2407.01082).
    """

    top_k: NonNegativeInt = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "rollout", Truncation)

    @property
    def truncates(self) -> bool:
        """Whether anything is cut."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass(frozen=True, kw_only=True)
class TokenSamplingSettings(Truncation):
    """How tokens are sampled, whatever they are rendered to.

    Attributes:
        temperature: of the token distribution.
        cache_implementation: of keys and values, as transformers names it: dynamic, which grows by the tokens; or
            static, whose passes have fixed shapes and run as CUDA graphs on a GPU.
    """

    temperature: PositiveFloat = 1.0
    cache_implementation: Literal["dynamic", "static"] = "dynamic"


@dataclass(frozen=True)
class ImageSettings:
    """Which images are made, whatever makes them.

    Attributes:
        height: pixels, a multiple of the model's unit.
        width: pixels, a multiple of the model's unit.
        decode_batch_size: images denoised and decoded at once; siblings only.
    """

    height: PositiveInt
    width: PositiveInt
    decode_batch_size: PositiveInt = 16

    @property
    def size(self) -> ImageSize:
        """The size of images whose prompt gives no other."""
        return ImageSize(self.width, self.height)
