"""Every class that is called tried: saved without a part, and in 16 bits."""

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import transformers

from grpo_core.errors import InputError
from grpo_core.policies.diffusers.family import FAMILY
from grpo_core.policies.diffusers.loading import absent_parts, load_pipeline, require_saved_pipeline
from grpo_core.policies.diffusers.pipeline_class import TRIED
from grpo_core.policies.diffusers.policy import DiffusersPolicy
from grpo_core.policies.trained.settings import LoraSettings, TrainingChoice
from grpo_core.seeds import make_generator
from tests.grpo_core.policies.diffusers.tiny_builders import flux
from tests.grpo_core.policies.diffusers.tiny_classes import CLASSES, MAKE, NEED_SOURCES, reduced_sources, settings
from tests.grpo_core.policies.diffusers.tiny_pipelines import SavedFolder, pixels, request, source, without

pytestmark = [
    # Ernie's pipeline gives its scheduler a tensor of sigmas.
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    # Chroma's transformer imports it from where it was.
    pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning"),
]


def chosen(*quick: str) -> list[Any]:
    """All names; those that are not quick are slow."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in MAKE]


def test_what_is_called_tried_is_tried() -> None:
    assert list(CLASSES) == list(MAKE)
    assert set(CLASSES.values()) == set(TRIED)


# --- parts that a pipeline was saved without


def drawn(pipeline: Any, name: str, **changes: Any) -> Any:
    """Draw the way diffusers' users do."""
    own = settings(name, num_inference_steps=1, sde_window_size=0)
    described = TRIED[CLASSES[name]]
    given: dict[str, Any] = {**described.fixed_arguments(own.size), **changes}
    if own.max_sequence_length is not None:
        given["max_sequence_length"] = own.max_sequence_length
    if name in NEED_SOURCES:
        given["image"] = source().open()
    pipeline.set_progress_bar_config(disable=True)
    (image,) = pipeline(
        "a dot",
        height=own.height,
        width=own.width,
        **{"num_inference_steps": 1, "generator": make_generator(0), **given},
    ).images
    return image


def draws_without(folder: Path, name: str, *parts: str) -> bool:
    """Whether diffusers loads and draws a pipeline whose parts are given as None."""
    try:
        pipeline = diffusers.DiffusionPipeline.from_pretrained(str(folder), **dict.fromkeys(parts))
        with reduced_sources(CLASSES[name]):
            drawn(pipeline, name)
    except (AttributeError, TypeError, ValueError):
        return False
    return True


@pytest.mark.parametrize("name", chosen("sd3"))
def test_a_pipeline_without_a_part_is_loaded_if_diffusers_draws_with_it(
    saved_folder: SavedFolder, name: str, tmp_path: Path
) -> None:
    """Each part alone; a text encoder with its tokenizer as well."""
    folder = saved_folder(name)
    parts = [part for part in require_saved_pipeline(str(folder)).parts if part not in ("transformer", "scheduler")]
    pairs = [(part, part.replace("text_encoder", "tokenizer")) for part in parts if part.startswith("text_encoder")]
    cases = [*((part,) for part in parts), *(pair for pair in pairs if pair[1] in parts)]
    lacked: set[str] = set()
    for case in cases:
        changed = str(without(folder, tmp_path / "_".join(case), *case))
        if draws_without(Path(changed), name, *case):
            assert absent_parts(changed, require_saved_pipeline(changed)).keys() <= set(case)
            lacked.update(case)
            continue
        with pytest.raises(InputError, match="|".join(case)) as refused:
            FAMILY.refuse_unusable(changed, settings(name))
        assert (refused.value.place, refused.value.value) == ("policy.model", changed)
    assert lacked == {"sd3": {"text_encoder_3", "tokenizer_3"}, "ernie_image": {"pe", "pe_tokenizer"}}.get(name, set())


def test_stable_diffusion_3_without_t5_draws_what_diffusers_draws(saved_folder: SavedFolder, tmp_path: Path) -> None:
    folder = without(saved_folder("sd3"), tmp_path / "small", "text_encoder_3", "tokenizer_3")
    stock = diffusers.StableDiffusion3Pipeline.from_pretrained(str(folder), text_encoder_3=None, tokenizer_3=None)
    chosen = settings("sd3")
    FAMILY.refuse_unusable(str(folder), chosen)
    policy = DiffusersPolicy.load(str(folder), chosen, {"denoising": TrainingChoice(LoraSettings(rank=2))})
    lacking = [name for name, part in policy.denoising.pipeline.components.items() if part is None]
    assert lacking == [name for name, part in stock.components.items() if part is None]
    (group,) = policy.sample([request("a dot", 1, window_start=None)])
    expected = drawn(stock, "sd3", num_inference_steps=5, guidance_scale=chosen.guidance_scale)
    assert (pixels(group.outputs[0]) == pixels(expected)).all()
    with pytest.raises(InputError, match="shorten it") as refused:
        FAMILY.refuse_prompts(str(folder), chosen, ["x" * 25])
    assert "max_sequence_length" not in refused.value.hint


def test_parts_that_only_some_calls_read_are_loaded(tmp_path: Path) -> None:
    """FLUX with what an image adapter needs, and with one half of it."""
    whole = flux()
    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, projection_dim=16
    )
    whole.register_modules(
        image_encoder=transformers.CLIPVisionModelWithProjection(vision),
        feature_extractor=transformers.CLIPImageProcessor(),
    )
    whole.save_pretrained(tmp_path / "whole")
    extra = ("image_encoder", "feature_extractor")
    for number, parts in enumerate([(), extra[:1], extra[1:], extra]):
        folder = str(without(tmp_path / "whole", tmp_path / str(number), *parts))
        loaded = load_pipeline(folder, dtype=torch.float32, device=torch.device("cpu"))
        assert {part for part in extra if getattr(loaded, part) is None} == set(parts)
        own = diffusers.DiffusionPipeline.from_pretrained(folder)
        assert (pixels(drawn(loaded, "flux")) == pixels(drawn(own, "flux"))).all()


# --- 16 bits
