"""The tiny text model: words, tokenizer, a supervised training that repeats to the bit, and the shipped model."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

import data
from data.tiny_text import (
    TinyTextRecipe,
    answer_loss,
    answer_of,
    build_model,
    build_tokenizer,
    draw_corpus,
    evaluate_tiny_text_model,
    prompt_of,
    save_tiny_text_model,
    split_words,
    train_model,
    write_prompt_files,
)
from grpo_core.errors import NonFiniteError
from tests.tiny_policies import TEXT_MODEL

SHORT = TinyTextRecipe(corpus_size=256, steps=40, batch=16, hidden_size=32, heads=2, key_value_heads=1)
TOKENIZER = build_tokenizer()


def test_heldout_words_are_in_no_training() -> None:
    recipe = TinyTextRecipe()
    train, heldout = split_words(recipe.seed, train=recipe.corpus_size, heldout=recipe.heldout_words)
    assert not set(train) & set(heldout)
    fewer = split_words(recipe.seed, train=recipe.train_prompts, heldout=recipe.heldout_words)
    assert fewer == (train[: recipe.train_prompts], heldout)


def test_the_corpus_is_read_back_as_prompts_and_answers() -> None:
    recipe = TinyTextRecipe(corpus_size=40, swap_probability=0, skip_probability=0, repeat_probability=0)
    corpus = draw_corpus(TOKENIZER, recipe)
    words, _ = split_words(recipe.seed, train=40, heldout=recipe.heldout_words)
    for word, ids, trained in zip(words, corpus.ids, corpus.trained, strict=True):
        assert TOKENIZER.decode(ids[: int(trained.nonzero()[0])]) == f"<|user|>{prompt_of(word)}<|end|><|assistant|>"
        assert TOKENIZER.decode(ids[trained]) == f"{answer_of(word)}<|end|>"
        assert (ids[int(trained.nonzero()[-1]) + 1 :] == TOKENIZER.pad_token_id).all()


def test_the_shipped_prompt_files_are_those_of_the_recipe(tmp_path: Path) -> None:
    write_prompt_files(TinyTextRecipe(), tmp_path)
    files = list(tmp_path.iterdir())
    assert len(files) == 2
    for file in files:
        assert file.read_bytes() == (Path(data.__file__).parent / "prompts" / file.name).read_bytes()


@given(st.text(max_size=40).filter(lambda text: "<|" not in text))
def test_any_text_round_trips_through_the_tokenizer(text: str) -> None:
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.decode(ids, clean_up_tokenization_spaces=False) == text


def test_the_letters_of_a_question_are_one_token_each() -> None:
    tokens = ["sort", "Ġthe", "Ġletters", "Ġof", "Ġ", "g", "o", "g", "a"]
    assert TOKENIZER.tokenize("sort the letters of goga") == tokens


def test_training_learns_and_the_same_recipe_gives_the_same_bytes(tmp_path: Path) -> None:
    saved = []
    losses: list[float] = []
    for name in ("first", "again"):
        model = build_model(SHORT, TOKENIZER)
        final = train_model(model, TOKENIZER, SHORT, lambda step, steps, loss: losses.append(loss))
        save_tiny_text_model(model, TOKENIZER, tmp_path / name)
        saved.append([file.read_bytes() for file in sorted((tmp_path / name).iterdir())])
    assert saved[0] == saved[1]
    assert losses[0] > 5 > final + 1.5


def test_the_loss_is_the_mean_over_the_answers_tokens() -> None:
    model = build_model(SHORT, TOKENIZER)
    corpus = draw_corpus(TOKENIZER, SHORT)
    row, trained = corpus.ids[3], corpus.trained[3].nonzero().flatten().tolist()
    with torch.no_grad():
        logprobs = model(row.unsqueeze(0)).logits[0].log_softmax(-1)
        loss = float(answer_loss(model, corpus, torch.tensor([3])))
    expected = [-float(logprobs[place - 1, row[place]]) for place in trained]
    assert loss == pytest.approx(sum(expected) / len(expected), rel=1e-5)
    with pytest.raises(NonFiniteError):
        train_model(model, TOKENIZER, replace(SHORT, learning_rate=1e30))


def test_it_knows_the_task_and_makes_slips() -> None:
    """At a low temperature it is nearly always right; at temperature 1 there is room to improve."""
    recipe = TinyTextRecipe()
    _, heldout = split_words(recipe.seed, train=0, heldout=recipe.heldout_words)
    usual, cold = (evaluate_tiny_text_model(TEXT_MODEL, heldout[::2], temperature=value) for value in (1.0, 0.1))
    assert 0.5 <= usual.similarity <= 0.68
    assert 0.03 <= usual.exact <= 0.2
    assert usual.similarity_group_std >= 0.1
    assert cold.exact >= 0.8
    assert usual.finished == cold.finished == 1.0
    reported = json.loads((TEXT_MODEL / "recipe.json").read_text(encoding="utf-8"))["measured"]["heldout"]
    assert usual.similarity == pytest.approx(reported[0]["similarity"], abs=0.03)


@torch.no_grad()
def test_transformers_alone_answers_with_it() -> None:
    tokenizer, built = AutoTokenizer.from_pretrained(TEXT_MODEL), build_tokenizer()
    assert (tokenizer.get_vocab(), tokenizer.chat_template) == (built.get_vocab(), built.chat_template)
    model = AutoModelForCausalLM.from_pretrained(TEXT_MODEL)
    messages = [{"role": "user", "content": "sort the letters of goga"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    written = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
    assert tokenizer.decode(written[0, ids.shape[1] :]) == "aggo<|end|>"
