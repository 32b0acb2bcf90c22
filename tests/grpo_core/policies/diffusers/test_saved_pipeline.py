"""What is known of diffusers' classes of pipelines, from the table and from the classes."""

import inspect
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest

from grpo_core.errors import InputError
from grpo_core.policies.diffusers.family import FAMILY
from grpo_core.policies.diffusers.pipeline_class import TRIED, describe_class, find_pipeline_class
from grpo_core.policies.diffusers.saved_pipeline import (
    SavedPipeline,
    call_settings,
    passes_per_step,
    read_saved_pipeline,
    refuse_size,
)
from grpo_core.streams import ImageSize
from tests.grpo_core.policies.diffusers.tiny_pipelines import settings


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("FluxImg2ImgPipeline", "takes an image"),
        ("FluxFillPipeline", "takes mask_image"),
        ("FluxControlPipeline", "takes control_image"),
        ("WanPipeline", "takes num_frames"),
        ("GlmImagePipeline", "takes prior_token_ids"),
        ("HunyuanImagePipeline", "guidance is not an argument"),
        ("Kandinsky5T2IPipeline", "does not return images"),
        ("StableDiffusionXLPipeline", "no transformer"),
        ("OmniGenPipeline", "encode_prompt"),
        ("StableAudio3Pipeline", "takes no height, width"),
    ],
)
def test_other_classes_have_a_reason(name: str, problem: str) -> None:
    described = find_pipeline_class(name)
    assert described is not None
    assert described.problem is not None
    assert problem in described.problem


@pytest.mark.parametrize("name", ["NoSuchPipeline", "FluxTransformer2DModel"])
def test_what_is_no_pipeline_of_diffusers_is_not_found(name: str) -> None:
    assert find_pipeline_class(name) is None


@pytest.mark.parametrize("name", TRIED)
def test_the_table_says_what_the_imported_class_shows(name: str) -> None:
    tried, pipeline = TRIED[name], getattr(diffusers, name)
    shown = describe_class(pipeline)
    given = ("guidance_scale", "true_cfg_scale", "negative_prompt", "max_sequence_length")
    assert tried.call == {argument: shown.call[argument] for argument in given if argument in shown.call}
    assert (tried.packs, tried.no_guidance, tried.problem) == (shown.packs, shown.no_guidance, shown.problem)
    checks = inspect.getsource(pipeline.check_inputs) if hasattr(pipeline, "check_inputs") else ""
    bound = re.search(r"max_sequence_length > (\d+)", checks)
    assert tried.longest_prompt == (None if bound is None else int(bound[1]))


SavedFolder = Callable[[str], Path]


def read(folder: Path) -> SavedPipeline:
    found = read_saved_pipeline(str(folder))
    assert found is not None
    return found


def changed(folder: Path, target: Path, file: str, **values: Any) -> Path:
    """Copy a pipeline and change a configuration file of the copy."""
    shutil.copytree(folder, target)
    content = json.loads((target / file).read_text()) | values
    (target / file).write_text(json.dumps(content))
    return target


@pytest.mark.parametrize(("name", "unit"), [("sd3", 2), ("flux", 4), ("qwen_image", 4), ("z_image", 4)])
def test_sizes_are_multiples_of_a_position(saved_folder: SavedFolder, name: str, unit: int) -> None:
    saved = read(saved_folder(name))
    assert saved.pixel_unit == unit
    refuse_size(saved, ImageSize(8 * unit, 9 * unit))
    with pytest.raises(InputError, match=f"units of {unit} pixels; the nearest size is {8 * unit}x{9 * unit}"):
        refuse_size(saved, ImageSize(8 * unit + 1, 9 * unit))


@pytest.mark.parametrize(("name", "side"), [("sd3", 192), ("z_image", 128)])
def test_sizes_are_within_the_table_of_positions(saved_folder: SavedFolder, name: str, side: int) -> None:
    saved = read(saved_folder(name))
    refuse_size(saved, ImageSize(side, 32))
    with pytest.raises(InputError, match=f"up to {side} pixels a side"):
        refuse_size(saved, ImageSize(32, side + 4))


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("model_index.json", {"_class_name": "FluxImg2ImgPipeline"}, "its call takes an image"),
        ("model_index.json", {"_class_name": ["own_code", "OwnPipeline"]}, "code of a model's own is not run"),
        ("model_index.json", {"scheduler": ["diffusers", "FlowMatchHeunDiscreteScheduler"]}, "FlowMatchHeunDiscrete"),
        ("model_index.json", {"transformer": [None, None]}, "nothing to train"),
        ("scheduler/scheduler_config.json", {"stochastic_sampling": True}, "set stochastic_sampling to false"),
        ("scheduler/scheduler_config.json", {"invert_sigmas": True}, "set invert_sigmas to false"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    saved_folder: SavedFolder, tmp_path: Path, file: str, values: dict[str, Any], message: str
) -> None:
    folder = changed(saved_folder("sd3"), tmp_path / "changed", file, **values)
    with pytest.raises(InputError, match=message) as refused:
        FAMILY.refuse_unusable(str(folder), settings())
    assert refused.value.place == "policy.model"


def test_damaged_files_are_named(saved_folder: SavedFolder, tmp_path: Path) -> None:
    folder = changed(saved_folder("sd3"), tmp_path / "changed", "model_index.json")
    (folder / "vae" / "config.json").write_text("{")
    with pytest.raises(InputError, match=r"vae/config\.json is missing or damaged"):
        read_saved_pipeline(str(folder))


def test_a_part_without_its_folder_is_named(saved_folder: SavedFolder, tmp_path: Path) -> None:
    folder = changed(saved_folder("sd3"), tmp_path / "changed", "model_index.json")
    shutil.rmtree(folder / "tokenizer")
    with pytest.raises(InputError, match="names tokenizer, and it has no such folder"):
        FAMILY.refuse_unusable(str(folder), settings())


@pytest.mark.parametrize(
    ("part", "file"),
    [
        ("transformer", "diffusion_pytorch_model.safetensors"),
        ("vae", "diffusion_pytorch_model.safetensors"),
        ("text_encoder_3", "model.safetensors"),
    ],
)
def test_a_network_without_its_weights_is_named(
    saved_folder: SavedFolder, tmp_path: Path, part: str, file: str
) -> None:
    folder = changed(saved_folder("sd3"), tmp_path / "changed", "model_index.json")
    FAMILY.refuse_unusable(str(folder), settings())
    weights = folder / part / file
    weights.rename(folder / part / "first.safetensors")
    with pytest.raises(InputError, match=f"Its folder {part} has no {file};"):
        FAMILY.refuse_unusable(str(folder), settings())
    index = {"weight_map": {"a": "first.safetensors", "b": "second.safetensors", "c": "third.safetensors"}}
    (folder / part / f"{file}.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=rf"Its folder {part} has no second\.safetensors and 1 more;"):
        FAMILY.refuse_unusable(str(folder), settings())
    for missing in ("second", "third"):
        (folder / part / f"{missing}.safetensors").touch()
    FAMILY.refuse_unusable(str(folder), settings())


def test_a_model_that_is_not_here_is_not_judged(tmp_path: Path) -> None:
    assert read_saved_pipeline("somebody/never-downloaded") is None
    with pytest.raises(InputError, match="There is no such folder"):
        FAMILY.refuse_missing(str(tmp_path / "nothing"))


def test_a_guidance_scale_means_what_the_pipeline_makes_of_it(saved_folder: SavedFolder) -> None:
    def given(name: str, **changes: Any) -> tuple[dict[str, Any], int]:
        saved, chosen = read(saved_folder(name)), settings(name, max_sequence_length=None, **changes)
        return call_settings(saved, chosen), passes_per_step(saved, chosen)

    assert given("sd3") == ({"guidance_scale": 4.5}, 2)
    assert given("sd3", negative_prompt="blur") == ({"guidance_scale": 4.5, "negative_prompt": "blur"}, 2)
    assert given("sd3", guidance_scale=1.0, negative_prompt="blur") == ({"guidance_scale": 1.0}, 1)
    assert given("flux") == ({"guidance_scale": 3.5}, 1)
    assert given("qwen_image") == ({"true_cfg_scale": 4.0, "negative_prompt": " "}, 2)
    assert given("qwen_image", negative_prompt="blur")[0]["negative_prompt"] == "blur"
    assert given("qwen_image", guidance_scale=1.0) == ({"true_cfg_scale": 1.0}, 1)
    assert given("z_image") == ({"guidance_scale": 4.0}, 2)
    assert given("z_image", guidance_scale=0.5, negative_prompt="blur") == (
        {"guidance_scale": 0.5, "negative_prompt": "blur"},
        2,
    )
    assert given("z_image", guidance_scale=0.0) == ({"guidance_scale": 0.0}, 1)


def test_guidance_that_a_model_was_distilled_to_do_without_is_refused(
    saved_folder: SavedFolder, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=r"rollout\.negative_prompt.*distilled"):
        FAMILY.refuse_unusable(str(saved_folder("flux")), settings("flux", negative_prompt="blur"))
    schnell = changed(saved_folder("flux"), tmp_path / "schnell", "transformer/config.json", guidance_embeds=False)
    with pytest.raises(InputError, match=r"rollout\.guidance_scale.*set it to 1"):
        FAMILY.refuse_unusable(str(schnell), settings("flux"))
    FAMILY.refuse_unusable(str(schnell), settings("flux", guidance_scale=1.0))
    turbo = changed(saved_folder("z_image"), tmp_path / "turbo", "model_index.json", is_distilled=True)
    with pytest.raises(InputError, match=r"rollout\.guidance_scale.*set it to 0"):
        FAMILY.refuse_unusable(str(turbo), settings("z_image"))


def test_a_setting_that_the_call_lacks_is_refused(saved_folder: SavedFolder, tmp_path: Path) -> None:
    ernie = changed(saved_folder("sd3"), tmp_path / "ernie", "model_index.json", _class_name="ErnieImagePipeline")
    with pytest.raises(InputError, match=r"rollout\.max_sequence_length.*ErnieImagePipeline does not take it"):
        FAMILY.refuse_unusable(str(ernie), settings())


@pytest.mark.parametrize(("name", "longest"), [("sd3", 512), ("flux", 512), ("qwen_image", 1024), ("z_image", None)])
def test_a_longer_prompt_than_the_pipeline_takes_is_refused(
    saved_folder: SavedFolder, name: str, longest: int | None
) -> None:
    folder = str(saved_folder(name))
    if longest is None:
        FAMILY.refuse_unusable(folder, settings(name, max_sequence_length=9999))
        return
    FAMILY.refuse_unusable(folder, settings(name, max_sequence_length=longest))
    with pytest.raises(InputError, match=rf"rollout\.max_sequence_length.*takes at most {longest}"):
        FAMILY.refuse_unusable(folder, settings(name, max_sequence_length=longest + 1))


def test_prompts_that_every_encoder_cuts_off_are_refused(saved_folder: SavedFolder) -> None:
    folder, chosen = str(saved_folder("sd3")), settings(max_sequence_length=32)
    FAMILY.refuse_prompts(folder, chosen, ["x" * 25])
    with pytest.raises(InputError, match=r"reads 32 of them; shorten it, or set rollout\.max_sequence_length"):
        FAMILY.refuse_prompts(folder, chosen, ["short", "x" * 60])
    FAMILY.refuse_prompts(folder, settings(max_sequence_length=64), ["x" * 60])
