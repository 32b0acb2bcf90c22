"""All hyperparameters of the tiny GLM-Image."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TinyRecipe:
    """How the tiny GLM-Image is built and trained; the same recipe gives the same weights on the same machine.

    The supervised images are imperfect on purpose, like a real corpus: the policy learns the meaning of captions
    and also slips and stray cells, which training with rewards can then remove.

    Attributes:
        seed: for weights, data order, noise and the split of captions.
        heldout_fraction: share of the captions that the supervised training never sees.
        corpus_size: images drawn for the supervised training.
        slip_probability, confusion_probability, speckle_probability: mistakes in them, see
            :class:`data.imperfect_drawings.Mistakes`.
        hidden_size, layers, heads, key_value_heads, intermediate_size: of the autoregressive model.
        rope_theta: base of its rotary frequencies; a grid of eight rows needs fast ones, or columns look alike.
        initializer_range: standard deviation of its initial weights.
        autoregressive_steps, autoregressive_batch, autoregressive_learning_rate: its supervised training.
        decoder_size, decoder_layers, decoder_heads: of the diffusion transformer.
        decoder_steps, decoder_batch, decoder_learning_rate: its training by flow matching.
        latent_std: pixels, in [-1, 1], are divided by it to give latents; small values make the decoder's remaining
            noise small against the image.
        prior_drop_probability: probability that the image tokens are dropped in decoder training, for guidance.
        train_prompts, heldout_prompts: sizes of the prompt files for training with rewards.
    """

    seed: int = 0
    heldout_fraction: float = 0.1
    corpus_size: int = 8192
    slip_probability: float = 0.5
    confusion_probability: float = 0.0
    speckle_probability: float = 0.04
    hidden_size: int = 128
    layers: int = 2
    heads: int = 4
    key_value_heads: int = 2
    intermediate_size: int = 256
    rope_theta: float = 10.0
    initializer_range: float = 0.05
    autoregressive_steps: int = 800
    autoregressive_batch: int = 32
    autoregressive_learning_rate: float = 4e-3
    decoder_size: int = 96
    decoder_layers: int = 1
    decoder_heads: int = 2
    decoder_steps: int = 900
    decoder_batch: int = 8
    decoder_learning_rate: float = 3e-3
    latent_std: float = 0.2
    prior_drop_probability: float = 0.15
    train_prompts: int = 60
    heldout_prompts: int = 12
