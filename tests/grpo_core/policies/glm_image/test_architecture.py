import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from diffusers import GlmImagePipeline

from grpo_core.errors import InputError
from grpo_core.policies.estimate import count_parameters
from grpo_core.policies.glm_image.architecture import find_configs, read_configs
from grpo_core.policies.glm_image.component_configs import ComponentConfigs
from grpo_core.policies.glm_image.loading import pixel_unit
from grpo_core.policies.glm_image.released import RELEASED_MODEL
from grpo_core.policies.glm_image.sizes import ComponentSizes, component_sizes


def test_a_folder_gives_the_sizes_of_the_pipeline_it_was_saved_from(
    tiny_pipeline: GlmImagePipeline, tiny_folder: Path, tiny_configs: ComponentConfigs
) -> None:
    sizes = component_sizes(find_configs(str(tiny_folder)))
    assert sizes == component_sizes(tiny_configs)
    assert sizes.autoregressive == count_parameters(tiny_pipeline.vision_language_encoder)
    assert sizes.decoder == count_parameters(tiny_pipeline.transformer)
    assert sizes.vae == count_parameters(tiny_pipeline.vae)
    assert sizes.text_encoder == count_parameters(tiny_pipeline.text_encoder)
    assert sizes.unit == pixel_unit(tiny_pipeline)


def test_no_weights_are_read(tiny_folder: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(tiny_folder, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    assert component_sizes(read_configs(bare)) == component_sizes(read_configs(tiny_folder))


def test_a_change_of_the_configuration_is_seen(tiny_configs: ComponentConfigs) -> None:
    # decoder layers are one block more: its parameters and nothing else
    layers = tiny_configs.decoder["num_layers"]
    assert isinstance(layers, int)
    deeper = component_sizes(replace(tiny_configs, decoder={**tiny_configs.decoder, "num_layers": layers + 1}))
    flat = component_sizes(tiny_configs)
    assert deeper.decoder > flat.decoder
    assert replace(deeper, decoder=flat.decoder) == flat


@pytest.mark.parametrize("part", ["vision_language_encoder", "transformer", "vae", "text_encoder"])
def test_a_missing_component_is_told(tiny_folder: Path, tmp_path: Path, part: str) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_folder, broken, ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.rmtree(broken / part)
    with pytest.raises(InputError, match=rf"policy\.model.*no {part}/config\.json"):
        find_configs(str(broken))


def test_a_damaged_configuration_is_told(tiny_folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_folder, broken, ignore=shutil.ignore_patterns("*.safetensors"))
    for part in ("vae", "text_encoder"):
        (broken / part / "config.json").write_text("{ not json")
        with pytest.raises(InputError, match=r"policy\.model.*whole saved pipeline"):
            find_configs(str(broken))
        shutil.copy(tiny_folder / part / "config.json", broken / part / "config.json")


def test_the_release_is_known_without_its_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    sizes: ComponentSizes = component_sizes(find_configs(RELEASED_MODEL))
    assert sizes.layers == 40


@pytest.mark.parametrize("model", ["someone/not-cached", "/no/such/folder", "bad name/of a repository"])
def test_another_model_without_files_is_refused(model: str) -> None:
    with pytest.raises(InputError, match=r"policy\.model"):
        find_configs(model)
