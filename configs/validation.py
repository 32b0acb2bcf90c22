"""The base of every section and request, and how plain values become one of them, or every error at once.

It imports no model library, so a command can check its options at once.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, Field, GetJsonSchemaHandler, ValidationError, ValidationInfo, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from configs.yaml_files import list_hint, nearest_key, section_hint, translate
from grpo_core.errors import InputError, joined, raise_all, refuse_secrets
from grpo_core.settings import STRICT, type_hint
from grpo_core.uses import Uses

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

M = TypeVar("M", bound=BaseModel)

NAME_HINT = "Letters, digits, dots, dashes and underscores, the first a letter or digit; at most 100 characters."
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
Name = Annotated[str, Field(pattern=NAME_PATTERN), Uses.NOTHING]
RUN_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._~-]{0,99}$"
"""Names of runs: NAME~1 is what an earlier configuration of NAME made."""
RunName = Annotated[str, Field(pattern=RUN_NAME_PATTERN), Uses.NOTHING]
OptionalText = Annotated[str | None, Uses.NOTHING, Field(min_length=1)]

# The reward, the schedule or the loss defines these keys and values.
_FREE_MAPPINGS = ("settings", "lr_scheduler_kwargs", "optimizer_kwargs", "loss_settings")

ALL_AT_ONCE = "all at once"
"""Validation context for callers that use `refused_combinations`, so that all errors are reported together."""


class Section(BaseModel):
    """Base of every section: frozen; refuses unknown keys, wrong types and NaN.

    A section may inherit a settings dataclass of grpo_core; pydantic takes over its fields.
    """

    model_config = STRICT

    keyless: ClassVar[frozenset[str]] = frozenset()
    """Fields that are in no key: about memory, speed or placement, they change results by rounding at most."""

    @classmethod
    def choices(cls, values: Mapping[str, Any]) -> Mapping[str, "Choice"]:
        """Return what chooses the model of a section of these plain values, by the section's path."""
        return {}

    def result_settings(self) -> dict[str, Any]:
        """Return the fields that determine results, as JSON values, for cache keys and the run's identity."""
        values = self.model_dump(mode="json", exclude=set(self.keyless))
        for name in values:
            if isinstance(section := getattr(self, name), Section):
                values[name] = section.result_settings()
            elif isinstance(section, tuple) and all(isinstance(each, Section) for each in section):
                values[name] = [each.result_settings() for each in section]
        return values

    @model_validator(mode="after")
    def _refuse_combinations(self, info: ValidationInfo) -> "Section":
        if info.context != ALL_AT_ONCE:
            self.check()
        return self

    def check(self) -> None:
        """Raise InputError for the first contradiction of fields, by the check of the inherited settings."""
        inherited: Callable[[], None] | None = getattr(self, "__post_init__", None)
        if inherited is not None:
            inherited()

    def contradictions(self) -> Iterator[InputError]:
        """Yield the fields, relative to the section, that contradict each other in a run; it may be built with them."""
        return iter(())

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Describe inherited fields in forms by the `Attributes:` of the settings that declare them."""
        made = handler(schema)
        properties = handler.resolve_ref_schema(made).get("properties", {})
        for base in cls.__mro__:
            for name, text in re.findall(r"^    (\w+): (.+(?:\n {8}.+)*)", inspect.getdoc(base) or "", re.MULTILINE):
                if name in properties:
                    properties[name].setdefault("description", re.sub(r"\s+", " ", text))
        return made


@dataclass(frozen=True)
class Choice:
    """A setting, by path and value, that decides which keys a section has; the models by value, and the chosen one."""

    setting: str
    value: str
    models: Mapping[Any, type[Section]]
    chosen: type[Section]

    def hint_about(self, key: str) -> str | None:
        """Say which values give the section this key; None if it has the key with no value."""
        having = [value for value, model in self.models.items() if key in model.model_fields]
        if not having or self.value in having:
            return None
        return (
            f"There is no such key with {self.setting} {self.value}, only with {' or '.join(having)}. Leave it out of "
            f"the file, or choose another {self.setting}."
        )


def sections_of(value: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Section]]:
    """Yield every section in a value with its path in the file, those in a section before it."""
    if isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from sections_of(item, (*path, str(index)))
    if isinstance(value, BaseModel):
        for name in type(value).model_fields:
            yield from sections_of(getattr(value, name), (*path, name))
    if isinstance(value, Section):
        yield path, value


def refused_combinations(value: object) -> Iterator[InputError]:
    """Yield an error for every section in a value whose own check refuses it, with its path in the file."""
    for path, section in sections_of(value):
        try:
            section.check()
        except InputError as error:
            # The core uses the section's name, without its index in a list.
            name = ".".join(part for part in path if not part.isdigit()) + "."
            field = error.place.removeprefix(name) if error.place.startswith(name) else error.place.split(".")[-1]
            yield InputError(".".join((*path, field)), error.value, error.hint)


def contradictions_within(value: object) -> Iterator[InputError]:
    """Yield the contradictions within each section in a value, with their paths in the file."""
    for path, section in sections_of(value):
        for error in section.contradictions():
            yield InputError(".".join((*path, error.place)), error.value, error.hint)


def error_at(path: str, error: InputError) -> InputError:
    """Return an error that the core raised for `section.field`, with the path of that section in the file."""
    return InputError(f"{path}.{error.place.partition('.')[2]}", error.value, error.hint)


def validated(
    model: type[M], values: Mapping[str, Any], checks: Callable[[M], Sequence[InputError]] = lambda record: ()
) -> M:
    """Validate plain values from YAML as this model, by the model's keys or TRL's names of them.

    Args:
        checks: returns further errors of a valid record.

    Raises:
        InputError: every error.
    """
    # First, since other errors repeat the values.
    raise_all(secret_addresses(values))
    # YAML has lists, the models have tuples.
    plain = _tuples(values)
    errors = translate(plain)
    try:
        record = model.model_validate(plain, context=ALL_AT_ONCE)
    except ValidationError as error:
        choices = model.choices(plain) if issubclass(model, Section) else {}
        errors += [_explain(model, choices, *found) for found in _by_place(error.errors(), plain).items()]
        raise joined(errors) from error
    errors += [*refused_combinations(record), *checks(record)]
    raise_all(errors)
    return record


def secret_addresses(value: Any, place: str = "") -> Iterator[InputError]:
    """Yield an error for every address with a password or a token in plain values, wherever it is given."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, str):
        try:
            refuse_secrets(place, value)
        except InputError as error:
            yield error
    elif isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = enumerate(value)
    for key, item in items:
        yield from secret_addresses(item, f"{place}.{key}".lstrip("."))


def _tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: item if key in _FREE_MAPPINGS else _tuples(item) for key, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _by_place(details: Sequence["ErrorDetails"], values: Any) -> dict[tuple[str, ...], list["ErrorDetails"]]:
    """Return pydantic's errors by place, one for each type of a value; a list's only where no entry of it has one."""
    found: dict[tuple[str, ...], list[ErrorDetails]] = {}
    for detail in details:
        place: list[str] = []
        inner = values
        for part in detail["loc"]:
            if isinstance(inner, Mapping) and (part in inner or detail["type"] == "missing"):
                inner = inner.get(part)
            elif isinstance(inner, tuple) and isinstance(part, int) and part < len(inner):
                inner = inner[part]
            else:
                # The name of one of several types.
                continue
            place.append(str(part))
        found.setdefault(tuple(place), []).append(detail)
    above = {place[:depth] for place in found for depth in range(len(place))}
    types = {"too_short", "string_type", "dict_type"}
    return {
        place: errors
        for place, errors in found.items()
        if place not in above or not types.issuperset(each["type"] for each in errors)
    }


def _explain(
    model: type[BaseModel],
    choices: Mapping[str, Choice],
    location: tuple[str, ...],
    details: Sequence["ErrorDetails"],
) -> InputError:
    chosen = {path: choice.chosen for path, choice in choices.items()}
    place = ".".join(location) or "configuration"
    kind, found = details[0]["type"], details[0]["input"]
    if kind == "extra_forbidden":
        choice = choices.get(".".join(location[:-1]))
        if choice is not None and (hint := choice.hint_about(location[-1])) is not None:
            return InputError(place, location[-1], hint)
        return InputError(place, location[-1], f"There is no such key. {nearest_key(model, location, chosen)}")
    if kind == "model_type" and location:
        return InputError(place, found, section_hint(model, location, chosen, found))
    if kind == "tuple_type" and (hint := list_hint(model, location, chosen)) is not None:
        return InputError(place, found, hint)
    if kind == "missing":
        return InputError(place, None, "It is required and has no default; add it.")
    if kind == "string_pattern_mismatch":
        # Only names have a pattern.
        return InputError(place, found, NAME_HINT)
    return InputError(place, found, type_hint(details))
