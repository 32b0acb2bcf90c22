"""Words, answers and slips are what the recipe says, and what is held out stays unseen."""

import itertools
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import data
from data.tiny_text import TinyTextRecipe, build_tokenizer, write_prompt_files
from data.tiny_text.letters import answer_of, draw_words, prompt_of, split_words
from data.tiny_text.training import draw_answer, draw_corpus

SMALL = TinyTextRecipe(corpus_size=400, heldout_words=64)


@given(st.text(alphabet="abcdefghij", min_size=1, max_size=12))
def test_an_answer_holds_the_same_letters_in_order(word: str) -> None:
    answer = answer_of(word)
    assert Counter(answer) == Counter(word)
    assert all(first <= second for first, second in itertools.pairwise(answer))


def test_words_are_distinct_and_speakable() -> None:
    words = draw_words(2000, np.random.default_rng(0), without=["bab"])
    assert len({*words, "bab"}) == 2001
    assert {len(word) for word in words} == set(range(3, 9))
    for word in words:
        vowels = [letter in "aeiou" for letter in word]
        assert all(first != second for first, second in itertools.pairwise(vowels))


def test_held_out_words_are_in_no_training() -> None:
    recipe = TinyTextRecipe()
    seen, unseen = split_words(recipe.seed, train=recipe.corpus_size, heldout=recipe.heldout_words)
    assert not set(seen) & set(unseen)
    assert split_words(recipe.seed, train=recipe.train_prompts, heldout=recipe.heldout_words) == (
        seen[: recipe.train_prompts],
        unseen,
    )


@pytest.mark.parametrize(
    ("rates", "lengths"),
    [((0, 0, 0), {4}), ((1, 0, 0), {4}), ((0, 1, 0), {0}), ((0, 0, 1), {8})],
)
def test_slips_come_at_their_rates(rates: tuple[float, float, float], lengths: set[int]) -> None:
    swap, skip, repeat = rates
    recipe = TinyTextRecipe(swap_probability=swap, skip_probability=skip, repeat_probability=repeat)
    rng = np.random.default_rng(0)
    answers = [draw_answer("goga", recipe, rng) for _ in range(50)]
    assert {len(answer) for answer in answers} == lengths
    if not any(rates):
        assert set(answers) == {"aggo"}
    if repeat:
        assert set(answers) == {"aaggggoo"}


def test_the_rates_of_the_recipe_are_met() -> None:
    recipe, rng = TinyTextRecipe(), np.random.default_rng(0)
    lengths = [len(draw_answer("aaaaaaaa", recipe, rng)) for _ in range(2000)]
    # One letter in eight is missing as often as one is written twice.
    assert np.mean(lengths) == pytest.approx(8 * (1 - recipe.skip_probability + recipe.repeat_probability), abs=0.1)


def test_the_corpus_is_read_back_as_prompts_and_answers() -> None:
    tokenizer = build_tokenizer()
    recipe = TinyTextRecipe(corpus_size=40, swap_probability=0, skip_probability=0, repeat_probability=0)
    corpus = draw_corpus(tokenizer, recipe)
    words, _ = split_words(recipe.seed, train=40, heldout=recipe.heldout_words)
    for word, ids, trained in zip(words, corpus.ids, corpus.trained, strict=True):
        requested = ids[: int(trained.nonzero()[0])]
        assert tokenizer.decode(requested) == f"<|user|>{prompt_of(word)}<|end|><|assistant|>"
        assert tokenizer.decode(ids[trained]) == f"{answer_of(word)}<|end|>"
        assert (ids[int(trained.nonzero()[-1]) + 1 :] == tokenizer.pad_token_id).all()


def test_the_same_recipe_gives_the_same_corpus_and_another_seed_another() -> None:
    tokenizer = build_tokenizer()
    first, again = draw_corpus(tokenizer, SMALL), draw_corpus(tokenizer, SMALL)
    assert torch.equal(first.ids, again.ids)
    other = draw_corpus(tokenizer, TinyTextRecipe(seed=1, corpus_size=400, heldout_words=64))
    assert first.ids.shape != other.ids.shape or not torch.equal(first.ids, other.ids)


def test_the_shipped_prompt_files_are_those_of_the_recipe(tmp_path: Path) -> None:
    recipe = TinyTextRecipe()
    write_prompt_files(recipe, tmp_path)
    shipped = Path(data.__file__).parent / "prompts"
    for file in tmp_path.iterdir():
        assert file.read_bytes() == (shipped / file.name).read_bytes()
    rows = [json.loads(line) for line in (shipped / "letters_heldout.jsonl").read_text().splitlines()]
    assert len(rows) == recipe.heldout_prompts
    assert rows[1] == {"prompt": "sort the letters of goga", "answer": "aggo", "word": "goga"}
