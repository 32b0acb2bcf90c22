"""Read a YAML file and `--set key=value` overrides into a checked configuration, or report every error at once."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from configs.contradictions import contradictions
from configs.schema import RewardsFile, RunConfig
from configs.validation import secret_addresses, validated
from configs.yaml_files import our_path, parse_yaml, read_mapping, translate
from grpo_core.errors import InputError, joined, raise_all
from grpo_core.pipeline_files import read_kind


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a configuration file and overrides, `section.key=value` with the value as YAML.

    Raises:
        InputError: every error, each with its path in the file, the value found and a hint.
    """
    return _overridden(read_mapping(path, "CONFIG", example="configs/tiny.yaml", keys="run, policy"), overrides)


def as_config(given: RunConfig | Mapping[str, Any] | str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return a checked configuration from a file, plain values, or a configuration that was built in Python.

    Overrides and errors are those of :func:`read_config`.
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
    # First, since errors repeat the values.
    raise_all(secret_addresses(values))
    if (unknown := _unknown_kind(values.get("policy"))) is not None:
        # Which other keys there are depends on it.
        raise joined([*errors, unknown])
    try:
        config = check_config(values)
    except InputError as error:
        raise joined([*errors, error]) from error
    raise_all(errors)
    return config


def _unknown_kind(policy: Any) -> InputError | None:
    """Return an error for a policy without a kind whose model's files, which would tell it, are not on this machine."""
    given = policy if isinstance(policy, Mapping) else {}
    model, revision = given.get("model"), given.get("revision")
    if given.get("kind") is not None or not isinstance(model, str):
        return None
    if read_kind(model, revision if isinstance(revision, str) else None) is not None:
        return None
    if Path(model).expanduser().is_dir():
        hint = "The folder has neither model_index.json nor config.json; give a saved model's."
        return InputError("policy.model", model, hint)
    if model.startswith(("/", ".", "~")) or model.count("/") > 1:
        return InputError("policy.model", model, "There is no such folder; give a saved model's, or a hub name.")
    kinds = "causal_lm (a language model), vision_lm (one that reads images), diffusers (a pipeline) or glm_image"
    hint = f"It is read from the model's files, and those of {model} are not on this machine: set it to {kinds}."
    return InputError("policy.kind", None, hint)


def read_rewards_file(path: str | Path, place: str) -> RewardsFile:
    """Read a file of rewards, without checking whether they can be built or fit some rollouts.

    Raises:
        InputError: every error in its form; the file is named by `place`, an argument or option.
    """
    return validated(RewardsFile, read_mapping(path, place, example="configs/rewards/mix.yaml", keys="rewards"))


def check_config(values: Mapping[str, Any]) -> RunConfig:
    """Validate plain values as a configuration; errors are those of :func:`read_config`."""
    return validated(RunConfig, values, contradictions)


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> list[InputError]:
    """Change plain values in place by `section.key=value`; return the errors of the overrides."""
    errors: list[InputError] = []
    names: dict[str, str] = {}
    for override in overrides:
        given = override.partition("=")[0].strip()
        path = our_path(given)
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
