"""A CLIP of a few thousand parameters in open_clip's own formats."""

import json
from pathlib import Path

import open_clip
import pytest
import safetensors.torch
import torch

NETWORK = {
    "embed_dim": 12,
    "quick_gelu": True,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 16, "head_width": 8, "patch_size": 16},
    "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 16, "heads": 2, "layers": 2},
}
MEAN, STD = [0.4, 0.5, 0.6], [0.2, 0.25, 0.3]


@pytest.fixture(scope="session")
def clip_config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clip") / "open_clip_config.json"
    path.write_text(json.dumps({"model_cfg": NETWORK, "preprocess_cfg": {"mean": MEAN, "std": STD}}))
    return path


@pytest.fixture(scope="session")
def clip_oracle(clip_config: Path) -> torch.nn.Module:
    """open_clip's own construction of that configuration, with random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model, _, transform = open_clip.create_model_and_transforms(
            f"local-dir:{clip_config.parent}", load_weights=False
        )
        for name, parameter in model.named_parameters():
            # With open_clip's own initialisation a network this small hardly sees the image.
            if parameter.ndim > 1 and "positional" not in name:
                torch.nn.init.normal_(parameter, std=0.5)
    model.eval().transform = transform
    oracle: torch.nn.Module = model
    return oracle


@pytest.fixture(scope="session")
def clip_weights(clip_oracle: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("clip_weights") / "open_clip_model.safetensors"
    safetensors.torch.save_file(clip_oracle.state_dict(), path)
    return path
