"""A pipeline is tried on a small copy before its weights are read; what fails is refused with the reason."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from grpo_core.errors import InputError
from grpo_core.policies.diffusers import compatibility
from grpo_core.policies.diffusers.compatibility import (
    refuse_incompatible,
    refuse_incompatible_model,
    try_copy,
    why_incompatible,
)
from grpo_core.policies.diffusers.family import FAMILY
from grpo_core.policies.diffusers.pipeline_class import PipelineClass
from grpo_core.policies.diffusers.policy import DiffusersPolicy
from grpo_core.policies.diffusers.saved_pipeline import SavedPipeline, read_saved_pipeline
from grpo_core.policies.diffusers.small_copy import MAX_PARAMETERS, small_copy
from grpo_core.policies.diffusers.source_images import SourceArgument
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from tests.grpo_core.policies.diffusers.tiny_classes import MAKE_CLASS, settings_of
from tests.grpo_core.policies.diffusers.tiny_pipelines import SavedFolder, SharedPolicy, save, settings

RELEASED = Path(__file__).with_name("released.json")
CHOICE = {"denoising": TrainingChoice(LoraSettings(rank=2))}


def read(folder: Path) -> SavedPipeline:
    found = read_saved_pipeline(str(folder))
    assert found is not None
    return found


def without_weights(folder: Path, target: Path) -> Path:
    return Path(shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.safetensors")))


def change(file: Path, values: Mapping[str, Any]) -> None:
    content = json.loads(file.read_text())
    for name, value in values.items():
        if isinstance(value, dict) and isinstance(content.get(name), dict):
            content[name] |= value
        else:
            content[name] = value
    file.write_text(json.dumps(content))


def released(folder: Path, name: str) -> Path:
    """Give a tiny pipeline the widths and depths of a released one."""
    for part, values in json.loads(RELEASED.read_text())[name].items():
        change(folder / part / "config.json", values)
    return folder


# FLUX's shapes are tried below, with sources.
@pytest.mark.parametrize("name", ["sd3", pytest.param("flux", marks=pytest.mark.slow), "qwen_image"])
def test_a_released_pipeline_is_tried_without_its_weights(saved_folder: SavedFolder, tmp_path: Path, name: str) -> None:
    folder = released(without_weights(saved_folder(name), tmp_path / name), name)
    built: list[Any] = []
    saved = read(folder)
    small_copy(folder, saved, built.append)
    layers = {part: sum(each.numel() for each in built[0].components[part].parameters()) for part in ("transformer",)}
    assert 0 < layers["transformer"] < MAX_PARAMETERS
    assert refuse_incompatible(str(folder), settings(name, height=1024, width=1024))


EDITS = [
    ("flux_kontext", "flux"),
    pytest.param("qwen_image_edit", "qwen_image", marks=pytest.mark.slow),
    pytest.param("qwen_image_edit_plus", "qwen_image", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("name", "shapes"), EDITS)
def test_a_released_pipeline_that_edits_is_tried_with_small_sources(tmp_path: Path, name: str, shapes: str) -> None:
    folder = released(without_weights(save(name, tmp_path / "saved", MAKE_CLASS), tmp_path / "tried"), shapes)
    assert refuse_incompatible(str(folder), settings_of(name, height=1024, width=1024))


# A class whose needs are not met, and what the reason names.
UNMET: dict[str, tuple[str, Mapping[str, Any], str]] = {
    "latents in another form": ("flux2_klein", {"spatial_latents": False}, "sampling and scoring"),
    "sources that are large enough": ("flux2_klein", {"sources": SourceArgument(most=1)}, "too small"),
    "prompts that a language model rewrites": ("ernie_image", {"switched_off": ()}, "same seeds"),
}


@pytest.mark.parametrize("case", UNMET)
def test_needs_that_are_not_met_are_seen(tmp_path: Path, case: str) -> None:
    name, changes, reason = UNMET[case]
    folder = save(name, tmp_path / "saved", MAKE_CLASS)
    saved = read(folder)
    unmet: PipelineClass = replace(saved.pipeline_class, **changes)
    tried, found = try_copy(folder, replace(saved, pipeline_class=unmet), settings_of(name))
    assert tried
    assert reason in str(found)


def test_a_refusal_names_the_model_and_comes_before_its_weights(
    saved_folder: SavedFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = without_weights(saved_folder("flux"), tmp_path / "flux")
    monkeypatch.setattr(compatibility, "try_copy", lambda *_: (True, "the reason"))
    monkeypatch.setattr(compatibility, "_TRIED", {})
    for refused in (
        lambda: refuse_incompatible(str(folder), settings("flux")),
        lambda: DiffusersPolicy.load(str(folder), settings("flux"), CHOICE),
    ):
        with pytest.raises(InputError, match=r"FluxPipeline.*the reason") as caught:
            refused()
        assert (caught.value.place, caught.value.value) == ("policy.model", str(folder))


def test_a_trial_is_remembered_by_the_content_of_the_configurations(
    saved_folder: SavedFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials: list[int] = []

    def counted(*given: Any) -> tuple[bool, str | None]:
        trials.append(1)
        return True, None

    monkeypatch.setattr(compatibility, "try_copy", counted)
    monkeypatch.setattr(compatibility, "_TRIED", {})
    folders = [without_weights(saved_folder("sd3"), tmp_path / each) for each in ("one", "two")]
    for folder in folders:
        assert refuse_incompatible(str(folder), settings())
        assert refuse_incompatible(str(folder), settings(height=64, width=48, num_inference_steps=9))
    assert len(trials) == 1
    assert refuse_incompatible(str(folders[0]), settings(guidance_scale=1.0))
    assert len(trials) == 2
    change(folders[0] / "transformer" / "config.json", {"num_layers": 1})
    assert refuse_incompatible(str(folders[0]), settings())
    assert len(trials) == 3


def test_a_pipeline_without_a_small_copy_is_asked_itself(
    saved_folder: SavedFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compatibility, "small_copy", lambda *_: None)
    monkeypatch.setattr(compatibility, "_TRIED", {})
    folder = str(saved_folder("z_image"))
    assert FAMILY.check_choices(folder, CHOICE) == ()
    assert not refuse_incompatible(folder, settings("z_image"))
    assert len(FAMILY.check_choices(folder, CHOICE)) == 1
    policy = DiffusersPolicy.load(folder, settings("z_image"), CHOICE)
    assert policy.denoising.settings == settings("z_image")
    model = policy.denoising.pipeline.transformer
    model.register_forward_hook(lambda module, given, found: ([torch.rand(()) * each for each in found[0]],))
    with pytest.raises(InputError, match=r"ZImagePipeline.*same seeds") as caught:
        refuse_incompatible_model(folder, policy.denoising)
    assert (caught.value.place, caught.value.value) == ("policy.model", folder)


class Drift(nn.Module):
    """Velocities that depend on how often the model was called, as those of a cache or of dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, *_: Any) -> float:
        self.calls += 1
        return 1 + 0.01 * self.calls


def test_a_model_that_scores_otherwise_than_it_samples_is_seen(shared_policy: SharedPolicy) -> None:
    policy = shared_policy("sd3")
    drift = Drift()
    model = policy.denoising.pipeline.transformer
    handle = model.register_forward_hook(lambda module, given, found: (found[0] * drift(),))
    assert "same seeds" in str(why_incompatible(policy.denoising))
    handle.remove()
    # Only where gradients are recorded, so that sampling repeats itself.
    handle = model.register_forward_hook(
        lambda module, given, found: (found[0] * (1.1 if torch.is_grad_enabled() else 1.0),)
    )
    assert "differ by" in str(why_incompatible(policy.denoising))
    handle.remove()
    assert policy.denoising.settings == settings()
