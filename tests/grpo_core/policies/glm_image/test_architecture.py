"""Networks built from configurations alone: those of a folder, and those of the release, with its numbers."""

import shutil
from pathlib import Path

import pytest
import torch
from diffusers import GlmImagePipeline

from grpo_core.errors import InputError
from grpo_core.policies.estimate import count_parameters
from grpo_core.policies.glm_image.loading import (
    RELEASED_MODEL,
    Components,
    build_on_meta,
    find_configs,
    released_configs,
)
from grpo_core.policies.glm_image.policy import LANGUAGE_MODEL_LINEARS
from grpo_core.policies.trained import LoraSettings, TrainingChoice, train_model


def test_a_folder_without_weights_gives_the_networks_of_its_pipeline(
    tiny_pipeline: GlmImagePipeline, tiny_folder: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tiny_folder, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    networks = build_on_meta(find_configs(str(bare)))
    for built, loaded in (
        (networks.autoregressive, tiny_pipeline.vision_language_encoder),
        (networks.decoder, tiny_pipeline.transformer),
        (networks.vae, tiny_pipeline.vae),
        (networks.text_encoder, tiny_pipeline.text_encoder),
    ):
        expected = {name: value.shape for name, value in loaded.named_parameters()}
        assert {name: value.shape for name, value in built.named_parameters()} == expected


@pytest.mark.parametrize("part", ["vision_language_encoder", "transformer", "vae", "text_encoder"])
def test_a_missing_component_is_refused(tiny_folder: Path, tmp_path: Path, part: str) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_folder, broken, ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.rmtree(broken / part)
    with pytest.raises(InputError, match=rf"policy\.model.*no {part}/config\.json"):
        find_configs(str(broken))


def test_a_damaged_configuration_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_folder, broken, ignore=shutil.ignore_patterns("*.safetensors"))
    for part in ("vae", "text_encoder"):
        (broken / part / "config.json").write_text("{ not json")
        with pytest.raises(InputError, match=r"policy\.model.*complete saved pipeline"):
            find_configs(str(broken))
        shutil.copy(tiny_folder / part / "config.json", broken / part / "config.json")


def test_the_release_is_known_without_its_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert find_configs(RELEASED_MODEL).autoregressive.text_config.num_hidden_layers == 40


@pytest.mark.parametrize("model", ["someone/not-cached", "/no/such/folder", "bad name/of a repository"])
def test_another_model_without_files_is_refused(model: str) -> None:
    with pytest.raises(InputError, match=r"policy\.model"):
        find_configs(model)


# --- the release


@pytest.fixture(scope="module")
def released() -> Components:
    return build_on_meta(released_configs())


def test_parameters_are_those_of_the_release(released: Components) -> None:
    assert count_parameters(released.autoregressive) == pytest.approx(10.1e9, rel=0.01)
    assert count_parameters(released.decoder) == pytest.approx(6.93e9, rel=0.01)


def test_adapters_are_on_every_linear_layer_of_the_language_model_and_nowhere_else() -> None:
    model = build_on_meta(released_configs()).autoregressive
    settings = LoraSettings(rank=32, alpha=64.0, targets=LANGUAGE_MODEL_LINEARS)
    with torch.device("meta"):
        adapters = train_model(model, TrainingChoice(settings), base_name="released").trainable_parameters()
    targets = {name.split(".lora_")[0] for name in adapters}
    assert len(targets) == 40 * 6
    assert not [name for name in targets if "visual" in name or "vqmodel" in name]
    count = sum(parameter.numel() for parameter in adapters.values())
    assert count == pytest.approx(95e6, rel=0.01)
