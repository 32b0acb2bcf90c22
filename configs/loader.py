"""Read a YAML file and `--set key=value` overrides into a checked configuration, or report every error at once."""

import difflib
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import reduce
from pathlib import Path
from typing import Any, get_args

from configs.contradictions import contradictions
from configs.schema import RUN_CONFIGS, RewardsFile, RunConfig
from configs.sections import PARTS, Kind, PolicySection, trained_by_default
from configs.training import UpdateSection
from configs.unknown_keys import TRL_NAMES, translate
from configs.validation import validated
from configs.yaml_files import parse_yaml, read_mapping
from grpo_core.errors import InputError, joined, raise_all
from grpo_core.policies.protocol import policy_family

GRPO: str = UpdateSection.model_fields["algorithm"].default


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a configuration file.

    Args:
        overrides: `section.key=value`, the value as YAML.

    Raises:
        InputError: every error, each with its path in the file, the value found and a hint.
    """
    return _overridden(read_mapping(path, "CONFIG", example="configs/tiny.yaml", keys="run, policy"), overrides)


def as_config(given: RunConfig | Mapping[str, Any] | str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return a checked configuration from a file, plain values, or a configuration that was built in Python.

    Args:
        given: the path of a YAML file, a mapping with the same sections, or a RunConfig.
        overrides: as for :func:`read_config`.

    Raises:
        InputError: as read_config.
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
    errors += apply_overrides(values, overrides)
    try:
        config = check_config(values)
    except InputError as error:
        raise joined([*errors, error]) from error
    raise_all(errors)
    return config


def read_rewards_file(path: str | Path, place: str) -> RewardsFile:
    """Read a file of rewards, without checking whether they can be built or fit some rollouts.

    Args:
        place: the argument or option that names it, for messages.

    Raises:
        InputError: every error in its form.
    """
    return validated(RewardsFile, read_mapping(path, place, example="configs/rewards/mix.yaml", keys="rewards"))


def check_config(values: Mapping[str, Any]) -> RunConfig:
    """Validate plain values as a configuration.

    Raises:
        InputError: as read_config.
    """
    place, models = _models_for(values)
    section = reduce(_section, place, values)
    given = section.get("algorithm", GRPO)
    if isinstance(given, str) and given in models:
        return validated(models[given], values, contradictions)
    # The other keys are checked as those of the algorithm that was probably meant.
    near = difflib.get_close_matches(str(given), models, n=1)
    meant = f"Did you mean {near[0]}? " if near else ""
    hint = f"{meant}What this run trains has: {', '.join(models)}."
    problem = InputError(".".join((*place, "algorithm")), given, hint)
    algorithm = near[0] if near else GRPO
    corrected = deepcopy(dict(values))
    reduce(lambda outer, name: outer[name], place, corrected)["algorithm"] = algorithm
    try:
        validated(models[algorithm], corrected, contradictions)
    except InputError as others:
        raise joined([problem, others]) from others
    raise problem


def _models_for(values: Mapping[str, Any]) -> tuple[tuple[str, ...], Mapping[str, type[RunConfig]]]:
    """Return the section that has the algorithm, and the models by algorithm, whose keys depend on what is trained."""
    policy = _section(values, "policy")
    default = PolicySection.model_fields["kind"].default
    kind = policy.get("kind", default)
    kind = kind if kind in get_args(Kind) else default
    train = policy.get("train", trained_by_default(kind))
    streams = tuple(stream for stream, part in PARTS.items() if isinstance(train, list | tuple) and part in train)
    if (kind, streams, GRPO) not in RUN_CONFIGS:
        # What a kind cannot train is refused by its place, over the keys of what it does by default.
        streams = policy_family(kind).streams[:1]
    models = {algorithm: model for (*trained, algorithm), model in RUN_CONFIGS.items() if trained == [kind, streams]}
    return ("update", "denoising") if len(streams) > 1 else ("update",), models


def _section(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    given = values.get(name)
    return given if isinstance(given, Mapping) else {}


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> list[InputError]:
    """Change plain values in place by `section.key=value`; return the errors of the overrides."""
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
