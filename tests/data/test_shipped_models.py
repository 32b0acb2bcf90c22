"""The shipped models: small, made by the recipe of the source, loaded without this project, and with room to learn."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import GlmImagePipeline, StableDiffusion3Pipeline
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoProcessor, AutoTokenizer

from data.recipes import glm_image, glm_image_edit, glm_image_parts, sd3, text, trainer, vision
from data.recipes.edits import choose_edits, split_edits
from data.recipes.grounding import best_constant_box, draw_scenes, iou_of, split_scenes
from data.recipes.shapes import CODEBOOK_SIZE, decode_tokens
from data.recipes.shapes import split_scenes as split_captions
from grpo_core.rollouts.records import GroupRequest, RolloutGroup
from tests.data.test_recipes import PROCESSOR, TOKENS, WORDS
from tests.tiny_policies import EDIT_MODEL, MODEL, TEXT_MODEL

MODELS = trainer.DATA / "models"
VISION_MODEL, SD3_MODEL = MODELS / "tiny-vision", MODELS / "tiny-sd3"


@dataclass
class Answering:
    """A policy that gives the same outputs for each prompt."""

    outputs: tuple[str, ...]
    requests: list[GroupRequest]

    def sample(self, requests: Sequence[GroupRequest]) -> Iterator[RolloutGroup]:
        self.requests += requests
        return (RolloutGroup(request, {}, self.outputs) for request in requests)


def test_quality_is_the_mean_reward_and_the_spread_within_prompts() -> None:
    policy: Any = Answering(("4", "5"), [])
    found = trainer.measure(policy, ["2+2?", "1+4?"], "answer", group_size=2, answer=["4", "5"])
    assert found == trainer.Quality(4, 0.5, pytest.approx(0.5**0.5))
    seeds = [seed for request in policy.requests for seed in (*request.seeds, *request.noise_seeds)]
    assert len(set(seeds)) == 8


SHIPPED: Mapping[str, tuple[Any, int]] = {
    "tiny-glm-image": (glm_image_parts.TinyRecipe(), 5_000_000),
    "tiny-glm-image-edit": (glm_image_edit.TinyEditRecipe(), 5_000_000),
    "tiny-sd3": (sd3.TinySd3Recipe(), 6_000_000),
    "tiny-text": (text.TinyTextRecipe(), 2_000_000),
    "tiny-vision": (vision.TinyVisionRecipe(), 1_500_000),
}


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_model_is_small_and_names_the_recipe_of_the_source(name: str) -> None:
    folder, (recipe, most_bytes) = MODELS / name, SHIPPED[name]
    assert sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) <= most_bytes
    assert json.loads((folder / "recipe.json").read_text(encoding="utf-8"))["recipe"] == asdict(recipe)
    assert not [file for file in folder.rglob("*.json") if b'_name_or_path": "/' in file.read_bytes()]


def heldout_captions() -> list[trainer.Quality]:
    _, scenes = split_captions(0, 0.1)
    return [glm_image.measure_saved(MODEL, [scene.caption for scene in scenes[::9]], scenes[::9], 1.0)]


def heldout_denoised() -> list[trainer.Quality]:
    return [sd3.measure_saved(SD3_MODEL, split_captions(0, 0.1)[1][::6], 1.0)]


def heldout_edits() -> list[trainer.Quality]:
    return [glm_image_edit.measure_edits(EDIT_MODEL, choose_edits(split_edits(0, 0.1)[1], 24, 0), 1.0)]


def heldout_words() -> list[trainer.Quality]:
    _, words = text.split_words(0, train=0, heldout=256)
    return [text.measure_saved(TEXT_MODEL, words[::4], warm) for warm in (1.0, 0.1)]


def heldout_images() -> list[trainer.Quality]:
    return [
        vision.measure_saved(VISION_MODEL, vision.TinyVisionRecipe(heldout_prompts=32), 2, warm, shift=shift)
        for warm, shift in ((1.0, 0), (0.1, 0), (0.1, 1))
    ]


@pytest.mark.parametrize(
    ("measured", "bounds"),
    [
        (heldout_captions, [(0.25, 0.5)]),
        (heldout_denoised, [(0.3, 0.6)]),
        pytest.param(heldout_edits, [(0.35, 0.65)], marks=pytest.mark.slow),
        (heldout_words, [(0.5, 0.68), (0.95, 1.0)]),
        # With another image nothing is left of it.
        (heldout_images, [(0.3, 0.5), (0.6, 0.9), (0.0, 0.1)]),
    ],
)
def test_a_shipped_model_knows_its_task_and_leaves_room_to_learn(
    measured: Callable[[], list[trainer.Quality]], bounds: list[tuple[float, float]]
) -> None:
    found = measured()
    for quality, (low, high) in zip(found, bounds, strict=True):
        assert low <= quality.reward <= high
    assert found[0].group_std >= 0.1


def test_no_box_that_is_the_same_for_all_images_is_nearly_as_good() -> None:
    seen, unseen = split_scenes(1, train=400, heldout=100, shapes=2)
    constant = best_constant_box(seen)
    assert np.mean([iou_of(constant, scene.box) for scene in unseen]) < 0.15


def test_diffusers_and_transformers_alone_load_the_shipped_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("diffusers.utils.dynamic_modules_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    pipeline = GlmImagePipeline.from_pretrained(MODEL, trust_remote_code=True)
    sentence = "a red 圆 “hi” 🙂"
    assert pipeline.processor.tokenizer(sentence).input_ids == TOKENS(sentence).input_ids
    assert pipeline.processor.unit == 8
    recipe = sd3.TinySd3Recipe()
    other = StableDiffusion3Pipeline.from_pretrained(SD3_MODEL)
    assert other.tokenizer(sentence).input_ids == sd3.build_clip_tokenizer(recipe.text_length)(sentence).input_ids
    assert (other.tokenizer.model_max_length, other.scheduler.config.shift) == (recipe.text_length, recipe.shift)


@torch.no_grad()
def test_transformers_alone_answers_with_the_shipped_models() -> None:
    tokenizer = AutoTokenizer.from_pretrained(TEXT_MODEL)
    assert (tokenizer.get_vocab(), tokenizer.chat_template) == (WORDS.get_vocab(), WORDS.chat_template)
    model = AutoModelForCausalLM.from_pretrained(TEXT_MODEL)
    messages = [{"role": "user", "content": "sort the letters of goga"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    written = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
    assert tokenizer.decode(written[0, ids.shape[1] :]) == "aggo<|end|>"
    processor, seeing = (
        AutoProcessor.from_pretrained(VISION_MODEL),
        AutoModelForImageTextToText.from_pretrained(VISION_MODEL),
    )
    assert processor.chat_template == PROCESSOR.chat_template
    assert processor.tokenizer.get_vocab() == PROCESSOR.tokenizer.get_vocab()
    scenes = draw_scenes(6, np.random.default_rng(8))
    corpus = vision.encode_scenes(processor, scenes)
    ids = seeing.generate(**corpus.inputs(torch.arange(6)), do_sample=False, max_new_tokens=6)
    answers = processor.batch_decode(ids[:, corpus.ids.shape[1] :], skip_special_tokens=True)
    boxes = [tuple(map(int, answer.split())) for answer in answers]
    assert np.mean([iou_of((a, b, c, d), scene.box) for (a, b, c, d), scene in zip(boxes, scenes, strict=True)]) > 0.5


@pytest.mark.parametrize(
    ("guidance_scale", "steps", "prompt"),
    [(1.0, 4, 'a sign that says "Hello World"'), (1.5, 4, "a red circle")],
)
def test_the_decoder_draws_any_tokens_as_flat_cells(
    shipped_pipeline: GlmImagePipeline, guidance_scale: float, steps: int, prompt: str
) -> None:
    tokens = torch.randint(CODEBOOK_SIZE, (4, 64), generator=torch.Generator().manual_seed(0))
    images = shipped_pipeline(
        [prompt] * 4,
        height=64,
        width=64,
        prior_token_ids=tokens.view(-1, 8, 8).repeat_interleave(2, 1).repeat_interleave(2, 2).flatten(1),
        generator=[torch.Generator().manual_seed(seed) for seed in range(4)],
        num_inference_steps=steps,
        guidance_scale=guidance_scale,
    ).images
    decoded = np.stack([np.asarray(image, dtype=np.float32) for image in images]) / 255
    cells = (decode_tokens(tokens).permute(0, 2, 3, 1).numpy() + 1) / 2
    assert np.square(decoded - cells.repeat(8, axis=1).repeat(8, axis=2)).mean() < 0.01


def test_the_shipped_prompt_files_of_words_are_those_of_the_recipe(tmp_path: Path) -> None:
    text.write_prompt_files(text.TinyTextRecipe(), tmp_path)
    files = list(tmp_path.iterdir())
    assert len(files) == 2
    for file in files:
        assert file.read_bytes() == (trainer.DATA / "prompts" / file.name).read_bytes()
