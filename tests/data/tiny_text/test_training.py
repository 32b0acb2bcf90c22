"""The supervised training learns, gives the same bytes twice, and says no to numbers that are none."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data.tiny_text import TinyTextRecipe, build_model, build_tokenizer, save_tiny_text_model, train_model
from data.tiny_text.training import answer_loss, draw_corpus
from grpo_core.errors import NonFiniteError

SHORT = TinyTextRecipe(corpus_size=256, steps=40, batch=16, hidden_size=32, heads=2, key_value_heads=1)


def trained(folder: Path) -> list[bytes]:
    tokenizer = build_tokenizer()
    model = build_model(SHORT, tokenizer)
    train_model(model, tokenizer, SHORT)
    save_tiny_text_model(model, tokenizer, folder)
    return [file.read_bytes() for file in sorted(folder.iterdir())]


def test_the_same_recipe_gives_the_same_bytes(tmp_path: Path) -> None:
    assert trained(tmp_path / "first") == trained(tmp_path / "again")


def test_the_loss_falls_and_is_that_of_the_answers_alone() -> None:
    tokenizer = build_tokenizer()
    model = build_model(SHORT, tokenizer)
    losses: list[float] = []
    metrics = train_model(model, tokenizer, SHORT, lambda step, steps, loss: losses.append(loss))
    assert losses[0] > 5 > metrics.final_loss + 1.5
    corpus = draw_corpus(tokenizer, SHORT)
    row, trained_places = corpus.ids[3], corpus.trained[3]
    with torch.no_grad():
        logprobs = model(row.unsqueeze(0)).logits[0].log_softmax(-1)
        by_hand = [-float(logprobs[place - 1, row[place]]) for place in trained_places.nonzero().flatten().tolist()]
        loss = float(answer_loss(model, corpus, torch.tensor([3])))
    assert loss == pytest.approx(sum(by_hand) / len(by_hand), rel=1e-5)


def test_a_learning_rate_that_breaks_it_is_told() -> None:
    tokenizer = build_tokenizer()
    model = build_model(SHORT, tokenizer)
    with pytest.raises(NonFiniteError):
        train_model(model, tokenizer, replace(SHORT, learning_rate=1e30))
