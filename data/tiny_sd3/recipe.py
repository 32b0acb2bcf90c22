"""All hyperparameters of the tiny Stable Diffusion 3."""

from dataclasses import dataclass


@dataclass(frozen=True)
class TinySd3Recipe:
    """How the tiny SD3 is built and trained; the same recipe gives the same weights on the same machine.

    The supervised images are imperfect on purpose, like a real corpus: for one caption the noise decides which shape is
    drawn and where, and training with rewards can make the caption decide.

    Attributes:
        seed: for weights, data order, noise and the split of captions.
        heldout_fraction: share of the captions that the supervised training never sees.
        corpus_size: images drawn for the supervised training.
        slip_probability, confusion_probability, speckle_probability: mistakes in them, see
            :class:`data.imperfect_drawings.Mistakes`.
        clip_size: hidden size of each of the two CLIP text encoders; their weights and those of the T5 stay random.
        t5_size: of the T5's embeddings, which the transformer attends to.
        text_length: tokens that the CLIP tokenizers pad to, and `max_sequence_length` of the T5.
        hidden_size, layers, heads: of the diffusion transformer.
        patch_size: its patches, in latents along each axis; a latent covers 8 pixels.
        latent_std: pixels, in [-1, 1], are divided by it to give latents.
        shift: of the scheduler's noise levels.
        steps, batch, learning_rate: of the transformer's training by flow matching.
        prompt_drop_probability: probability that the prompt is empty in training, for guidance.
    """

    seed: int = 0
    heldout_fraction: float = 0.1
    corpus_size: int = 8192
    slip_probability: float = 0.5
    confusion_probability: float = 0.1
    speckle_probability: float = 0.06
    clip_size: int = 32
    t5_size: int = 64
    text_length: int = 14
    hidden_size: int = 64
    layers: int = 3
    heads: int = 4
    patch_size: int = 2
    latent_std: float = 0.7
    shift: float = 3.0
    steps: int = 2000
    batch: int = 32
    learning_rate: float = 3e-3
    prompt_drop_probability: float = 0.1
