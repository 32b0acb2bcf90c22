"""A YAML file and `--set key=value` overrides -> a checked configuration, or every mistake at once."""

import difflib
import re
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from configs.checks import contradictions
from configs.schema import RUN_CONFIGS, PolicySection, RunConfig
from configs.section import NAME_MEND
from grpo_core.errors import InputError, InputErrors

M = TypeVar("M", bound=BaseModel)


class _StrictLoader(yaml.SafeLoader):
    """YAML in which a key that stands twice is an error and 1e-5 is a number."""


# Their keys are the reward's or the schedule's own, and so are their values.
_FREE_MAPPINGS = ("settings", "lr_scheduler_kwargs")


def _unique_keys(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if not isinstance(key, Hashable):
            raise yaml.constructor.ConstructorError(None, None, "a key is a name, no list", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", key_node.start_mark)
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_keys)
# YAML 1.1 reads 1e-5 as text; people write learning rates like that.
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def parse_yaml(text: str, place: str) -> Any:
    """YAML text as plain values.

    Raises:
        InputError: not YAML; names the line.
    """
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{place}, line {mark.line + 1}" if mark else place
        problem = getattr(error, "problem", None) or "it is not YAML"
        # What is left open is noticed at the end of the text, which may be a line that is not there.
        lines = [*text.splitlines(), ""]
        raise InputError(where, lines[mark.line].strip() if mark else text, f"{problem}. Mend the YAML.") from error


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a configuration file.

    Args:
        path: a YAML file.
        overrides: `section.key=value`, the value as YAML.

    Raises:
        InputErrors: everything that is wrong, each with its path in the file, the value found and what would do.
    """
    try:
        values = read_mapping(path, "CONFIG", example="configs/tiny.yaml", keys="run, policy")
        for override in overrides:
            _apply_override(values, override)
    except InputError as error:
        raise InputErrors([error]) from error
    return check_config(values)


def read_mapping(path: str | Path, place: str, *, example: str, keys: str) -> dict[str, Any]:
    """A YAML file whose top is a mapping, as plain values.

    Args:
        path: the file.
        place: how the person names it: an argument or option.
        example: a file that would do.
        keys: the first of the mapping, for the message when there is none.

    Raises:
        InputError: it cannot be read, or holds something else.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        near = difflib.get_close_matches(file.name, [p.name for p in file.parent.glob("*.yaml")], n=1)
        hint = f" Did you mean {file.parent / near[0]}?" if near else ""
        raise InputError(place, str(path), f"Give a readable YAML file, such as {example}.{hint}") from error
    values = parse_yaml(text, str(path))
    if not isinstance(values, dict):
        raise InputError(str(path), values, f"It is a mapping with the sections {keys}, ...")
    return values


def check_config(values: Mapping[str, Any]) -> RunConfig:
    """Plain values -> a configuration.

    Raises:
        InputErrors: as for read_config.
    """
    config = validated(_model_for(values), values)
    if errors := contradictions(config):
        raise InputErrors(errors)
    return config


def validated(model: type[M], values: Mapping[str, Any]) -> M:
    """Plain values as YAML has them -> a record of this model.

    Raises:
        InputErrors: everything that does not fit it.
    """
    try:
        # From YAML, a tuple is a list.
        return model.model_validate(_tuples(values))
    except ValidationError as error:
        raise InputErrors([_explain(model, detail) for detail in _distinct(error.errors())]) from error


def _model_for(values: Mapping[str, Any]) -> type[RunConfig]:
    """What the rollout section may say depends on the policy; an unknown kind is told with all other mistakes."""
    policy = values.get("policy")
    default = PolicySection.model_fields["kind"].default
    kind = policy.get("kind", default) if isinstance(policy, Mapping) else default
    return RUN_CONFIGS[kind if isinstance(kind, str) and kind in RUN_CONFIGS else default]


def _tuples(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: item if key in _FREE_MAPPINGS else _tuples(item) for key, item in value.items()}
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def _apply_override(values: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    if not equals or not path.strip():
        raise InputError("--set", override, "Write it as section.key=value, for example update.learning_rate=1e-4.")
    *parents, last = path.strip().split(".")
    place: Any = values
    for depth, key in enumerate(parents):
        if isinstance(place, list):
            place = _item(place, key, override)
            continue
        place = place.setdefault(key, {})
        if not isinstance(place, dict | list):
            raise InputError("--set", override, f"{'.'.join(parents[: depth + 1])} is a value, not a section.")
    value = parse_yaml(text, f"--set {path}")
    if isinstance(place, list):
        _item(place, last, override)
        place[int(last)] = value
    else:
        place[last] = value


def _item(values: list[Any], key: str, override: str) -> Any:
    if not key.isdigit() or int(key) >= len(values):
        raise InputError("--set", override, f"{key!r} is no index of a list of {len(values)} (they count from 0).")
    return values[int(key)]


def _distinct(details: Sequence[Any]) -> list[Any]:
    """Without the complaint that a list is too short when that is so because its entries were refused."""
    refused = {detail["loc"][0] for detail in details if len(detail["loc"]) > 1}
    return [detail for detail in details if detail["type"] != "too_short" or detail["loc"][0] not in refused]


def _explain(model: type[BaseModel], detail: Any) -> InputError:
    location = [part for part in detail["loc"] if part != "tuple"]
    place = ".".join(str(part) for part in location) or "configuration"
    kind, found = detail["type"], detail["input"]
    if kind == "extra_forbidden":
        known = _known_keys(model, location[:-1])
        near = difflib.get_close_matches(str(location[-1]), known, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}? " if near else ""
        return InputError(place, found, f"There is no such key: {hint}Known here: {', '.join(known)}.")
    if kind == "missing":
        return InputError(place, None, "It is missing and has no default; add it.")
    if kind == "string_pattern_mismatch":
        # Names alone have a pattern.
        return InputError(place, found, NAME_MEND)
    return InputError(place, found, f"{detail['msg']}.")


def _known_keys(run: type[BaseModel], location: Sequence[str | int]) -> list[str]:
    model: Any = run
    for part in location:
        if isinstance(part, int):
            continue
        annotation = model.model_fields[part].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        model = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return list(model.model_fields)
