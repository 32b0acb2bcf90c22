"""How people would rate the image on a scale of 1 to 10: a linear head on its CLIP embedding.

Schuhmann, 2022, "improved-aesthetic-predictor" (LAION-Aesthetics V2): five layers without activations between them,
fitted to the ratings of SAC, Logos and AVA on embeddings of length 1 of OpenAI's ViT-L/14.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from jaxtyping import Float32
from pydantic.dataclasses import dataclass
from torch import Tensor

from grpo_core.errors import InputError
from grpo_core.rewards.embedding.clip import ClipReward
from grpo_core.rewards.embedding.clip_model import NO_DIRECTION, load_clip
from grpo_core.rewards.model_reward import Sha256, exact_inference, load_once
from grpo_core.rewards.reward import STRICT, Score, ScoringBatch, clamp_unit
from grpo_core.rewards.weights.load import load_state_dict
from grpo_core.rewards.weights.source import Published, Weights

FULL_SCALE = 10.0
_PLACE = "rewards.aesthetic.head"
_FILE = "sac+logos+ava1-l14-linearMSE.pth"

HEAD = Published(
    "Christoph Schuhmann for LAION (Apache-2.0)",
    _FILE,
    f"https://github.com/christophschuhmann/improved-aesthetic-predictor/raw/main/{_FILE.replace('+', '%2B')}",
    sha256="21dd590f3ccdc646",
    licence="Apache-2.0",
)
"""The head of LAION-Aesthetics V2."""

LAYERS = (("layers.0", 1024), ("layers.2", 128), ("layers.4", 64), ("layers.6", 16), ("layers.7", 1))
"""Name and width of each layer; the numbers between belong to dropout, which scoring does not use."""


@dataclass(frozen=True, config=STRICT)
class AestheticReward(ClipReward):
    """Value clip(rating / 10, 0, 1); raw the rating, mostly between 1 and 10, unbounded.

    Attributes:
        head: the state dict of the head: its path, or ``hf://owner/repo/file``.
        head_sha256: digest that this file must have.
    """

    head: str | None = None
    head_sha256: Sha256 | None = None

    name: ClassVar[str] = "aesthetic"
    free_settings: ClassVar[frozenset[str]] = ClipReward.free_settings | {"head", "head_sha256"}

    def __post_init__(self) -> None:
        super().__post_init__()
        self._head()

    def weight_sources(self) -> Mapping[str, Weights]:
        """Return CLIP's and the head's."""
        return {**super().weight_sources(), "head": self._head()}

    def preflight(self) -> Sequence[str]:
        """List missing or wrong weights, a head for another network, a missing device."""
        problems = super().preflight()
        if self.head is None or self.head.startswith("hf://") or self._head().problem() is not None:
            return problems
        try:
            load_head(self._head(), self.architecture().width)
        except InputError as error:
            # The check of CLIP has reported an unknown network already.
            return [*problems, str(error)] if error.place == _PLACE else problems
        return problems

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """Score each sample; the first call of a process loads the weights."""
        head = load_head(self._head(), self.architecture().width)
        model = load_clip(self)
        ratings = [aesthetic_rating(head, model.image_embedding(image)) for image in batch.rgb_images(self.name)]
        return [Score.of(clamp_unit(rating / FULL_SCALE), rating, NO_DIRECTION) for rating in ratings]

    def _head(self) -> Weights:
        return Weights(_PLACE, self.head, self.head_sha256, HEAD)


Layers = tuple[tuple[Tensor, Tensor], ...]
"""The layers of a head in order, each a matrix [out, in] and a vector [out], in fp32 on the CPU."""


def aesthetic_rating(head: Layers, embedding: Float32[Tensor, " width"]) -> float:
    """Rate an image by its embedding of length 1; NaN for an embedding of NaN."""
    with exact_inference("cpu"):
        hidden = embedding
        for matrix, offset in head:
            hidden = torch.nn.functional.linear(hidden, matrix, offset)
        return hidden.item()


@load_once
def load_head(weights: Weights, width: int) -> Layers:
    """Load the head for embeddings of that width.

    Raises:
        InputError: the file cannot be read, or is not a head for such embeddings.
    """
    tensors = load_state_dict(weights)
    inputs = width
    for layer, outputs in LAYERS:
        for name, shape in ((f"{layer}.weight", (outputs, inputs)), (f"{layer}.bias", (outputs,))):
            found = tuple(tensors[name].shape) if name in tensors else None
            if found == shape:
                continue
            if layer == LAYERS[0][0] and found is not None and found[:1] == shape[:1]:
                hint = (
                    f"This head needs embeddings of {found[1]} numbers, this CLIP has {width}. Set `model` "
                    "to the network that the head was fitted to (ViT-L-14-quickgelu for the published one)."
                )
                raise weights.error(hint)
            seen = "is missing" if found is None else f"has shape {list(found)}, not {list(shape)}"
            raise weights.error(f"In this file {name} {seen}. Set {HEAD.file}.")
        inputs = outputs
    return tuple((tensors[f"{layer}.weight"].float(), tensors[f"{layer}.bias"].float()) for layer, _ in LAYERS)
