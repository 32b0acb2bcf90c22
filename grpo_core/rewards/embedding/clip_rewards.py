"""Rewards from CLIP embeddings: how well an image fits its prompt or another image, and how people would rate it.

Radford et al., 2021, "Learning Transferable Visual Models From Natural Language Supervision" (arXiv:2103.00020).

Hessel, Holtzman, Forbes, Le Bras and Choi, 2021, "CLIPScore: A Reference-free Evaluation Metric for Image Captioning"
(arXiv:2104.08718), section 3: w max(cos, 0), there with w = 2.5 and ViT-B/32.

Schuhmann, 2022, "improved-aesthetic-predictor" (LAION-Aesthetics V2): five linear layers, fitted to the ratings of SAC,
Logos and AVA on embeddings of length 1 of OpenAI's ViT-L/14.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from jaxtyping import Float32
from PIL import Image
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from grpo_core.rewards.embedding.clip import ClipArchitecture, ClipReward, LongPrompts, check_prompts
from grpo_core.rewards.model_reward import (
    Placed,
    Sha256,
    batched,
    exact_inference,
    find_tensor,
    load_once,
    load_state_dict,
    load_weights,
)
from grpo_core.rewards.reward import STRICT, Positive, problems_of
from grpo_core.rewards.scoring_batch import NOT_APPLICABLE, Score, ScoringBatch, clamp_unit
from grpo_core.rewards.similarity.pairs import ComparingReward
from grpo_core.rewards.weights import HUB_PREFIX, Published, Weights
from grpo_core.rollouts.images import to_rgb
from grpo_core.uses import Uses

CACHED_EMBEDDINGS = 4096
"""How many embeddings a model keeps, for images that several rewards look at and for the prompts of a group."""

NO_DIRECTION = "the CLIP embedding has length 0 or is not finite, so it points nowhere"
"""The reason of a failure: an embedding that cannot be scaled to length 1."""

_BESIDE_THE_WEIGHTS = ("input_resolution", "context_length", "vocab_size")


class ClipModel:
    """A network on one device, which threads may share; each image is computed once.

    A matrix product's last bits depend on the batch that it runs in, so an embedding is that of its batch size.
    """

    def __init__(self, architecture: ClipArchitecture, network: Any, placed: Placed) -> None:
        import open_clip
        from open_clip.transform import PreprocessCfg, image_transform_v2

        preparation = {"size": network.visual.image_size, **architecture.preparation}
        self.architecture = architecture
        self._network, self._placed = network.to(placed.device, placed.dtype), placed
        self._prepare: Callable[[Image.Image], Tensor] = image_transform_v2(
            PreprocessCfg(**preparation), is_train=False
        )
        tokenizer_settings = architecture.network["text_cfg"].get("tokenizer_kwargs", {})
        self._tokenizer = open_clip.SimpleTokenizer(context_length=architecture.context_length, **tokenizer_settings)
        self._lock = threading.Lock()
        self._embeddings: OrderedDict[str, Tensor] = OrderedDict()

    def image_embeddings(self, images: Sequence[Image.Image], batch_size: int = 1) -> list[Tensor]:
        """Return each RGB image's embedding [width] on the CPU, of length 1; NaN where the network's has no direction.

        Images of any size: each is resized and cut to the network's.
        """
        for image in images:
            if image.mode != "RGB":
                raise ValueError(f"expected an RGB image, got mode {image.mode}")
        digests = [hashlib.sha256(image.tobytes()).hexdigest() for image in images]
        keys = [f"image {each.width}x{each.height} {digest}" for each, digest in zip(images, digests, strict=True)]

        def compute(rows: Sequence[int]) -> Tensor:
            pixels = torch.stack([self._prepare(images[row]) for row in rows])
            embeddings: Tensor = self._network.encode_image(pixels.to(self._placed.device, self._placed.dtype))
            return embeddings

        return self._embed(keys, compute, batch_size)

    def text_embeddings(self, texts: Sequence[str], batch_size: int = 1) -> list[Tensor]:
        """Return each text's embedding [width] on the CPU, of length 1, or NaN; of a long text its first tokens count.

        Every text fills the network's context, so that none is padded for its batch.
        """
        keys = [f"text {hashlib.sha256(text.encode()).hexdigest()}" for text in texts]

        def compute(rows: Sequence[int]) -> Tensor:
            tokens = self._tokenizer([texts[row] for row in rows]).to(self._placed.device)
            embeddings: Tensor = self._network.encode_text(tokens)
            return embeddings

        return self._embed(keys, compute, batch_size)

    def count_tokens(self, text: str) -> int:
        """Count the tokens of the text, including the start and end marks."""
        return len(self._tokenizer.encode(text)) + 2

    def _embed(self, keys: Sequence[str], compute: Callable[[Sequence[int]], Tensor], batch_size: int) -> list[Tensor]:
        keys = [f"{key} in batches of {batch_size}" for key in keys]
        # Locked while computing, so that another thread waits for the same image.
        with self._lock:
            found = {key: self._embeddings[key] for key in keys if key in self._embeddings}
            missing = {key: row for row, key in reversed([*enumerate(keys)]) if key not in found}
            for rows in batched(sorted(missing.values()), batch_size):
                with exact_inference(self._placed.device):
                    for row, embedding in zip(rows, compute(rows).float().cpu(), strict=True):
                        found[keys[row]] = embedding / embedding.norm()
            for key in keys:
                self._embeddings[key] = found[key]
                self._embeddings.move_to_end(key)
            while len(self._embeddings) > CACHED_EMBEDDINGS:
                self._embeddings.popitem(last=False)
        return [found[key] for key in keys]


def load_clip(reward: ClipReward) -> ClipModel:
    """Load a reward's model, frozen, once for each network, digest, device and precision; or InputError."""
    return _load_clip(reward.clip_weights(), reward.architecture(), reward.runs_on)


@load_once
def _load_clip(weights: Weights, architecture: ClipArchitecture, placed: Placed) -> ClipModel:
    network = build_network(architecture)
    tensors = {
        name.removeprefix("module."): tensor
        for name, tensor in load_state_dict(weights).items()
        if name not in _BESIDE_THE_WEIGHTS
    }
    load_weights(weights, network, tensors, f"open_clip's {architecture.name}")
    return ClipModel(architecture, network, placed)


def build_network(architecture: ClipArchitecture) -> nn.Module:
    """Build open_clip's network without weights (on the meta device), frozen, in evaluation mode."""
    import open_clip

    # On the meta device, so that the initialisation draws no random numbers.
    with torch.device("meta"):
        network: nn.Module = open_clip.CLIP(**architecture.network)
    for name, buffer in list(network.named_buffers()):
        if name not in network.state_dict():
            assert name == "attn_mask", f"{name} comes from no weight file"
            causal = torch.full(tuple(buffer.shape), float("-inf")).triu(1)
            network.register_buffer(name, causal, persistent=False)
    return network.requires_grad_(False).eval()


@dataclass(frozen=True, config=STRICT)
class ClipScoreReward(ClipReward, ComparingReward):
    """Value clip(scale * max(cos, 0), 0, 1); raw the cosine in [-1, 1].

    Cosines of images with their own captions are around 0.2 to 0.35, those of two images much higher.

    Attributes:
        against: prompt: its text; target, source: an image, in any size.
        scale: factor of the cosine; the paper's is 2.5.
        long_prompts: CLIP reads 77 tokens, some 50 words. ``cut`` scores against the beginning of a longer prompt and
            logs a warning; ``refuse`` ends with an error that names the sample.
    """

    against: Literal["prompt", "target", "source"] = "prompt"
    scale: Positive = 1.0
    long_prompts: LongPrompts = "cut"

    name: ClassVar[str] = "clip_score"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_reference()

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """Score each sample; the first call of a process loads the weights."""
        model = load_clip(self)
        images, references = list(batch.rgb_images(self.name)), self._references(model, batch)
        embeddings = model.image_embeddings([images[row] for row in references], self.batch_size)
        scores = [NOT_APPLICABLE] * len(batch)
        for (row, reference), embedding in zip(references.items(), embeddings, strict=True):
            with exact_inference("cpu"):
                cosine = (embedding @ reference).item()
            scores[row] = Score.of(clamp_unit(self.scale * cosine), cosine, NO_DIRECTION)
        return scores

    def _references(self, model: ClipModel, batch: ScoringBatch) -> Mapping[int, Tensor]:
        """Return the embeddings of what the samples are compared with, by row; of those that have it."""
        if self.against == "prompt":
            check_prompts(self.name, batch, model.count_tokens, model.architecture.context_length, self.long_prompts)
            return dict(enumerate(model.text_embeddings(batch.prompts, self.batch_size)))
        compared = zip(batch.sample_ids, self.reference_images(batch), strict=True)
        images = {
            row: to_rgb(image, self.reference_place(sample_id))
            for row, (sample_id, image) in enumerate(compared)
            if image is not None
        }
        return dict(zip(images, model.image_embeddings([*images.values()], self.batch_size), strict=True))


FULL_SCALE = 10.0
_PLACE = "rewards.aesthetic.head"
_FILE = "sac+logos+ava1-l14-linearMSE.pth"

HEAD = Published(
    "Christoph Schuhmann for LAION (Apache-2.0)",
    _FILE,
    f"https://github.com/christophschuhmann/improved-aesthetic-predictor/raw/main/{_FILE.replace('+', '%2B')}",
    sha256="21dd590f3ccdc646",
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

    head: Annotated[str | None, Uses.PLACE] = None
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
        if problems or str(self.head).startswith(HUB_PREFIX):
            return problems
        return problems_of(lambda: load_head(self._head(), self.architecture().width))

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """Score each sample; the first call of a process loads the weights."""
        head = load_head(self._head(), self.architecture().width)
        model = load_clip(self)
        embeddings = model.image_embeddings(list(batch.rgb_images(self.name)), self.batch_size)
        ratings = [aesthetic_rating(head, embedding) for embedding in embeddings]
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
    """Load the head for embeddings of that width, or raise InputError."""
    tensors, remedy = load_state_dict(weights), f"Set {HEAD.file}."
    name, outputs = LAYERS[0]
    first = tensors.get(f"{name}.weight")
    if first is not None and first.ndim == 2 and len(first) == outputs and first.shape[1] != width:
        hint = (
            f"This head needs embeddings of {first.shape[1]} numbers, this CLIP has {width}. Set `model` "
            "to the network that the head was fitted to (ViT-L-14-quickgelu for the published one)."
        )
        raise weights.error(hint)
    layers, inputs = [], width
    for layer, outputs in LAYERS:
        matrix = find_tensor(weights, tensors, f"{layer}.weight", (outputs, inputs), remedy)
        offset = find_tensor(weights, tensors, f"{layer}.bias", (outputs,), remedy)
        layers.append((matrix.float(), offset.float()))
        inputs = outputs
    return tuple(layers)
