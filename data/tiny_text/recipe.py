"""All hyperparameters of the tiny text model."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TinyTextRecipe:
    """How the tiny text model is built and trained; the same recipe gives the same weights on the same machine.

    The supervised answers are imperfect on purpose: the policy learns the task and also the slips, which
    training with rewards can then remove.

    Attributes:
        seed: for weights, words, slips and data order.
        heldout_words: words that are in neither the supervised training nor the training prompts.
        corpus_size: answers drawn for the supervised training.
        swap_probability: probability per letter of the answer that another letter replaces it.
        skip_probability: probability per letter of the answer that it is missing.
        repeat_probability: probability per letter of the answer that it is repeated.
        hidden_size, layers, heads, key_value_heads, intermediate_size: of the model.
        context: ids that it can read and write.
        initializer_range: standard deviation of its initial weights.
        steps, batch, learning_rate: of the supervised training.
        train_prompts, heldout_prompts: sizes of the prompt files for training with rewards.
    """

    seed: int = 0
    heldout_words: int = 256
    corpus_size: int = 32768
    swap_probability: float = 0.22
    skip_probability: float = 0.12
    repeat_probability: float = 0.12
    hidden_size: int = 96
    layers: int = 2
    heads: int = 4
    key_value_heads: int = 2
    intermediate_size: int = 192
    context: int = 512
    initializer_range: float = 0.05
    steps: int = 1200
    batch: int = 64
    learning_rate: float = 4e-3
    train_prompts: int = 256
    heldout_prompts: int = 32
