"""The tiny SD3: tokenizers, parts, the training, and the shipped model."""

from pathlib import Path

import torch
from diffusers import StableDiffusion3Pipeline

import data
from data.shapes import all_scenes, split_scenes
from data.tiny_sd3 import (
    TinySd3Recipe,
    build_clip_tokenizer,
    build_pipeline,
    build_t5_tokenizer,
    caption_words,
    evaluate_tiny_sd3,
    train_transformer,
)
from tests.data.test_tiny_glm_image import changed, snapshot

MODEL = Path(data.__file__).parent / "models" / "tiny-sd3"
SMALL = TinySd3Recipe(hidden_size=32, layers=1, heads=2, corpus_size=64, steps=30, batch=8)
ENCODERS = ("text_encoder", "text_encoder_2", "text_encoder_3")


def test_a_word_of_the_captions_is_one_id() -> None:
    clip, t5 = build_clip_tokenizer(16), build_t5_tokenizer()
    for text in caption_words():
        assert clip(text).input_ids == [clip.bos_token_id, clip.convert_tokens_to_ids(text + "</w>"), clip.eos_token_id]
        assert t5(text).input_ids == [t5.convert_tokens_to_ids("\u2581" + text), t5.eos_token_id]
        assert {clip.unk_token_id, t5.unk_token_id}.isdisjoint({clip(text).input_ids[1], t5(text).input_ids[0]})


def test_no_caption_is_cut() -> None:
    length = TinySd3Recipe().text_length
    tokenizers = (build_clip_tokenizer(length), build_t5_tokenizer())
    assert max(len(each(scene.caption).input_ids) for each in tokenizers for scene in all_scenes()) <= length


def test_any_other_text_is_pieces_of_words_or_bytes() -> None:
    tokenizer = build_clip_tokenizer(16)
    assert tokenizer.decode(tokenizer("Zebra 圆").input_ids, skip_special_tokens=True) == "zebra 圆"


def test_a_saved_pipeline_has_the_seeds_weights_and_loads_with_diffusers_alone(tmp_path: Path) -> None:
    pipeline = build_pipeline(SMALL)
    pipeline.save_pretrained(tmp_path)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    again = build_pipeline(SMALL)
    assert torch.equal(torch.get_rng_state(), before)
    text = "a red zebra 圆"
    for other in (again, StableDiffusion3Pipeline.from_pretrained(tmp_path)):
        for part in ("transformer", "vae", *ENCODERS):
            assert not changed(snapshot(getattr(pipeline, part)), getattr(other, part))
        for name in ("tokenizer", "tokenizer_2", "tokenizer_3"):
            assert getattr(other, name)(text).input_ids == getattr(pipeline, name)(text).input_ids
        assert other.tokenizer.model_max_length == SMALL.text_length
        assert other.scheduler.config.shift == SMALL.shift


def test_the_training_learns_repeats_to_the_bit_and_changes_the_transformer_alone() -> None:
    first, second = build_pipeline(SMALL), build_pipeline(SMALL)
    encoders, losses = [snapshot(getattr(first, name)) for name in ENCODERS], list[float]()
    reached = train_transformer(first, SMALL, lambda step, steps, loss: losses.append(loss))
    # The first guess is a velocity of zero: its error is the variance of noise and image together.
    assert losses[0] > 1.5
    assert reached < 0.8 * losses[0]
    assert not first.transformer.training
    assert not any(changed(before, getattr(first, name)) for before, name in zip(encoders, ENCODERS, strict=True))
    assert train_transformer(second, SMALL) == reached
    assert not changed(snapshot(first.transformer), second.transformer)


# --- the shipped model


def test_heldout_captions_are_understood_and_there_is_room_to_improve() -> None:
    recipe = TinySd3Recipe()
    _, heldout = split_scenes(recipe.seed, recipe.heldout_fraction)
    report = evaluate_tiny_sd3(MODEL, heldout[::3], num_inference_steps=8, guidance_scale=1.0)
    assert report.color >= 0.9
    assert report.background >= 0.9
    assert report.position >= 0.8
    assert report.shape >= 0.4
    assert 0.3 <= report.r2 <= 0.7
    assert report.ssim_group_std >= 0.05
