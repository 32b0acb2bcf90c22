"""Supervised training of the tiny text model: cross-entropy on the answers."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from data.tiny_glm_image.optimization import ProgressCallback, SupervisedOptimizer
from data.tiny_text.corpus import Corpus, draw_corpus
from data.tiny_text.recipe import TinyTextRecipe


@dataclass(frozen=True)
class TrainingMetrics:
    """What the supervised training reached.

    Attributes:
        final_loss: mean cross-entropy over the last twentieth of the steps, nats a token.
    """

    final_loss: float


def answer_loss(model: LlamaForCausalLM, corpus: Corpus, rows: Tensor) -> Tensor:
    """Mean negative log-likelihood of the answers' tokens in these rows, in nats, as a scalar tensor."""
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
    """Trains `model` in place on the recipe's corpus.

    Args:
        model: from :func:`data.tiny_text.model.build_model`.
        tokenizer: its own.
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
