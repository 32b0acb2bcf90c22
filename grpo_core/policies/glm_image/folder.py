"""What a saved pipeline's files say of it, read without loading anything: the first look at a person's input."""

import json
from pathlib import Path

from grpo_core.errors import InputError


def refuse_missing_folder(model: str) -> None:
    """Raise InputError for something that is meant as a folder but is none; hub names pass."""
    path = Path(model).expanduser()
    looks_local = path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1
    if path.is_dir():
        if not (path / "model_index.json").is_file():
            raise InputError("policy.model", model, "The folder holds no model_index.json; give a saved pipeline's.")
    elif looks_local or path.parent.is_dir():
        raise InputError("policy.model", model, "There is no such folder; give a saved pipeline's, or a hub name.")


def read_pixel_unit(model: str) -> int | None:
    """The pixel unit of a saved pipeline from its configuration files alone; None where they are not at hand."""
    folder = Path(model).expanduser()
    try:
        decoder = json.loads((folder / "transformer" / "config.json").read_text())
        autoencoder = json.loads((folder / "vae" / "config.json").read_text())
    except FileNotFoundError:
        return None
    return int(2 * decoder["patch_size"] * 2 ** (len(autoencoder["block_out_channels"]) - 1))
