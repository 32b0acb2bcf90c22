"""Read a YAML file and `--set key=value` overrides into a checked configuration, or report every error at once."""

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from configs.contradictions import contradictions
from configs.schema import RewardsFile, RunConfig
from configs.validation import secret_addresses, validated
from configs.yaml_files import override_path, parse_yaml, read_mapping, translate
from grpo_core.errors import InputError, joined, raise_all
from grpo_core.pipeline_files import read_kind

_LEAVE_OUT = re.compile(r"\bleave (it|this|them|keep) out\b", re.IGNORECASE)
"""How hints say that a key should not be given."""


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a configuration file and overrides: `section.key=value` with the value as YAML, or `~section.key`.

    Raises:
        InputError: every error, each with its path in the file, the value found and a hint.
    """
    return _overridden(read_mapping(path, "CONFIG", RunConfig, example="configs/tiny.yaml"), overrides)


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
        changed = [override_path(override) for override in overrides]
        raise joined([*errors, *(_with_option(each, values, changed) for each in error.errors)]) from error
    raise_all(errors)
    return config


def _with_option(error: InputError, values: Mapping[str, Any], changed: Sequence[str]) -> InputError:
    """Say how the command line, where it changes something, leaves out what the file gives and should leave out."""
    path = error.place.split(".")
    in_file = _container(values, path) is not None and not any(f"{error.place}.".startswith(f"{p}.") for p in changed)
    if not changed or not in_file or not _LEAVE_OUT.search(error.hint):
        return error
    return InputError(error.place, error.value, f"{error.hint} On the command line: --set '~{error.place}'.")


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
    return validated(RewardsFile, read_mapping(path, place, RewardsFile, example="configs/rewards/mix.yaml"))


def check_config(values: Mapping[str, Any]) -> RunConfig:
    """Validate plain values as a configuration; errors are those of :func:`read_config`."""
    return validated(RunConfig, values, contradictions)


def apply_overrides(values: dict[str, Any], overrides: Sequence[str]) -> list[InputError]:
    """Change plain values in place by `section.key=value` or `~section.key`; return the errors of the overrides."""
    errors: list[InputError] = []
    names: dict[str, str] = {}
    for override in overrides:
        given, path = override.partition("=")[0].strip().removeprefix("~"), override_path(override)
        if names.setdefault(path, given) != given:
            errors.append(InputError("--set", override, f"{names[path]} is set too and means the same; give one."))
            continue
        try:
            if override.lstrip().startswith("~"):
                _leave_out(values, path, override)
                continue
            if (found := _container(values, path.split("."))) is not None and path != given:
                # An option under TRL's name replaces a key of the file.
                found.pop(path.rpartition(".")[2])
            _apply_override(values, override)
        except InputError as error:
            errors.append(error)
    return errors


def _container(values: Any, path: Sequence[str]) -> Any:
    """Return the mapping or list that has the last key of a path; None where there is no such key."""
    for depth, key in enumerate(path):
        at = int(key) if isinstance(values, list) and key.isdigit() else key
        if not (at in values if isinstance(values, dict) else isinstance(values, list) and at in range(len(values))):
            return None
        if depth < len(path) - 1:
            values = values[at]
    return values


def _leave_out(values: dict[str, Any], path: str, override: str) -> None:
    found, last = _container(values, path.split(".")), path.rpartition(".")[2]
    if "=" in override or found is None:
        hint = f"Write it as ~{path}." if found is not None else "There is no such key to leave out; remove this."
        raise InputError("--set", override, hint)
    found.pop(int(last) if isinstance(found, list) else last)


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
