"""A folder or a name -> the pipeline: what is loaded is what was saved, and damaged folders are refused."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import GlmImagePipeline
from transformers import GlmImageProcessor

from grpo_core.errors import InputError
from grpo_core.policies.glm_image.loading import load_pipeline, pixel_unit, read_initial_state
from tests.tiny_policy import MODEL

CPU = torch.device("cpu")
PARTS = ("vision_language_encoder", "text_encoder", "transformer", "vae")


def load(model: str | Path) -> GlmImagePipeline:
    return load_pipeline(str(model), dtype=torch.float32, device=CPU)


def test_the_unit_is_that_of_the_decoder(shipped_pipeline: GlmImagePipeline) -> None:
    """Two by two patches of one latent pixel each, of 2 x 2 x ... image pixels: read from the configurations."""
    vae = json.loads((MODEL / "vae" / "config.json").read_text())
    decoder = json.loads((MODEL / "transformer" / "config.json").read_text())
    expected = 2 * decoder["patch_size"] * 2 ** (len(vae["block_out_channels"]) - 1)
    assert pixel_unit(shipped_pipeline) == shipped_pipeline.processor.unit == expected == 8


def test_every_part_is_frozen_and_evaluates(shipped_pipeline: GlmImagePipeline) -> None:
    for part in PARTS:
        module = getattr(shipped_pipeline, part)
        assert not any(parameter.requires_grad for parameter in module.parameters())
        assert not any(child.training for child in module.modules())


def test_a_saved_pipeline_needs_nothing_of_this_project(shipped_pipeline: GlmImagePipeline, tmp_path: Path) -> None:
    shipped_pipeline.save_pretrained(tmp_path)
    stock = GlmImagePipeline.from_pretrained(tmp_path)
    assert type(stock.processor) is GlmImageProcessor
    written, shipped = (json.loads((folder / "model_index.json").read_text()) for folder in (tmp_path, MODEL))
    assert {key: value for key, value in written.items() if key != "_name_or_path"} == shipped
    assert not [file for file in tmp_path.rglob("*.json") if "UnitProcessor" in file.read_text()]


def test_initial_state_is_that_of_the_files(shipped_pipeline: GlmImagePipeline) -> None:
    state = read_initial_state(str(MODEL), torch.float32)
    expected = shipped_pipeline.vision_language_encoder.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    "name", ["/nowhere/at/all", "./nothing", "nothing", "a/b/c", "data/models/none", "nobody/has-this", "not a/name"]
)
def test_a_missing_model_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="folder") as caught:
        load(name)
    assert (caught.value.place, caught.value.value) == ("policy.model", name)


def _remove(path: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        target = folder / path
        if target.is_dir():
            shutil.rmtree(target)
        else:
            target.unlink()

    return damage


def _cut(path: str, size: int) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / path).write_bytes((folder / path).read_bytes()[:size])

    return damage


@pytest.mark.parametrize(
    "damage",
    [
        _remove("model_index.json"),
        _remove("vae"),
        _remove("processor"),
        _remove("vision_language_encoder/model.safetensors"),
        _cut("model_index.json", 40),
        _cut("vae/config.json", 40),
        _cut("vision_language_encoder/config.json", 40),
        _cut("vision_language_encoder/model.safetensors", 4),
        _cut("vision_language_encoder/model.safetensors", 5000),
        _cut("vision_language_encoder/model.safetensors", 100_000),
        _cut("vae/diffusion_pytorch_model.safetensors", 100),
    ],
)
def test_a_damaged_folder_is_refused(damage: Callable[[Path], None], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    damage(folder)
    with pytest.raises(InputError) as caught:
        load(folder)
    assert (caught.value.place, caught.value.value) == ("policy.model", str(folder))
