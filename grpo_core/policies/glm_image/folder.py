"""Checks of a saved pipeline's files that load no weights."""

import json
from pathlib import Path

from grpo_core.errors import InputError


def refuse_missing_folder(model: str) -> None:
    """Raise InputError for a path that is not a pipeline's folder; hub names pass."""
    path = Path(model).expanduser()
    looks_local = path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1
    if path.is_dir():
        if not (path / "model_index.json").is_file():
            raise InputError("policy.model", model, "The folder has no model_index.json; give a saved pipeline's.")
    elif looks_local or path.parent.is_dir():
        raise InputError("policy.model", model, "There is no such folder; give a saved pipeline's, or a hub name.")


def read_pixel_unit(model: str) -> int | None:
    """Read the pixel unit of a saved pipeline from its configuration files; None if they are not on this machine.

    Args:
        model: a folder, or a hub name, whose files are searched in the local cache only.

    Raises:
        InputError: a configuration file lacks it.
    """
    decoder, autoencoder = _config_file(model, "transformer"), _config_file(model, "vae")
    if decoder is None or autoencoder is None:
        return None
    try:
        patch = json.loads(decoder.read_text())["patch_size"]
        widths = json.loads(autoencoder.read_text())["block_out_channels"]
        return int(2 * patch * 2 ** (len(widths) - 1))
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = f"Its transformer/config.json or vae/config.json is damaged ({error!r}); save the pipeline again."
        raise InputError("policy.model", model, hint) from error


def _config_file(model: str, part: str) -> Path | None:
    folder = Path(model).expanduser()
    if folder.is_dir():
        file = folder / part / "config.json"
        return file if file.is_file() else None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(model, f"{part}/config.json")
    except HFValidationError:
        return None
    return Path(cached) if isinstance(cached, str) else None
