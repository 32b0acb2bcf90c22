"""How people would rate the image on a scale of 1 to 10: a linear head on its CLIP embedding.

Schuhmann, 2022, "improved-aesthetic-predictor" (LAION-Aesthetics V2): five layers without activations between them,
fitted to the ratings of SAC, Logos and AVA on embeddings of length 1 of OpenAI's ViT-L/14.
"""

import functools
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float32
from torch import Tensor

from grpo_core.errors import InputError
from grpo_core.rewards.devices import exact_inference
from grpo_core.rewards.embedding.clip_model import NO_DIRECTION
from grpo_core.rewards.embedding.clip_settings import DEFAULT_MODEL, ClipSettings, library_version
from grpo_core.rewards.images import to_rgb
from grpo_core.rewards.protocol import Reward, Score, ScoringBatch
from grpo_core.rewards.scoring import clamp_unit
from grpo_core.rewards.weights import (
    PublishedWeights,
    WeightFile,
    check_digest_setting,
    check_source_setting,
    find_weights_problem,
    load_state_dict,
    resolve_weights,
    tensor_shapes,
)

FULL_SCALE = 10.0
_PLACE = "rewards.aesthetic.head"
_FILE = "sac+logos+ava1-l14-linearMSE.pth"

HEAD = PublishedWeights(
    _FILE,
    "Christoph Schuhmann for LAION (Apache-2.0)",
    f"https://github.com/christophschuhmann/improved-aesthetic-predictor/raw/main/{_FILE.replace('+', '%2B')}",
    digest="21dd590f3ccdc646",
)
"""The head of LAION-Aesthetics V2."""

LAYERS = (("layers.0", 1024), ("layers.2", 128), ("layers.4", 64), ("layers.6", 16), ("layers.7", 1))
"""Name and width of each layer; the numbers between belong to dropout, which scoring has none of."""


@dataclass(frozen=True)
class AestheticReward(Reward):
    """Value clip(rating / 10, 0, 1); raw the rating, mostly between 1 and 10, unbounded.

    Attributes:
        model: open_clip's tag of the network, or the path of an open_clip_config.json.
        pretrained: open_clip's name of the release that the weights are; by default ``openai``.
        weights: open_clip's state dict: its path (.safetensors, or .pt of named tensors), or ``hf://owner/repo/file``.
        weights_sha256: digest that the file must have, whole or its first 8 digits or more.
        head: the state dict of the head: its path, or ``hf://owner/repo/file``.
        head_sha256: digest that this file must have.
        device: where CLIP computes: ``cpu``, ``cuda`` or ``cuda:N``.
    """

    model: str = DEFAULT_MODEL
    pretrained: str | None = None
    weights: str | None = None
    weights_sha256: str | None = None
    head: str | None = None
    head_sha256: str | None = None
    device: str = "cpu"

    name: ClassVar[str] = "aesthetic"

    def __post_init__(self) -> None:
        self._clip().check()
        check_source_setting(_PLACE, self.head, HEAD)
        check_digest_setting(f"{_PLACE}_sha256", self.head_sha256)

    @property
    def version(self) -> str:
        """The library that prepares images belongs to it."""
        return f"1+{library_version()}"

    def settings(self) -> Mapping[str, object]:
        """Network and release."""
        return self._clip().settings()

    def weight_digests(self) -> Mapping[str, str]:
        """CLIP's and the head's."""
        return {"clip": self._clip().weight_file().sha256, "head": self._head_file().sha256}

    def preflight(self) -> Sequence[str]:
        """Missing or wrong weights, a head for another network, a device that is not there."""
        clip_problems = self._clip().problems()
        problem = find_weights_problem(_PLACE, self.head, self.head_sha256, HEAD)
        if problem is None and self.head is not None and not self.head.startswith("hf://"):
            problem = self._find_shape_problem(self.head)
        return [str(each) for each in (*clip_problems, problem) if each is not None]

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """One score a sample; the first call of a process loads the weights.

        Raises:
            InputError: missing or wrong weights, a head for another network, an image of an unknown mode.
        """
        clip = self._clip()
        head = load_head(self._head_file(), clip.architecture().width)
        model = clip.load()
        scores = []
        for sample_id, image in zip(batch.sample_ids, batch.images, strict=True):
            image = to_rgb(image, f"rewards.aesthetic, sample {sample_id}")
            rating = aesthetic_rating(head, model.image_embedding(image))
            finite = math.isfinite(rating)
            scores.append(Score(clamp_unit(rating / FULL_SCALE), rating) if finite else Score.failed(NO_DIRECTION))
        return scores

    def _find_shape_problem(self, path: str) -> InputError | None:
        try:
            check_head(path, tensor_shapes(_PLACE, path), self._clip().architecture().width)
        except InputError as error:
            # A network that is not known is told by the check of CLIP itself.
            return error if error.place == _PLACE else None
        return None

    def _head_file(self) -> WeightFile:
        return resolve_weights(_PLACE, self.head, self.head_sha256, HEAD)

    def _clip(self) -> ClipSettings:
        return ClipSettings(
            self.name, self.model, self.pretrained, self.weights, self.weights_sha256, device=self.device
        )


@dataclass(frozen=True)
class AestheticHead:
    """The head's layers in order, each a matrix [out, in] and a vector [out], in fp32 on the CPU."""

    layers: tuple[tuple[Tensor, Tensor], ...]


def aesthetic_rating(head: AestheticHead, embedding: Float32[Tensor, " width"]) -> float:
    """The rating of an image with this embedding of length 1; NaN of one that is NaN."""
    with exact_inference("cpu"):
        hidden = embedding
        for matrix, offset in head.layers:
            hidden = torch.nn.functional.linear(hidden, matrix, offset)
        return hidden.item()


def check_head(path: str, shapes: Mapping[str, tuple[int, ...]], width: int) -> None:
    """Refuse tensors that are no head for embeddings of that width.

    Raises:
        InputError: one is missing or of another shape.
    """
    inputs = width
    for layer, outputs in LAYERS:
        for name, shape in ((f"{layer}.weight", (outputs, inputs)), (f"{layer}.bias", (outputs,))):
            found = shapes.get(name)
            if found == shape:
                continue
            if layer == LAYERS[0][0] and found is not None and found[:1] == shape[:1]:
                hint = (
                    f"This head reads embeddings of {found[1]} numbers, those of CLIP here have {width}. Set `model` "
                    "to the network that the head was fitted to (ViT-L-14-quickgelu for the published one)."
                )
                raise InputError(_PLACE, path, hint)
            seen = "is missing" if found is None else f"has shape {list(found)}, not {list(shape)}"
            raise InputError(_PLACE, path, f"In this file {name} {seen}. Give {HEAD.file}.")
        inputs = outputs


def load_head(file: WeightFile, width: int) -> AestheticHead:
    """The head, read once a process for each digest.

    Args:
        file: its weights.
        width: of the embeddings that it shall rate.

    Raises:
        InputError: the file cannot be read, or is no head for such embeddings.
    """
    with _LOADING:
        return _load_head(file, width)


_LOADING = threading.Lock()


@functools.lru_cache(maxsize=4)
def _load_head(file: WeightFile, width: int) -> AestheticHead:
    tensors = load_state_dict(_PLACE, file.path)
    check_head(file.path, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, width)
    return AestheticHead(
        tuple((tensors[f"{layer}.weight"].float(), tensors[f"{layer}.bias"].float()) for layer, _ in LAYERS)
    )
