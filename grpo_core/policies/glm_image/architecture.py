"""The four networks of a GLM-Image by their configurations alone: read from a folder, built without memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKL, GlmImageTransformer2DModel
from torch import nn
from transformers import GlmImageConfig, GlmImageForConditionalGeneration, T5Config, T5EncoderModel

from grpo_core.errors import InputError
from grpo_core.policies.glm_image.component_configs import ComponentConfigs
from grpo_core.policies.glm_image.folder import refuse_missing_folder

AUTOREGRESSIVE, DECODER, VAE, TEXT_ENCODER = "vision_language_encoder", "transformer", "vae", "text_encoder"


@dataclass(frozen=True)
class Components:
    """The networks themselves."""

    autoregressive: nn.Module
    decoder: nn.Module
    vae: nn.Module
    text_encoder: nn.Module


def read_configs(folder: Path) -> ComponentConfigs:
    """Read the configurations of a saved pipeline; no weights are opened.

    Args:
        folder: written by `save_pretrained`, or a hub snapshot of the configuration files alone.

    Raises:
        InputError: a component's config.json is missing or is no configuration.
    """
    for part in (AUTOREGRESSIVE, DECODER, VAE, TEXT_ENCODER):
        # transformers gives the class's defaults, those of the release, where a file is missing.
        if not (folder / part / "config.json").is_file():
            hint = f"It holds no {part}/config.json; give the folder of a whole saved pipeline."
            raise InputError("policy.model", str(folder), hint)
    try:
        return ComponentConfigs(
            autoregressive=GlmImageConfig.from_pretrained(folder, subfolder=AUTOREGRESSIVE, local_files_only=True),
            decoder=_diffusers_config(GlmImageTransformer2DModel, folder, DECODER),
            vae=_diffusers_config(AutoencoderKL, folder, VAE),
            text_encoder=T5Config.from_pretrained(folder, subfolder=TEXT_ENCODER, local_files_only=True),
        )
    except OSError as error:
        first_line = str(error).strip().splitlines()[0]
        hint = f"Give the folder of a whole saved pipeline ({first_line})."
        raise InputError("policy.model", str(folder), hint) from error


def _diffusers_config(network: type, folder: Path, subfolder: str) -> Mapping[str, object]:
    config: Mapping[str, object] = network.load_config(folder, subfolder=subfolder, local_files_only=True)  # type: ignore[attr-defined]
    return config


def find_configs(model: str) -> ComponentConfigs:
    """Configurations of a folder, or of a hub name: from the local cache, else as this library knows the release.

    Args:
        model: as in `policy.model`.

    Raises:
        InputError: no such folder, or a hub name that is neither cached nor the release.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    from grpo_core.policies.glm_image.released import RELEASED_MODEL, released_configs

    refuse_missing_folder(model)
    folder = Path(model).expanduser()
    if folder.is_dir():
        return read_configs(folder)
    try:
        return read_configs(Path(snapshot_download(model, local_files_only=True, allow_patterns=["*config.json"])))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        if model == RELEASED_MODEL:
            return released_configs()
        hint = f"Download it first, or give a folder; without its files only {RELEASED_MODEL} is known."
        raise InputError("policy.model", model, hint) from error


def build_on_meta(configs: ComponentConfigs) -> Components:
    """Build the networks on the meta device: every shape and name, no memory and no values."""
    with torch.device("meta"):
        return Components(
            autoregressive=GlmImageForConditionalGeneration(configs.autoregressive),
            decoder=GlmImageTransformer2DModel.from_config(dict(configs.decoder)),
            vae=AutoencoderKL.from_config(dict(configs.vae)),
            text_encoder=T5EncoderModel(configs.text_encoder),
        )
