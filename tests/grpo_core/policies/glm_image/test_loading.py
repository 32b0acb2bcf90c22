"""What is refused of a saved GLM-Image before anything is loaded."""

import filecmp
import inspect
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import GlmImagePipeline

from data.recipes.shapes import draw, split_scenes
from grpo_core.errors import InputError
from grpo_core.policies.glm_image.family import FAMILY
from grpo_core.policies.glm_image.loading import (
    RELEASED_MODEL,
    load_pipeline,
    read_token_config,
    train_half,
)
from grpo_core.policies.glm_image.processor import UnitProcessor
from grpo_core.policies.glm_image.settings import AUTOREGRESSIVE, PARTS, GlmImageSettings
from grpo_core.policies.sizes import count_parameters
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from grpo_core.rewards.registry import build_reward
from tests.tiny_policies import MODEL

MODELS = Path(__file__).parents[4] / "data" / "models"
SETTINGS = GlmImageSettings(height=64, width=64, num_inference_steps=4, guidance_scale=1.0)


def test_prompts_without_room_for_an_image_are_refused() -> None:
    """Of 4,096 positions of the tiny model 16 and 64 are for the grids of an image; each of these words is one id."""
    longest, other = (f"red{word * 4015}" for word in (" red", " blue"))
    FAMILY.refuse_prompts(str(MODEL), SETTINGS, ["a heart", longest])
    with pytest.raises(InputError) as refused:
        FAMILY.refuse_prompts(str(MODEL), SETTINGS, [f"{longest} red", "a heart", f"{other} red"])
    assert [(each.place, each.value[:7]) for each in refused.value.errors] == [
        ("prompt 1", "red red"),
        ("prompt 3", "red blu"),
    ]


def test_another_pipeline_is_of_another_kind() -> None:
    with pytest.raises(InputError, match="StableDiffusion3Pipeline") as refused:
        FAMILY.refuse_missing(str(MODELS / "tiny-sd3"))
    assert refused.value.place == "policy.model"


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def test_a_folder_without_weights_gives_the_networks_of_its_pipeline(
    shipped_pipeline: GlmImagePipeline, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(MODEL, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    for part in PARTS:
        expected = {name: value.shape for name, value in getattr(shipped_pipeline, part).named_parameters()}
        built = FAMILY.build_on_meta(str(bare), part).named_parameters()
        assert {name: value.shape for name, value in built} == expected


@pytest.mark.parametrize("part", [AUTOREGRESSIVE, "vae"])
@pytest.mark.parametrize("damage", ["missing", "damaged"])
def test_a_configuration_that_cannot_be_read_is_refused(tmp_path: Path, part: str, damage: str) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(MODEL, broken, ignore=shutil.ignore_patterns("*.safetensors"))
    remove(broken / part) if damage == "missing" else (broken / part / "config.json").write_text("{ not json")
    with pytest.raises(InputError) as refused:
        FAMILY.build_on_meta(str(broken), part)
    assert (refused.value.place, refused.value.value) == ("policy.model", str(broken))


def test_the_release_is_known_without_its_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert read_token_config(RELEASED_MODEL).text_config.num_hidden_layers == 40


@pytest.mark.parametrize("model", ["someone/not-cached", "/no/such/folder", "bad name/of a repository"])
def test_another_model_without_files_is_refused(model: str) -> None:
    with pytest.raises(InputError) as refused:
        read_token_config(model)
    assert (refused.value.place, refused.value.value) == ("policy.model", model)


# --- the release


@pytest.mark.parametrize(("part", "count"), [(AUTOREGRESSIVE, 10.1e9), ("transformer", 6.93e9)])
def test_parameters_are_those_of_the_release(part: str, count: float) -> None:
    assert count_parameters(FAMILY.build_on_meta(RELEASED_MODEL, part)) == pytest.approx(count, rel=0.01)


def test_adapters_are_on_every_linear_layer_of_the_language_model_and_nowhere_else() -> None:
    model, choice = FAMILY.build_on_meta(RELEASED_MODEL, AUTOREGRESSIVE), TrainingChoice(LoraSettings(rank=32))
    with torch.device("meta"):
        adapters = train_half("tokens", model, choice, "released").trainable_parameters()
    targets = {name.split(".lora_")[0] for name in adapters}
    assert len(targets) == 40 * 6
    assert not [name for name in targets if "visual" in name or "vqmodel" in name]
    count = sum(parameter.numel() for parameter in adapters.values())
    assert count == pytest.approx(95e6, rel=0.01)


CPU = torch.device("cpu")


def load(model: str | Path) -> GlmImagePipeline:
    return load_pipeline(str(model), dtype=torch.float32, device=CPU)


def test_every_part_is_frozen_and_evaluates(shipped_pipeline: GlmImagePipeline) -> None:
    for part in PARTS:
        module = getattr(shipped_pipeline, part)
        assert not any(parameter.requires_grad for parameter in module.parameters())
        assert not any(child.training for child in module.modules())


def test_the_shipped_folder_draws_without_this_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffusers.utils.dynamic_modules_utils.HF_MODULES_CACHE", str(tmp_path))
    stock = GlmImagePipeline.from_pretrained(MODEL, trust_remote_code=True)
    assert not isinstance(stock.processor, UnitProcessor)
    stock.set_progress_bar_config(disable=True)
    stock.vision_language_encoder.generation_config.top_k = 1
    scene = split_scenes(0, 0.1)[0][0]
    drawn = stock(scene.caption, height=64, width=64, num_inference_steps=4, guidance_scale=1.0).images[0]
    (score,) = build_reward("r2")([drawn], targets=[draw(scene)])
    assert score.value is not None
    assert score.value > 0.7
    assert filecmp.cmp(MODEL / "processor" / "processor.py", inspect.getfile(UnitProcessor), shallow=False)


def test_a_processor_for_other_tokens_is_refused(tmp_path: Path) -> None:
    shutil.copytree(MODEL, tmp_path, dirs_exist_ok=True)
    config = tmp_path / "processor" / "processor_config.json"
    config.write_text(config.read_text().replace('"unit": 8', '"unit": 16'))
    with pytest.raises(InputError, match='"unit": 8'):
        load(tmp_path)
