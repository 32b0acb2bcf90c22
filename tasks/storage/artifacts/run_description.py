"""What a run says of itself: run.json, under a seal, and config.yaml, whose sha256 it holds."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from grpo_core.errors import InputError
from tasks.storage.filesystem.checked_json import SEAL, dump_checked, load_checked
from tasks.storage.filesystem.run_folder import RunFolder

RUN_FILE, CONFIG_FILE = "run.json", "config.yaml"
CONFIG_SHA256 = "config_sha256"
_MEND = "Start the run again with its own command, which writes it anew."


def write_description(store: RunFolder, described: Mapping[str, Any], config: bytes) -> None:
    """Keep both; whoever reads them between the two writes finds a configuration that does not fit."""
    store.write_file(CONFIG_FILE, config)
    store.write_file(RUN_FILE, dump_checked({**described, CONFIG_SHA256: hashlib.sha256(config).hexdigest()}))


def load_description(content: bytes) -> Mapping[str, Any]:
    """What run.json says; a release before this one wrote it without a seal.

    Raises:
        ValueError: it is not as it was written.
    """
    described = json.loads(content)
    if not isinstance(described, dict):
        raise ValueError("it holds no names and values")
    return load_checked(content) if SEAL in described else described


def read_description(store: RunFolder) -> Mapping[str, Any]:
    """What the run's run.json says; empty where there is none.

    Raises:
        InputError: it is damaged.
    """
    content = store.read_file(RUN_FILE)
    try:
        return {} if content is None else load_description(content)
    except ValueError as error:
        raise InputError(f"{store.run}/{RUN_FILE}", str(error), f"It is damaged. {_MEND}") from error


def read_config_file(store: RunFolder) -> bytes:
    """The configuration that the run was made with, as YAML.

    Raises:
        InputError: it is not there, or not what the run wrote.
    """
    content = store.read_file(CONFIG_FILE)
    if content is None:
        hint = f"It has no {CONFIG_FILE}, so nothing says how its rollouts came to be."
        raise InputError("RUN", store.run, hint)
    found = hashlib.sha256(content).hexdigest()
    if read_description(store).get(CONFIG_SHA256, found) != found:
        hint = f"It is not what the run wrote. {_MEND}"
        raise InputError(f"{store.run}/{CONFIG_FILE}", f"sha256 {found[:12]}", hint)
    return content
