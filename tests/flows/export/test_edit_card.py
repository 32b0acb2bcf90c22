"""The lines in the card of an exported pipeline draw with it: one that edits, and one that was saved without a part."""

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from configs.loader import read_config
from flows.export.usage import usage
from tests.flows.conftest import REPOSITORY, TINY
from tests.grpo_core.policies.diffusers.tiny_pipelines import save, without


@pytest.mark.parametrize("name", ["flux_kontext", "flux2_klein"])
def test_the_lines_of_the_card_edit_an_image(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(name, tmp_path / "pipeline")
    sizes = [
        "rollout.height=32",
        "rollout.width=32",
        "rollout.max_sequence_length=64",
        "evaluate.num_inference_steps=2",
    ]
    own = [f"policy.model={folder}", "policy.dtype=float32", *sizes]
    config = read_config(REPOSITORY / "configs" / "flux_kontext.yaml", own)
    monkeypatch.chdir(tmp_path)
    Image.effect_noise((64, 64), 100).convert("RGB").save("source.png")
    defined: dict[str, Any] = {}
    exec(usage(config, str(folder), merged=True), defined)
    assert defined["image"].size == (32, 32)


def test_a_run_whose_prompts_have_no_images_is_shown_without(tmp_path: Path) -> None:
    folder = save("flux_kontext", tmp_path / "pipeline")
    none = ["data.image_column=null", "evaluate.image_column=null", 'rewards=[{"reward": "r2"}]']
    config = read_config(REPOSITORY / "configs" / "flux_kontext.yaml", [f"policy.model={folder}", *none])
    lines = usage(config, str(folder), merged=True)
    assert "load_image" not in lines
    assert "max_area=262144" in lines


def test_the_lines_of_the_card_load_a_pipeline_without_t5(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = without(save("sd3", tmp_path / "whole"), tmp_path / "small", "text_encoder_3", "tokenizer_3")
    small = ["rollout.height=32", "rollout.width=32", "rollout.max_sequence_length=32"]
    config = read_config(TINY.with_name("tiny_sd3.yaml"), [f"policy.model={folder}", *small])
    monkeypatch.chdir(tmp_path)
    defined: dict[str, Any] = {}
    exec(usage(config, str(folder), merged=True), defined)
    assert defined["pipe"].text_encoder_3 is None
    assert defined["image"].size == (32, 32)


def test_a_glm_image_that_edits_is_given_a_list_of_images() -> None:
    """diffusers takes a list; it cannot run here, as it gives transformers' image tokenizer other features."""
    config = read_config(REPOSITORY / "configs" / "tiny_edit.yaml")
    assert 'image=[load_image("source.png")]' in usage(config, "exported", merged=True)
    assert "load_image" not in usage(read_config(REPOSITORY / "configs" / "tiny.yaml"), "exported", merged=True)
