"""Supervised training of the tiny text model on imperfect answers."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from data.tiny_glm_image.optimization import ProgressCallback, SupervisedOptimizer
from data.tiny_text.letters import answer_of, prompt_of, split_words
from data.tiny_text.recipe import TinyTextRecipe

_ALPHABET = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Corpus:
    """Conversations as ids, padded on the right.

    Attributes:
        ids: int64 [conversations, time], prompt and answer in the chat template.
        trained: bool [conversations, time], True where an id belongs to the answer or ends it.
    """

    ids: Tensor
    trained: Tensor


def draw_corpus(tokenizer: PreTrainedTokenizerFast, recipe: TinyTextRecipe) -> Corpus:
    """Draw `recipe.corpus_size` answers, one per prompt, with slips at the recipe's rates."""
    words, _ = split_words(recipe.seed, train=recipe.corpus_size, heldout=recipe.heldout_words)
    rng = np.random.default_rng([recipe.seed, 3])
    rows = [encode_answer(tokenizer, word, draw_answer(word, recipe, rng)) for word in words]
    time = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids = torch.full((len(rows), time), tokenizer.pad_token_id)
    trained = torch.zeros(len(rows), time, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        ids[row, :end] = torch.tensor(prompt + answer)
        trained[row, len(prompt) : end] = True
    return Corpus(ids, trained)


def encode_answer(tokenizer: PreTrainedTokenizerFast, word: str, answer: str) -> tuple[list[int], list[int]]:
    """Encode the prompt about a word, and an answer with its end token."""
    messages = [{"role": "user", "content": prompt_of(word)}]
    requested = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt: list[int] = tokenizer.encode(requested, add_special_tokens=False)
    written: list[int] = tokenizer.encode(answer, add_special_tokens=False)
    return prompt, [*written, tokenizer.eos_token_id]


def draw_answer(word: str, recipe: TinyTextRecipe, rng: np.random.Generator) -> str:
    """Sort the letters with slips: a letter is replaced, missing, or repeated."""
    swap, skip, repeat = recipe.swap_probability, recipe.skip_probability, recipe.repeat_probability
    written = []
    for letter in answer_of(word):
        chance = rng.random()
        if chance < swap:
            written.append(_ALPHABET[rng.integers(len(_ALPHABET))])
        elif chance >= swap + skip:
            written.append(letter * (2 if chance < swap + skip + repeat else 1))
    return "".join(written)


@dataclass(frozen=True)
class TrainingMetrics:
    """The loss that the supervised training reached.

    Attributes:
        final_loss: mean cross-entropy over the last twentieth of the steps, nats per token.
    """

    final_loss: float


def answer_loss(model: LlamaForCausalLM, corpus: Corpus, rows: Tensor) -> Tensor:
    """Compute the mean negative log-likelihood of the answers' tokens in these rows, in nats, as a scalar tensor."""
    ids, trained = corpus.ids[rows], corpus.trained[rows, 1:]
    # Padding is on the right, where a causal model's earlier positions do not see it.
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits[trained], ids[:, 1:][trained])


def train_model(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    recipe: TinyTextRecipe,
    on_step: ProgressCallback | None = None,
) -> TrainingMetrics:
    """Train `model` in place on the recipe's corpus.

    Args:
        model: from :func:`data.tiny_text.model.build_model`.
        tokenizer: the model's tokenizer.
        recipe: steps, batch, learning rate and the corpus.
        on_step: called after every step.

    Raises:
        NonFiniteError: the loss is NaN or infinite.
    """
    corpus = draw_corpus(tokenizer, recipe)
    optimizer = SupervisedOptimizer(model.parameters(), recipe.learning_rate, recipe.steps)
    generator = torch.Generator().manual_seed(recipe.seed)
    losses = []
    model.train()
    for step in range(recipe.steps):
        rows = torch.randint(recipe.corpus_size, (recipe.batch,), generator=generator)
        losses.append(optimizer.step(answer_loss(model, corpus, rows)))
        if on_step is not None:
            on_step(step + 1, recipe.steps, losses[-1])
    model.eval()
    tail = losses[-max(1, len(losses) // 20) :]
    return TrainingMetrics(sum(tail) / len(tail))
