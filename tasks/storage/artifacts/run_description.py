"""Describe a run: run.json, which has a checksum, and config.yaml, whose sha256 run.json states."""

import hashlib
from collections.abc import Mapping
from typing import Any

from grpo_core.errors import InputError
from tasks.storage.filesystem.checked_json import dump_checked, load_checked
from tasks.storage.filesystem.run_folder import RunFolder

RUN_FILE, CONFIG_FILE = "run.json", "config.yaml"
CONFIG_SHA256 = "config_sha256"
_HINT = "Start the run again with its own command, which writes it again."


def write_description(store: RunFolder, described: Mapping[str, Any], config: bytes) -> None:
    """Write both files; a reader between the two writes finds a configuration that does not match."""
    store.write_file(CONFIG_FILE, config)
    store.write_file(RUN_FILE, dump_checked({**described, CONFIG_SHA256: hashlib.sha256(config).hexdigest()}))


def read_description(store: RunFolder) -> Mapping[str, Any]:
    """Return the content of run.json; empty where there is none.

    Raises:
        InputError: it is damaged.
    """
    content = store.read_file(RUN_FILE)
    try:
        return {} if content is None else load_checked(content)
    except ValueError as error:
        raise InputError(f"{store.run}/{RUN_FILE}", str(error), f"It is damaged. {_HINT}") from error


def read_config_file(store: RunFolder) -> bytes:
    """Return the configuration that the run was made with, as YAML.

    Raises:
        InputError: it is missing or was changed.
    """
    content = store.read_file(CONFIG_FILE)
    if content is None:
        hint = f"It has no {CONFIG_FILE}, so it is unknown how its rollouts were made; name another run."
        raise InputError("RUN", store.run, hint)
    found = hashlib.sha256(content).hexdigest()
    if read_description(store).get(CONFIG_SHA256, found) != found:
        hint = f"It is not what the run wrote. {_HINT}"
        raise InputError(f"{store.run}/{CONFIG_FILE}", f"sha256 {found[:12]}", hint)
    return content
