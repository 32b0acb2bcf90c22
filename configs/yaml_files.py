"""Read YAML files as plain values. It imports no model library, so a wrong file name is answered at once."""

import difflib
import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from grpo_core.errors import InputError


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
