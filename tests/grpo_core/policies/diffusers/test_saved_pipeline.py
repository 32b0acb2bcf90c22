"""What is known of diffusers' classes of pipelines, from the table and from the classes."""

import inspect
import json
import re
import shutil
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest

from grpo_core.errors import InputError
from grpo_core.policies.diffusers.accepted_pipelines import TRIED, describe_class, find_pipeline_class
from grpo_core.policies.diffusers.family import FAMILY
from grpo_core.policies.diffusers.saved_pipeline import (
    DiffusersSettings,
    SavedPipeline,
    call_settings,
    passes_per_step,
    read_saved_pipeline,
    refuse_size,
)
from grpo_core.rollouts.streams import ImageSize
from tests.grpo_core.policies.diffusers.tiny_pipelines import SavedFolder, settings


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
    needs = ("switched_off", "takes_area", "spatial_latents")
    assert [getattr(tried, each) for each in needs] == [getattr(shown, each) for each in needs]
    checks = inspect.getsource(pipeline.check_inputs) if hasattr(pipeline, "check_inputs") else ""
    bound = re.search(r"max_sequence_length > (\d+)", checks)
    assert tried.longest_prompt == (None if bound is None else int(bound[1]))


def read(folder: Path) -> SavedPipeline:
    found = read_saved_pipeline(str(folder))
    assert found is not None
    return found


def change(file: Path, **values: Any) -> None:
    """Change a configuration file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def refusal(folder: Path, chosen: DiffusersSettings) -> InputError:
    with pytest.raises(InputError) as caught:
        FAMILY.refuse_unusable(str(folder), chosen)
    return caught.value


@pytest.mark.parametrize(("name", "unit"), [("sd3", 2), ("flux", 4), ("qwen_image", 4), ("z_image", 4)])
def test_sizes_are_multiples_of_a_position(saved_folder: SavedFolder, name: str, unit: int) -> None:
    saved = read(saved_folder(name))
    assert saved.pixel_unit == unit
    refuse_size(saved, ImageSize(8 * unit, 9 * unit))
    with pytest.raises(InputError, match=f" {8 * unit}x{9 * unit}"):
        refuse_size(saved, ImageSize(8 * unit + 1, 9 * unit))


@pytest.mark.parametrize(("name", "side"), [("sd3", 192), ("z_image", 128)])
def test_sizes_are_within_the_table_of_positions(saved_folder: SavedFolder, name: str, side: int) -> None:
    saved = read(saved_folder(name))
    refuse_size(saved, ImageSize(side, 32))
    with pytest.raises(InputError, match=f" {side} pixels"):
        refuse_size(saved, ImageSize(32, side + 4))


def test_a_schedule_that_is_stretched_has_no_single_step(saved_folder: SavedFolder, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(saved_folder("sd3"), tmp_path / "changed"))
    FAMILY.refuse_unusable(str(folder), settings(num_inference_steps=1))
    change(folder / "scheduler" / "scheduler_config.json", shift_terminal=0.02)
    refused = refusal(folder, settings(num_inference_steps=1))
    assert (refused.place, refused.value) == ("rollout.num_inference_steps", 1)
    FAMILY.refuse_unusable(str(folder), settings(num_inference_steps=2))
    for steps in (1, 2):
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler")
        with np.errstate(invalid="ignore"):
            scheduler.set_timesteps(sigmas=[1.0, 0.5][:steps])
        assert bool(scheduler.sigmas.isfinite().all()) == (steps == 2)


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
    folder = Path(shutil.copytree(saved_folder("sd3"), tmp_path / "changed"))
    FAMILY.refuse_unusable(str(folder), settings())
    weights = folder / part / file
    weights.rename(folder / part / "first.safetensors")
    assert f"{part} has no {file}" in refusal(folder, settings()).hint
    index = {"weight_map": {"a": "first.safetensors", "b": "second.safetensors", "c": "third.safetensors"}}
    (folder / part / f"{file}.index.json").write_text(json.dumps(index))
    assert f"{part} has no second.safetensors and 1 more" in refusal(folder, settings()).hint
    for missing in ("second", "third"):
        (folder / part / f"{missing}.safetensors").touch()
    FAMILY.refuse_unusable(str(folder), settings())


def test_a_model_that_is_not_here_is_not_judged(tmp_path: Path) -> None:
    assert read_saved_pipeline("somebody/never-downloaded") is None
    with pytest.raises(InputError) as refused:
        FAMILY.refuse_missing(str(tmp_path / "nothing"))
    assert (refused.value.place, refused.value.value) == ("policy.model", str(tmp_path / "nothing"))


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


# A tiny pipeline, what is changed of it, a value that passes and one that does not (None: there is none).
BEYOND: dict[str, tuple[str, tuple[str, dict[str, Any]] | None, str, Any, Any]] = {
    "negative prompts of FLUX": ("flux", None, "negative_prompt", None, "blur"),
    "schnell": ("flux", ("transformer/config.json", {"guidance_embeds": False}), "guidance_scale", 1.0, 3.5),
    "guidance of turbo": ("z_image", ("model_index.json", {"is_distilled": True}), "guidance_scale", 0.0, 4.0),
    "no length": ("sd3", ("model_index.json", {"_class_name": "ErnieImagePipeline"}), "max_sequence_length", None, 32),
    "length of SD3": ("sd3", None, "max_sequence_length", 512, 513),
    "length of FLUX": ("flux", None, "max_sequence_length", 512, 513),
    "length of Qwen-Image": ("qwen_image", None, "max_sequence_length", 1024, 1025),
    "any length of Z-Image": ("z_image", None, "max_sequence_length", 9999, None),
}


@pytest.mark.parametrize("case", BEYOND)
def test_a_setting_beyond_what_the_model_takes_is_refused(saved_folder: SavedFolder, tmp_path: Path, case: str) -> None:
    name, edit, setting, passes, wrong = BEYOND[case]
    folder = Path(shutil.copytree(saved_folder(name), tmp_path / "changed"))
    if edit is not None:
        change(folder / edit[0], **edit[1])
    FAMILY.refuse_unusable(str(folder), settings(name, **{setting: passes}))
    if wrong is not None:
        refused = refusal(folder, settings(name, **{setting: wrong}))
        assert (refused.place, refused.value) == (f"rollout.{setting}", wrong)


def test_prompts_that_every_encoder_cuts_off_are_refused(saved_folder: SavedFolder) -> None:
    folder, chosen = str(saved_folder("sd3")), settings(max_sequence_length=32)
    FAMILY.refuse_prompts(folder, chosen, ["x" * 25])
    with pytest.raises(InputError, match="reads 32 ") as refused:
        FAMILY.refuse_prompts(folder, chosen, ["short", "x" * 60])
    assert (refused.value.place, refused.value.value) == ("prompt 2", "x" * 60)
    FAMILY.refuse_prompts(folder, settings(max_sequence_length=64), ["x" * 60])
