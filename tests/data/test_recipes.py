"""The recipes of the shipped models: they learn, repeat to the bit, and make the data that they say."""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from data.recipes import glm_image, glm_image_parts, sd3, text, trainer, vision
from data.recipes.autoencoder import build_cell_autoencoder
from data.recipes.grounding import SIDE, STEP, draw_scenes, split_scenes
from data.recipes.shapes import all_scenes
from grpo_core.errors import NonFiniteError

TEXT = text.TinyTextRecipe(corpus_size=256, steps=40, batch=16, hidden_size=32, heads=2, key_value_heads=1)
VISION = vision.TinyVisionRecipe(
    corpus_size=64, steps=30, batch=16, hidden_size=32, intermediate_size=64, layers=2, slip_probability=0.6
)
SD3 = sd3.TinySd3Recipe(hidden_size=32, layers=1, heads=2, corpus_size=64, steps=30, batch=8)
GLM_IMAGE = glm_image_parts.TinyRecipe(
    hidden_size=64,
    layers=1,
    decoder_size=32,
    corpus_size=64,
    autoregressive_steps=25,
    autoregressive_batch=8,
    decoder_steps=25,
    decoder_batch=4,
    latent_std=0.5,
)
WORDS, TOKENS = text.build_tokenizer(), glm_image_parts.build_tokenizer()
PROCESSOR = vision.build_processor(vision.TinyVisionRecipe())


# --- the trainings

# A model, the parts that its training must leave as they are, and the training.
Training = tuple[nn.Module, Sequence[nn.Module], Callable[[trainer.ProgressCallback], object]]


def text_training() -> Training:
    model = text.build_model(TEXT, WORDS)
    return model, (), lambda on_step: text.train_model(model, WORDS, TEXT, on_step)


def vision_training() -> Training:
    model = vision.build_model(VISION, PROCESSOR)
    return model, (), lambda on_step: vision.train_model(model, PROCESSOR, VISION, on_step)


def sd3_training() -> Training:
    pipeline = sd3.build_pipeline(SD3)
    others = (pipeline.text_encoder, pipeline.text_encoder_2, pipeline.text_encoder_3, pipeline.vae)
    return pipeline.transformer, others, lambda on_step: sd3.train_transformer(pipeline, SD3, on_step)


def token_training() -> Training:
    pipeline = glm_image.build_pipeline(GLM_IMAGE)
    whole, model = pipeline.vision_language_encoder, pipeline.vision_language_encoder.model
    others = (pipeline.transformer, model.visual, model.vqmodel)
    return whole, others, lambda on_step: glm_image.train_autoregressive(pipeline, GLM_IMAGE, on_step)


def decoder_training() -> Training:
    pipeline = glm_image.build_pipeline(GLM_IMAGE)
    others = (pipeline.vision_language_encoder, pipeline.vae)
    return pipeline.transformer, others, lambda on_step: glm_image.train_decoder(pipeline, GLM_IMAGE, on_step)


def values_of(*networks: nn.Module) -> list[Tensor]:
    return [value.clone() for network in networks for value in network.state_dict().values()]


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


@pytest.mark.parametrize(
    ("training", "first", "last"),
    [
        (text_training, 5.0, 3.5),
        (vision_training, 3.5, 2.8),
        # The first guess is a velocity of zero: its error is the variance of noise and image together.
        (sd3_training, 1.5, 1.3),
        # From a uniform guess over the codes to better than one over the colours that images have.
        (token_training, 4.0, math.log(10)),
        (decoder_training, 3.0, 1.9),
    ],
)
def test_a_training_learns_and_the_same_recipe_makes_the_same_steps(
    training: Callable[[], Training], first: float, last: float
) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    steps: list[list[tuple[float, list[Tensor]]]] = [[], []]
    for number, taken in enumerate(steps):
        model, others, train = training()
        kept = values_of(*others)

        def on_step(done: int, total: int, loss: float, model: nn.Module = model, number: int = number) -> None:
            steps[number].append((loss, values_of(model) if done == 3 else []))
            if number and done == 3:
                raise StopIteration

        with contextlib.suppress(StopIteration):
            train(on_step)
        assert same(kept, values_of(*others))
        assert torch.equal(torch.get_rng_state(), before)
        assert len(taken) > 3 or number
    losses, again = ([loss for loss, _ in taken] for taken in steps)
    assert losses[:3] == again
    assert same(steps[0][2][1], steps[1][2][1])
    assert losses[0] > first
    assert sum(losses[-3:]) / 3 < last


def test_a_saved_model_is_written_to_the_same_bytes(tmp_path: Path) -> None:
    def save(folder: Path) -> None:
        text.save_tiny_text_model(text.build_model(TEXT, WORDS), WORDS, folder / "text")
        vision.save_tiny_vision_model(vision.build_model(VISION, PROCESSOR), PROCESSOR, folder / "vision")
        glm_image_parts.save_tiny_model(glm_image.build_pipeline(GLM_IMAGE), folder / "glm")
        sd3.build_pipeline(SD3).save_pretrained(folder / "sd3")

    for name in ("a", "b"):
        save(tmp_path / name)
    for file in (tmp_path / "a").rglob("*.*"):
        assert file.is_dir() or file.read_bytes() == (tmp_path / "b" / file.relative_to(tmp_path / "a")).read_bytes()


def text_loss() -> tuple[float, list[Tensor]]:
    model, corpus = text.build_model(TEXT, WORDS), text.draw_corpus(WORDS, TEXT)
    row, trained = corpus.ids[3], corpus.trained[3].nonzero().flatten()
    with torch.no_grad():
        logprobs = model(row.unsqueeze(0)).logits[0].log_softmax(-1)
        return float(text.answer_loss(model, corpus, torch.tensor([3]))), [
            logprobs[place - 1, row[place]] for place in trained
        ]


def vision_loss() -> tuple[float, list[Tensor]]:
    model = vision.build_model(VISION, PROCESSOR)
    corpus = vision.encode_scenes(PROCESSOR, draw_scenes(2, np.random.default_rng(0)))
    inputs = corpus.inputs(torch.arange(2), corpus.answers)
    with torch.no_grad():
        logprobs = model(**inputs).logits[:, -6:-1].log_softmax(-1)
        chosen = logprobs.gather(-1, corpus.answers[..., None]).flatten()
        return float(vision.answer_loss(model, inputs, corpus.answers)), list(chosen)


@pytest.mark.parametrize("loss_of", [text_loss, vision_loss])
def test_the_loss_is_the_mean_over_the_answers_tokens(loss_of: Callable[[], tuple[float, list[Tensor]]]) -> None:
    loss, logprobs = loss_of()
    assert loss == pytest.approx(-float(torch.stack(logprobs).mean()), rel=1e-5)


def test_a_loss_that_is_not_finite_ends_the_training() -> None:
    with pytest.raises(NonFiniteError):
        text.train_model(text.build_model(TEXT, WORDS), WORDS, replace(TEXT, learning_rate=1e30))


# --- what they read


@given(st.text(max_size=40).filter(lambda text: "<" not in text))
def test_any_text_round_trips_through_the_tokenizers(text: str) -> None:
    for tokenizer in (WORDS, TOKENS):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_a_word_that_matters_is_one_id() -> None:
    letters = ["sort", "Ġthe", "Ġletters", "Ġof", "Ġ", "g", "o", "g", "a"]
    assert WORDS.tokenize("sort the letters of goga") == letters
    clip, t5 = sd3.build_clip_tokenizer(16), sd3.build_t5_tokenizer()
    for word in sd3.caption_words():
        assert clip(word).input_ids == [clip.bos_token_id, clip.convert_tokens_to_ids(word + "</w>"), clip.eos_token_id]
        assert t5(word).input_ids == [t5.convert_tokens_to_ids("\u2581" + word), t5.eos_token_id]
        assert {clip.unk_token_id, t5.unk_token_id}.isdisjoint({clip(word).input_ids[1], t5(word).input_ids[0]})
    assert clip.decode(clip("Zebra 圆").input_ids, skip_special_tokens=True) == "zebra 圆"
    length = sd3.TinySd3Recipe().text_length
    cut = (sd3.build_clip_tokenizer(length), t5)
    assert max(len(each(scene.caption).input_ids) for each in cut for scene in all_scenes()) <= length


def test_heldout_words_are_in_no_training_and_the_corpus_reads_back() -> None:
    recipe = text.TinyTextRecipe()
    train, heldout = text.split_words(recipe.seed, train=recipe.corpus_size, heldout=recipe.heldout_words)
    assert not set(train) & set(heldout)
    fewer = text.split_words(recipe.seed, train=recipe.train_prompts, heldout=recipe.heldout_words)
    assert fewer == (train[: recipe.train_prompts], heldout)
    exact = replace(recipe, corpus_size=40, swap_probability=0.0, skip_probability=0.0, repeat_probability=0.0)
    corpus = text.draw_corpus(WORDS, exact)
    for word, ids, trained in zip(train[:40], corpus.ids, corpus.trained, strict=True):
        start, end = int(trained.nonzero()[0]), int(trained.nonzero()[-1]) + 1
        assert WORDS.decode(ids[:start]) == f"<|user|>{text.prompt_of(word)}<|end|><|assistant|>"
        assert WORDS.decode(ids[trained]) == f"{text.answer_of(word)}<|end|>"
        assert (ids[end:] == WORDS.pad_token_id).all()


def test_a_scene_is_asked_about_in_the_chat_template_and_has_a_token_for_each_patch() -> None:
    tokenizer, scenes = PROCESSOR.tokenizer, draw_scenes(3, np.random.default_rng(0), shapes=2)
    corpus = vision.encode_scenes(PROCESSOR, scenes)
    for row, scene in enumerate(scenes):
        image = "<|vision_start|>" + "<|image_pad|>" * 16 + "<|vision_end|>"
        written = tokenizer.decode(corpus.ids[row]).replace(" ", "")
        assert written == f"user:{scene.question}{image}assistant:".replace(" ", "")
        assert tokenizer.decode(corpus.answers[row]) == f"{scene.answer} <|end|>"
        names = tokenizer.convert_ids_to_tokens(corpus.ids[row].tolist())
        assert corpus.types[row].tolist() == [int(name == "<|image_pad|>") for name in names]
    assert tokenizer.unk_token_id not in corpus.ids
    alone = vision.encode_scenes(PROCESSOR, scenes[1:2])
    torch.testing.assert_close(corpus.inputs(torch.tensor([1]))["pixel_values"], alone.patches[0])


def test_both_questions_about_an_image_are_learned_and_none_is_held_out() -> None:
    recipe = vision.TinyVisionRecipe(corpus_size=300)
    corpus = vision.draw_corpus(recipe)
    _, heldout = split_scenes(recipe.seed, train=0, heldout=recipe.heldout_prompts, shapes=2)
    seen = {frozenset(scene.shapes) for scene in corpus}
    assert (len(corpus), len(seen)) == (2 * recipe.corpus_size, recipe.corpus_size)
    assert not seen & {frozenset(scene.shapes) for scene in heldout}
    for first, second in zip(corpus, corpus[recipe.corpus_size :], strict=False):
        assert first.shapes == second.shapes[::-1]


def test_moved_corners_are_boxes_on_the_grid_near_the_right_ones() -> None:
    recipe, tokenizer = vision.TinyVisionRecipe(), PROCESSOR.tokenizer
    scenes = draw_scenes(400, np.random.default_rng(1))
    answers, lowest = vision.encode_scenes(PROCESSOR, scenes).answers, tokenizer.convert_tokens_to_ids("0")
    moved = vision.move_corners(answers, recipe, lowest, np.random.default_rng(0))
    assert (moved[:, 4] == tokenizer.eos_token_id).all()
    read = [[int(word) for word in tokenizer.decode(row[:4]).split()] for row in moved]
    steps = np.abs(np.array(read) - np.array([scene.box for scene in scenes])) // STEP
    assert steps.max() == recipe.slip_steps
    # Of five moves one is none; some more are undone at an edge.
    assert 0.35 < (steps > 0).mean() < 0.8 * recipe.slip_probability
    assert all(0 <= a < c <= SIDE and 0 <= b < d <= SIDE for a, b, c, d in read)
    exact = replace(recipe, slip_probability=0.0)
    assert torch.equal(vision.move_corners(answers, exact, lowest, np.random.default_rng(0)), answers)


# --- the autoencoder


@pytest.mark.parametrize("levels", [1, 4])
def test_a_latent_is_the_mean_of_its_square_and_is_painted_flat(levels: int) -> None:
    vae, side = build_cell_autoencoder(levels=levels, sample_size=64), 2 ** (levels - 1)
    pixels = torch.rand(4, 3, 64, 64, generator=torch.Generator().manual_seed(0)) * 2 - 1
    # A group norm is hardest to pin where an image is flat.
    pixels[3] = 1.0
    means = pixels.unflatten(3, (-1, side)).unflatten(2, (-1, side)).mean((3, 5))
    painted = means.repeat_interleave(side, 2).repeat_interleave(side, 3)
    with torch.no_grad():
        posterior = vae.encode(pixels).latent_dist
        for latents in (posterior.mode(), posterior.sample(torch.Generator().manual_seed(0))):
            torch.testing.assert_close(latents, means, atol=1e-4, rtol=0)
        torch.testing.assert_close(vae.decode(posterior.mode()).sample, painted, atol=1e-4, rtol=0)
