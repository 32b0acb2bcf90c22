"""Read a YAML file and `--set key=value` overrides into a checked configuration, or report every error at once."""

import difflib
import re
from collections.abc import Hashable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import yaml

from configs.contradictions import contradictions
from configs.schema import RUN_CONFIGS, RewardsFile, RunConfig
from configs.sections import PolicySection
from configs.unknown_keys import TRL_NAMES, translate
from configs.validation import validated
from grpo_core.errors import InputError, InputErrors


class _StrictLoader(yaml.SafeLoader):
    """YAML in which a repeated key is an error and 1e-5 is a number."""


def _unique_keys(loader: _StrictLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: set[Any] = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node)
        if not isinstance(key, Hashable):
            raise yaml.constructor.ConstructorError(None, None, "a key is a name, not a list", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} appears twice", key_node.start_mark)
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_StrictLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _unique_keys)
# YAML 1.1 reads 1e-5 as text; people write learning rates like that.
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def parse_yaml(text: str, place: str) -> Any:
    """Parse YAML text to plain values.

    Raises:
        InputError: the text is not YAML; names the line.
    """
    try:
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{place}, line {mark.line + 1}" if mark else place
        problem = getattr(error, "problem", None) or "it is not YAML"
        # An unclosed bracket is reported at the end of the text, possibly after its last line.
        lines = [*text.splitlines(), ""]
        raise InputError(where, lines[mark.line].strip() if mark else text, f"{problem}. Correct the YAML.") from error


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a configuration file.

    Args:
        overrides: `section.key=value`, the value as YAML.

    Raises:
        InputErrors: every error, each with its path in the file, the value found and a hint.
    """
    try:
        values = read_mapping(path, "CONFIG", example="configs/tiny.yaml", keys="run, policy")
    except InputError as error:
        raise InputErrors([error]) from error
    return _overridden(values, overrides)


def as_config(given: RunConfig | Mapping[str, Any] | str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return a checked configuration from a file, plain values, or a configuration that was built in Python.

    Args:
        given: the path of a YAML file, a mapping with the same sections, or a RunConfig.
        overrides: as for :func:`read_config`.

    Raises:
        InputErrors: as read_config.
    """
    if isinstance(given, str | Path):
        return read_config(given, overrides)
    # A RunConfig that was built directly has not been checked for contradictions between its sections.
    return _overridden(
        given.model_dump(mode="json") if isinstance(given, RunConfig) else deepcopy(dict(given)), overrides
    )


def _overridden(values: dict[str, Any], overrides: Sequence[str]) -> RunConfig:
    # The file is translated first: an option may override a key that the file sets under its other name.
    errors = translate(values)
    errors += _apply_overrides(values, overrides)
    try:
        config = check_config(values)
    except InputErrors as error:
        raise InputErrors([*errors, *error.errors]) from error
    if errors:
        raise InputErrors(errors)
    return config


def read_rewards_file(path: str | Path, place: str) -> RewardsFile:
    """Read a file of rewards, without checking whether they can be built or fit some rollouts.

    Args:
        place: the argument or option that names it, for messages.

    Raises:
        InputErrors: every error in its form.
    """
    try:
        values = read_mapping(path, place, example="configs/rewards/mix.yaml", keys="rewards")
    except InputError as error:
        raise InputErrors([error]) from error
    return validated(RewardsFile, values)


def read_mapping(path: str | Path, place: str, *, example: str, keys: str) -> dict[str, Any]:
    """Read a YAML file whose top level is a mapping, as plain values.

    Args:
        place: the argument or option that names it, for messages.

    Raises:
        InputError: it cannot be read, or is not a mapping.
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
        raise InputError(str(path), values, f"It has to be a mapping with the sections {keys}, ...")
    return values


def check_config(values: Mapping[str, Any]) -> RunConfig:
    """Validate plain values as a configuration.

    Raises:
        InputErrors: as read_config.
    """
    return validated(_model_for(values), values, contradictions)


def _model_for(values: Mapping[str, Any]) -> type[RunConfig]:
    """Return the model of a configuration: the keys of the rollout section depend on the policy."""
    policy = values.get("policy")
    default = PolicySection.model_fields["kind"].default
    kind = policy.get("kind", default) if isinstance(policy, Mapping) else default
    return RUN_CONFIGS[kind if isinstance(kind, str) and kind in RUN_CONFIGS else default]


def _apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> list[InputError]:
    """Change values in place; return the errors of the overrides."""
    errors: list[InputError] = []
    names: dict[str, str] = {}
    for override in overrides:
        given = override.partition("=")[0].strip()
        path = TRL_NAMES.get(given, given)
        if names.setdefault(path, given) != given:
            errors.append(InputError("--set", override, f"{names[path]} is set too and means the same; give one."))
            continue
        try:
            if path != given:
                _remove(values, path)
            _apply_override(values, override)
        except InputError as error:
            errors.append(error)
    return errors


def _remove(values: dict[str, Any], path: str) -> None:
    """Remove a key of the file that an option sets under TRL's name."""
    *parents, last = path.split(".")
    place: Any = values
    for key in parents:
        place = place.get(key) if isinstance(place, dict) else None
    if isinstance(place, dict):
        place.pop(last, None)


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
        raise InputError("--set", override, f"{key!r} is no index of a list of length {len(values)} (from 0).")
    return values[int(key)]
