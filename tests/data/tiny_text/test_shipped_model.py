"""The shipped tiny text model is small, follows the source's recipe, and leaves room to improve."""

import json
from dataclasses import asdict

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from data.tiny_text import TinyTextRecipe, build_tokenizer, evaluate_tiny_text_model, split_words
from tests.tiny_text_policy import MODEL


def test_it_is_small_and_names_the_recipe_of_the_source() -> None:
    assert sum(file.stat().st_size for file in MODEL.rglob("*") if file.is_file()) <= 2_000_000
    recipe = json.loads((MODEL / "recipe.json").read_text(encoding="utf-8"))
    assert recipe["recipe"] == asdict(TinyTextRecipe())


def test_it_knows_the_task_and_makes_slips() -> None:
    """At a low temperature it is nearly always right; at temperature 1 there is room to improve."""
    recipe = TinyTextRecipe()
    _, heldout = split_words(recipe.seed, train=0, heldout=recipe.heldout_words)
    usual, cold = (evaluate_tiny_text_model(MODEL, heldout[::2], temperature=value) for value in (1.0, 0.1))
    assert 0.5 <= usual.similarity <= 0.68
    assert 0.03 <= usual.exact <= 0.2
    assert usual.similarity_group_std >= 0.1
    assert cold.exact >= 0.8
    assert usual.finished == cold.finished == 1.0
    reported = json.loads((MODEL / "recipe.json").read_text(encoding="utf-8"))["measured"]["heldout"]
    assert usual.similarity == pytest.approx(reported[0]["similarity"], abs=0.03)


@torch.no_grad()
def test_transformers_alone_answers_with_it() -> None:
    tokenizer, built = AutoTokenizer.from_pretrained(MODEL), build_tokenizer()
    assert (tokenizer.get_vocab(), tokenizer.chat_template) == (built.get_vocab(), built.chat_template)
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    messages = [{"role": "user", "content": "sort the letters of goga"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    written = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=24)
    assert tokenizer.decode(written[0, ids.shape[1] :]) == "aggo<|end|>"
