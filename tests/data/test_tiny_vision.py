"""The tiny vision model: what it is trained on, a training that repeats to the bit, and the shipped model."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

import data
from data.grounding import SIDE, STEP, draw_scenes, iou_of, split_scenes
from data.tiny_vision import (
    TinyVisionRecipe,
    answer_loss,
    build_model,
    build_processor,
    draw_corpus,
    encode_scenes,
    evaluate_tiny_vision_model,
    move_corners,
    sample_ious,
    save_tiny_vision_model,
    train_model,
)
from grpo_core.errors import NonFiniteError

FOLDER = Path(data.__file__).parent / "models" / "tiny-vision"
RECIPE = TinyVisionRecipe()
SHORT = replace(RECIPE, corpus_size=64, steps=30, batch=16, hidden_size=32, intermediate_size=64, layers=2)
PROCESSOR = build_processor(RECIPE)
TOKENIZER = PROCESSOR.tokenizer


def test_a_scene_is_asked_about_in_the_chat_template_and_has_a_token_for_each_patch() -> None:
    scenes = draw_scenes(3, np.random.default_rng(0), shapes=2)
    corpus = encode_scenes(PROCESSOR, scenes)
    for row, scene in enumerate(scenes):
        image = "<|vision_start|>" + "<|image_pad|>" * 16 + "<|vision_end|>"
        written = TOKENIZER.decode(corpus.ids[row]).replace(" ", "")
        assert written == f"user:{scene.question}{image}assistant:".replace(" ", "")
        assert TOKENIZER.decode(corpus.answers[row]) == f"{scene.answer} <|end|>"
        assert corpus.types[row].tolist() == [
            int(token == "<|image_pad|>") for token in written_tokens(corpus.ids[row])
        ]
    # No word of a question is unknown, and every row's patches are those of its own image.
    assert TOKENIZER.unk_token_id not in corpus.ids
    alone = encode_scenes(PROCESSOR, scenes[1:2])
    torch.testing.assert_close(corpus.inputs(torch.tensor([1]))["pixel_values"], alone.patches[0])


def written_tokens(ids: torch.Tensor) -> list[str]:
    tokens: list[str] = TOKENIZER.convert_ids_to_tokens(ids.tolist())
    return tokens


def test_both_questions_about_an_image_are_learned_and_none_is_held_out() -> None:
    corpus = draw_corpus(RECIPE)
    _, heldout = split_scenes(RECIPE.seed, train=0, heldout=RECIPE.heldout_prompts, shapes=2)
    seen = {frozenset(scene.shapes) for scene in corpus}
    assert len(corpus) == 2 * RECIPE.corpus_size
    assert len(seen) == RECIPE.corpus_size
    assert not seen & {frozenset(scene.shapes) for scene in heldout}
    for first, second in zip(corpus, corpus[RECIPE.corpus_size :], strict=False):
        assert first.shapes == second.shapes[::-1]


def test_moved_corners_are_boxes_on_the_grid_near_the_right_ones() -> None:
    scenes = draw_scenes(400, np.random.default_rng(1))
    answers = encode_scenes(PROCESSOR, scenes).answers
    lowest = TOKENIZER.convert_tokens_to_ids("0")
    moved = move_corners(answers, RECIPE, lowest, np.random.default_rng(0))
    assert (moved[:, 4] == TOKENIZER.eos_token_id).all()
    read = [[int(word) for word in TOKENIZER.decode(row[:4]).split()] for row in moved]
    steps = np.abs(np.array(read) - np.array([scene.box for scene in scenes])) // STEP
    assert steps.max() == RECIPE.slip_steps
    # Of five moves one is none; some more are undone at an edge.
    assert 0.35 < (steps > 0).mean() < 0.8 * RECIPE.slip_probability
    assert all(0 <= a < c <= SIDE and 0 <= b < d <= SIDE for a, b, c, d in read)
    exact = replace(RECIPE, slip_probability=0.0)
    assert torch.equal(move_corners(answers, exact, lowest, np.random.default_rng(0)), answers)


def test_training_learns_and_the_same_recipe_gives_the_same_bytes(tmp_path: Path) -> None:
    saved = []
    losses: list[float] = []
    for name in ("first", "again"):
        model = build_model(SHORT, PROCESSOR)
        final = train_model(model, PROCESSOR, SHORT, lambda step, steps, loss: losses.append(loss))
        save_tiny_vision_model(model, PROCESSOR, tmp_path / name)
        saved.append([file.read_bytes() for file in sorted((tmp_path / name).iterdir())])
    assert saved[0] == saved[1]
    assert losses[0] > 3.5 > final + 0.8


def test_the_loss_is_the_mean_over_the_answers_tokens() -> None:
    model = build_model(SHORT, PROCESSOR)
    corpus = encode_scenes(PROCESSOR, draw_scenes(2, np.random.default_rng(0)))
    rows = torch.arange(2)
    inputs = corpus.inputs(rows, corpus.answers)
    with torch.no_grad():
        logprobs = model(**inputs).logits[:, -6:-1].log_softmax(-1)
        loss = float(answer_loss(model, inputs, corpus.answers))
    assert loss == pytest.approx(-float(logprobs.gather(-1, corpus.answers[..., None]).mean()), rel=1e-5)
    with pytest.raises(NonFiniteError):
        train_model(model, PROCESSOR, replace(SHORT, learning_rate=1e30))


@pytest.mark.parametrize(("shapes", "least"), [pytest.param(1, 0.6, marks=pytest.mark.slow), (2, 0.5)])
def test_it_knows_the_task_says_it_carelessly_and_looks_at_the_image(shapes: int, least: float) -> None:
    # Greedy answers to one question are the same.
    usual, greedy = (
        evaluate_tiny_vision_model(FOLDER, RECIPE, shapes=shapes, temperature=warm, group_size=size)
        for warm, size in ((1.0, 2), (0.0, 1))
    )
    assert greedy.iou >= least
    assert greedy.iou - usual.iou >= 0.15
    assert usual.boxes >= 0.95
    assert usual.iou_group_std >= 0.1
    # Without the image nothing of it is left, and with two shapes it is the right one.
    assert greedy.wrong_image_iou <= greedy.constant_box_iou < usual.iou
    if shapes == 2:
        assert greedy.other_shape_iou <= 0.2
    measured = json.loads((FOLDER / "recipe.json").read_text(encoding="utf-8"))["measured"]["heldout"]
    (reported,) = (each for each in measured if (each["shapes"], each["temperature"]) == (shapes, 1.0))
    assert usual.iou == pytest.approx(reported["iou"], abs=0.05)
    assert usual.constant_box_iou == pytest.approx(reported["constant_box_iou"], abs=1e-9)


def test_transformers_alone_answers_with_it() -> None:
    processor, model = AutoProcessor.from_pretrained(FOLDER), AutoModelForImageTextToText.from_pretrained(FOLDER)
    assert processor.chat_template == PROCESSOR.chat_template
    assert processor.tokenizer.get_vocab() == TOKENIZER.get_vocab()
    scenes = draw_scenes(6, np.random.default_rng(8))
    corpus = encode_scenes(processor, scenes)
    with torch.no_grad():
        ids = model.generate(**corpus.inputs(torch.arange(6)), do_sample=False, max_new_tokens=6)
    answers = processor.batch_decode(ids[:, corpus.ids.shape[1] :], skip_special_tokens=True)
    boxes = [tuple(map(int, answer.split())) for answer in answers]
    ious = [iou_of((a, b, c, d), scene.box) for (a, b, c, d), scene in zip(boxes, scenes, strict=True)]
    assert sample_ious(model, processor, corpus, scenes, 0, 1).flatten().tolist() == pytest.approx(ious)
    assert np.mean(ious) > 0.5
