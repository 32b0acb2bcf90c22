"""Read YAML files as plain values, without any model library; TRL's names of keys, and suggestions for unknown ones."""

import copy
import difflib
import json
import os
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel

from configs.trl_names import OTHER_MEANING, TRL_NAMES, reason_for_none
from grpo_core.errors import InputError
from grpo_core.losses.settings import LOSSES
from grpo_core.rollouts.streams import STREAMS

ABBREVIATIONS: Mapping[str, str] = {
    "lr": "learning_rate",
    "kl": "kl_coef",
    "wd": "weight_decay",
    "steps": "iterations",
    "model_name": "model",
    "device": "devices",
    "processes": "devices",
    "peft_config": "lora",
    "r": "rank",
}
"""What people call a setting -> its name."""

NONE_CHOSEN: Mapping[str, type[BaseModel]] = {}

_SCALES = {True: "group", False: "none"}


def our_path(path: str) -> str:
    """Return the path of a setting with our name for it; of an update's also where they stand by stream."""
    section, stream, name = (*path.split(".", 2), "", "")[:3]
    if section == "update" and stream in STREAMS:
        return f"update.{stream}{TRL_NAMES.get(f'update.{name}', f'update.{name}').removeprefix('update')}"
    return TRL_NAMES.get(path, path)


def override_path(override: str) -> str:
    """Return the path of the setting that `path=value` changes, or `~path` leaves out, with our name for it."""
    return our_path(override.partition("=")[0].strip().removeprefix("~"))


def translate(values: dict[str, Any]) -> list[InputError]:
    """Rename TRL's settings in a configuration, in place; return errors for those that cannot be, which are removed."""
    errors = []
    for path in (*TRL_NAMES, *OTHER_MEANING):
        section, _, name = path.partition(".")
        found = values.get(section)
        if not isinstance(found, dict):
            continue
        errors += _translate(found, section, name)
        for stream in STREAMS if section == "update" else ():
            if isinstance(inner := found.get(stream), dict):
                errors += _translate(inner, f"{section}.{stream}", name)
    return errors


def _translate(found: dict[str, Any], place: str, name: str) -> list[InputError]:
    """Rename one of TRL's settings in the section at a place."""
    if name not in found:
        return []
    path, value = f"{place.partition('.')[0]}.{name}", found.pop(name)
    if path == "update.epsilon_high" and "cispo" in (found.get("loss"), found.get("loss_type")):
        hint = f"With cispo TRL's epsilon_high caps the ratio itself; set {place}.loss_settings.ratio_cap."
        return [InputError(f"{place}.{name}", value, hint)]
    if path in OTHER_MEANING:
        return [InputError(f"{place}.{name}", value, OTHER_MEANING[path].replace("`", ""))]
    target = TRL_NAMES[path].partition(".")[2]
    *parents, last = target.split(".")
    section = found
    for parent in parents:
        inner: Any = section.setdefault(parent, {})
        if not isinstance(inner, dict):
            return []  # reported as a section that is not a mapping
        section = inner
    if last in section:
        hint = f"{place}.{target} is set too and means the same; leave one of them out."
        return [InputError(f"{place}.{name}", value, hint)]
    section[last] = _SCALES[value] if name == "scale_rewards" and isinstance(value, bool) else value
    return []


def nearest_key(
    model: type[BaseModel], location: Sequence[str], chosen: Mapping[str, type[BaseModel]] = NONE_CHOSEN
) -> str:
    """Suggest the full paths of keys similar to an unknown one, and list the keys of its section.

    Args:
        location: path of the unknown key; numbers are indices in a list.
        chosen: models by path, for fields that allow several.
    """
    if ".".join(location) in ("update.tokens", "update.denoising"):
        return "Only a run that trains both streams (policy.train) has one update each; give its keys in update itself."
    section, name = tuple(part for part in location[:-1] if not part.isdigit()), location[-1]
    if section[:1] == ("update",) and any(name in loss.settings for loss in LOSSES.values()):
        return f"Only one loss reads it; set {'.'.join((*section, 'loss_settings', name))}."
    paths = list(_paths(model, chosen))
    here = [path for path in paths if path[:-1] == section]
    elsewhere = [path for path in paths if path[:-1] != section]
    renamed = [tuple(ours.split(".")) for trl, ours in TRL_NAMES.items() if trl.endswith(f".{name}")]
    short = ABBREVIATIONS.get(name)
    near = (
        _close(name, here, cutoff=0.85)
        or [path for path in paths if path[-1] == short]
        or [path for path in elsewhere if path[-1] == name]
        or [path for path in renamed if path in paths]
    )
    if not near and (reason := reason_for_none(name)):
        return reason
    # Few letters are near to anything elsewhere: lr to lora.
    near = near or _close(name, here) or (_close(name, elsewhere) if len(name) > 3 else [])
    if near:
        # Keys of an entry of a list have its number.
        whole = ((*location[:-1], path[-1]) if path in here else path for path in near[:3])
        return f"Did you mean {' or '.join('.'.join(path) for path in whole)}?"
    return f"Known here: {', '.join(path[-1] for path in here)}."


def section_hint(
    model: type[BaseModel], location: Sequence[str], chosen: Mapping[str, type[BaseModel]], found: object
) -> str:
    """Say how the section at a location is written, for a value in its place; arguments as for :func:`nearest_key`."""
    section = tuple(part for part in location if not part.isdigit())
    keys = [path[-1] for path in _paths(model, chosen) if path[:-1] == section]
    if section == ("rewards",) and isinstance(found, str):
        return f"An entry has keys and values: write it as {{reward: {found}}}."
    some = ", ".join(keys[:6]) + (", ..." if len(keys) > 6 else "")
    return f"It has keys and values: {some}. Write those that you need, or leave it out if it has a default."


def list_hint(model: type[BaseModel], location: Sequence[str], chosen: Mapping[str, type[BaseModel]]) -> str | None:
    """Say how a list of sections is written, for a value in its place; None for a list of plain values."""
    section = tuple(part for part in location if not part.isdigit())
    entry = _model_at(model, section, chosen)
    if entry is None:
        return None
    needed = ", ".join(f"{name}: ..." for name, field in entry.model_fields.items() if field.is_required())
    return f"It has to be a list, each entry with its keys: {section[-1]}: [{{{needed}}}]."


def _model_at(
    model: type[BaseModel], section: Sequence[str], chosen: Mapping[str, type[BaseModel]]
) -> type[BaseModel] | None:
    for depth, name in enumerate(section, start=1):
        field = model.model_fields.get(name)
        found = chosen.get(".".join(section[:depth])) or next(iter(_models(field.annotation if field else None)), None)
        if found is None:
            return None
        model = found
    return model


def _close(name: str, paths: Sequence[tuple[str, ...]], cutoff: float = 0.6) -> list[tuple[str, ...]]:
    close = difflib.get_close_matches(name, {path[-1] for path in paths}, n=1, cutoff=cutoff)
    return [path for path in paths if path[-1] in close]


def _paths(
    model: type[BaseModel], chosen: Mapping[str, type[BaseModel]], above: tuple[str, ...] = ()
) -> Iterator[tuple[str, ...]]:
    """Yield the path of every key of a model; the entries of a list have the path of the list."""
    for name, field in model.model_fields.items():
        path = (*above, name)
        yield path
        only = chosen.get(".".join(path))
        for inner in [only] if only else _models(field.annotation):
            yield from _paths(inner, chosen, path)


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in getattr(annotation, "__args__", ()) for model in _models(argument)]


_NUMBER_BITS = 1024
"""Longest whole number; what is longer is beyond every float, and cannot be printed."""


class _StrictLoader(yaml.SafeLoader):
    """YAML in which a repeated key is an error and 1e-5 is a number."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Make the value of a node; a scalar that is none of its kind, such as the date 2001-99-99, is a YAML error."""
        problem = f"it is no value of the kind {node.tag.rpartition(':')[2]}"
        try:
            value = super().construct_object(node, deep)
        # PyYAML lets the errors of Python's own conversions through.
        except (ValueError, LookupError, AttributeError, OverflowError) as error:
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error
        if isinstance(value, int) and value.bit_length() > _NUMBER_BITS:
            raise yaml.constructor.ConstructorError(None, None, "the number is too long", node.start_mark)
        return value


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


MAX_VALUES = 100_000
"""Maximum number of values of a file; aliases of aliases make billions of a few lines."""

MAX_CHARACTERS = 256 * 1024
"""Maximum length of a file, of which each 100,000 characters take a second to read."""

# Escaped as in JSON, a letter beyond U+FFFF would be two halves in YAML; these would end the line, or are no text.
_ESCAPED = re.compile("[\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff]")


def yaml_value(value: object) -> str:
    """Write a plain value as YAML of one line, such as the VALUE of `--set KEY=VALUE`; a path becomes its text."""
    written = json.dumps(value, ensure_ascii=False, default=os.fspath)
    return _ESCAPED.sub(lambda letter: f"\\u{ord(letter[0]):04x}", written)


def _count_values(node: yaml.Node, counts: dict[int, int]) -> int:
    """Count the values of a node and below it, those of an alias each time."""
    known = counts.get(id(node))
    if known is None:
        # An alias of what it is in is refused when the values are made.
        counts[id(node)] = 1
        inner = node.value if isinstance(node, yaml.CollectionNode) else ()
        below = (each for item in inner for each in (item if isinstance(item, tuple) else (item,)))
        counts[id(node)] = known = 1 + sum(_count_values(each, counts) for each in below)
    return known


def parse_yaml(text: str, place: str) -> Any:
    """Parse YAML text to plain values.

    Raises:
        InputError: the text is not YAML (with the line), has too many values, or nests them too deeply.
    """
    if len(text) > MAX_CHARACTERS:
        hint = f"At most {MAX_CHARACTERS:,} characters are read. Move what is long, such as prompts, to own files."
        raise InputError(place, f"{len(text):,} characters", hint)
    return copy.deepcopy(_parsed(text, place))


# A command reads the configuration of its run several times.
@lru_cache(maxsize=64)
def _parsed(text: str, place: str) -> Any:
    try:
        loader = _StrictLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if (count := _count_values(node, {})) > MAX_VALUES:
            hint = f"At most {MAX_VALUES:,} are read. Its aliases (*name) repeat others; write out what is meant."
            raise InputError(place, f"{count:,} values", hint)
        return loader.construct_document(node)
    except RecursionError:
        raise InputError(place, f"{text[:40]}...", "Its values are nested too deeply. Flatten them.") from None
    except InputError:
        raise
    except (ValueError, OverflowError) as error:
        raise InputError(place, text[:40], f"It has an escape for no letter ({error}). Correct the YAML.") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{place}, line {mark.line + 1}" if mark else place
        problem = getattr(error, "problem", None) or "it is not YAML"
        # An unclosed bracket is reported at the end of the text, possibly after its last line.
        lines = [*text.splitlines(), ""]
        raise InputError(where, lines[mark.line].strip() if mark else text, f"{problem}. Correct the YAML.") from error


def read_mapping(path: str | Path, place: str, model: type[BaseModel], *, example: str) -> dict[str, Any]:
    """Read a YAML file whose top level is a mapping, as plain values; messages name it by its argument or option.

    Raises:
        InputError: it cannot be read, with the nearest file that has the keys of the model; or it is not a mapping.
    """
    file = Path(path)
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        found = difflib.get_close_matches(file.name, [p.name for p in file.parent.glob("*.yaml")])
        near = [name for name in found if _has_keys(file.parent / name, model)]
        hint = f" Did you mean {file.parent / near[0]}?" if near else ""
        raise InputError(place, str(path), f"Give a readable YAML file, such as {example}.{hint}") from error
    values = parse_yaml(text, str(path))
    if not isinstance(values, dict):
        keys = ", ".join(_required(model))
        raise InputError(str(path), values, f"It has to be a mapping with the sections {keys}, ...")
    return values


def _required(model: type[BaseModel]) -> list[str]:
    return [name for name, field in model.model_fields.items() if field.is_required()]


def _has_keys(file: Path, model: type[BaseModel]) -> bool:
    """Whether a file has all required keys of a model and no other's."""
    try:
        values = parse_yaml(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError, InputError):
        return False
    return isinstance(values, dict) and {*_required(model)} <= values.keys() <= model.model_fields.keys()
