"""Which image people would prefer for a prompt: PickScore and HPSv2, built from checked weights.

PickScore: Kirstain, Polyak, Singer, Matiana, Penna and Levy, 2023, "Pick-a-Pic: An Open Dataset of User Preferences for
Text-to-Image Generation" (arXiv:2305.01569), equation 1. HPSv2: Wu, Hao, Sun, Chen, Zhu, Zhao and Li, 2023, "Human
Preference Score v2" (arXiv:2306.09341).

Both are a CLIP ViT-H/14 fine-tuned on people's choices between two images; the measure is the cosine of prompt and
image, PickScore's times CLIP's learned scale (near 100). Scores compare images of one prompt, and are computed as the
imscore package does (0.0.11).
"""

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass as plain_dataclass
from typing import Annotated, ClassVar

import torch
from jaxtyping import Float32
from PIL import Image
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from grpo_core.errors import InputError
from grpo_core.rewards.embedding.clip import (
    ClipArchitecture,
    LongPrompts,
    check_prompts,
    find_architecture,
    is_config_file,
)
from grpo_core.rewards.embedding.clip_rewards import build_network
from grpo_core.rewards.model_reward import (
    ModelReward,
    Placed,
    Sha256,
    batched,
    exact_inference,
    load_model,
    load_once,
    load_state_dict,
    load_tokenizer,
    load_weights,
)
from grpo_core.rewards.reward import STRICT, Positive, problems_of
from grpo_core.rewards.scoring_batch import Score, ScoringBatch, clamp_unit
from grpo_core.rewards.similarity.tensors import to_tensor
from grpo_core.rewards.weights import Published, Weights
from grpo_core.uses import Uses

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Of OpenAI's CLIP, which both models were prepared with."""

PICKSCORE = Published("Yuval Kirstain", hub="yuvalkirstain/PickScore_v1")
HPSV2_NETWORK, HPSV2_RELEASE = "ViT-H-14", "laion2b_s32b_b79k"
HPSV2 = Published(
    "the authors of HPSv2 (Apache-2.0)",
    "HPS_v2.1_compressed.pt",
    "https://huggingface.co/xswu/HPSv2",
    "hf://xswu/HPSv2/HPS_v2.1_compressed.pt",
    note="as .safetensors: hf://RE-N-Y/hpsv21/model.safetensors",
)


@plain_dataclass(frozen=True)
class PreferenceScorer:
    """A model's measure of images with their prompts, a number each.

    Attributes:
        prepare: an image [1, 3, height, width] in [0, 1], of any size, as the network reads it.
        images, texts: embeddings [N, width] of prepared images, and of texts; of length 1, in fp32.
        scale: of their cosine.
        context_length: tokens that it reads of a prompt, start and end marks included.
    """

    prepare: Callable[[Tensor], Tensor]
    images: Callable[[Tensor], Tensor]
    texts: Callable[[list[str]], Tensor]
    scale: Tensor | float
    count_tokens: Callable[[str], int]
    context_length: int
    placed: Placed

    def scores(self, images: Sequence[Image.Image], prompts: Sequence[str]) -> list[float]:
        """Return the measures of RGB images with their prompts, computed in one pass."""
        texts = list(dict.fromkeys(prompts))
        with exact_inference(self.placed.device):
            prepared = [self.prepare(to_tensor(image).to(self.placed.device)) for image in images]
            seen, read = self.images(torch.cat(prepared).to(self.placed.dtype)), self.texts(texts)
            cosines = read[[texts.index(prompt) for prompt in prompts]] @ seen.T
            found: list[float] = (self.scale * cosines).diagonal().tolist()
        return found


@dataclass(frozen=True, config=STRICT)
class PreferenceReward(ModelReward):
    """Value clip(score / full_scale, 0, 1); raw the model's score.

    Attributes:
        full_scale: score at which the value saturates.
        long_prompts: ``cut`` or ``refuse`` a prompt of more than 77 tokens.
    """

    full_scale: Positive = 1.0
    long_prompts: LongPrompts = "cut"

    version: ClassVar[str] = "1"

    @abc.abstractmethod
    def load(self) -> PreferenceScorer:
        """Load the model, frozen, once per process; InputError for missing or other weights."""

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """Score each sample; the first call of a process loads the weights."""
        scorer = self.load()
        check_prompts(self.name, batch, scorer.count_tokens, scorer.context_length, self.long_prompts)
        pairs = zip(batch.rgb_images(self.name), batch.prompts, strict=True)
        raws = [raw for pass_ in batched(pairs, self.batch_size) for raw in scorer.scores(*zip(*pass_, strict=True))]
        return [Score.of(clamp_unit(raw / self.full_scale), raw) for raw in raws]


@dataclass(frozen=True, config=STRICT)
class PickScoreReward(PreferenceReward):
    """Value clip(score / full_scale, 0, 1); raw PickScore, about 17 to 24.

    Attributes:
        model: folder of a CLIPModel and its tokenizer as transformers saves them, or ``owner/repo[@revision]`` on the
            Hub (``yuvalkirstain/PickScore_v1``).
        model_sha256: digest over the model's files that it must have, complete or its first 8 digits or more.
        full_scale: score at which the value saturates; 26 is what Flow-GRPO (arXiv:2505.05470) divides by.
    """

    model: Annotated[str | None, Uses.PLACE] = None
    model_sha256: Sha256 | None = None
    full_scale: Positive = 26.0

    name: ClassVar[str] = "pickscore"
    free_settings: ClassVar[frozenset[str]] = frozenset({"device", "model", "model_sha256"})

    def weight_sources(self) -> Mapping[str, Weights]:
        """Return the model, over its files."""
        return {"model": Weights("rewards.pickscore.model", self.model, self.model_sha256, PICKSCORE)}

    def load(self) -> PreferenceScorer:
        """Load the model."""
        return load_pickscore(self.weight_sources()["model"], self.runs_on)


@load_once
def load_pickscore(weights: Weights, placed: Placed) -> PreferenceScorer:
    """Build PickScore; InputError for a folder with other content than a CLIPModel and its tokenizer."""
    from torchvision import transforms
    from transformers import CLIPModel

    model, tokenizer = load_model(weights, CLIPModel), load_tokenizer(weights)
    # 16 bits would make it 99 for 100.
    scale: Tensor = model.logit_scale.exp().to(placed.device)  # type: ignore[operator]
    model = model.to(placed.device, placed.dtype)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    side: int = model.config.vision_config.image_size  # type: ignore[union-attr, assignment]
    length: int = model.config.text_config.max_position_embeddings  # type: ignore[union-attr, assignment]
    prepare = transforms.Compose(
        [
            transforms.Resize(side, interpolation=transforms.InterpolationMode.BICUBIC),
            transforms.CenterCrop(side),
            transforms.Normalize(mean=MEAN, std=STD),
        ]
    )

    def unit(embeddings: Tensor) -> Tensor:
        length: Tensor = embeddings.float().norm(dim=-1, keepdim=True)
        return embeddings.float() / length

    def images(prepared: Tensor) -> Tensor:
        return unit(model.get_image_features(pixel_values=prepared).pooler_output)  # type: ignore[operator]

    def texts(prompts: list[str]) -> Tensor:
        tokens = tokenizer(
            text=prompts, truncation=True, max_length=length, padding=True, padding_side="right", return_tensors="pt"
        )
        read: Tensor = model.get_text_features(**tokens.to(placed.device)).pooler_output  # type: ignore[operator]
        return unit(read)

    def count_tokens(prompt: str) -> int:
        return len(tokenizer(prompt).input_ids)

    return PreferenceScorer(prepare, images, texts, scale, count_tokens, length, placed)


@dataclass(frozen=True, config=STRICT)
class HpsV2Reward(PreferenceReward):
    """Value clip(score / full_scale, 0, 1); raw the score, a cosine, about 0.2 to 0.35.

    Attributes:
        weights: HPSv2's state dict: its path, or ``hf://owner/repo/file``; as its makers publish it, or for imscore.
        weights_sha256: digest that the file must have, complete or its first 8 digits or more.
        model: the CLIP that it was fine-tuned from: ``ViT-H-14``, or the path of an open_clip_config.json.
    """

    weights: Annotated[str | None, Uses.PLACE] = None
    weights_sha256: Sha256 | None = None
    model: Annotated[str, Uses.PLACE] = HPSV2_NETWORK
    full_scale: Positive = 0.5

    name: ClassVar[str] = "hpsv2"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model != HPSV2_NETWORK and not is_config_file(self.model):
            hint = (
                f"HPSv2 is fine-tuned from {HPSV2_NETWORK}: leave it out, or set the path of an open_clip_config.json."
            )
            raise InputError("rewards.hpsv2.model", self.model, hint)

    def settings(self) -> Mapping[str, object]:
        """Return network, scale and `long_prompts`."""
        model = self._architecture().name if is_config_file(self.model) else self.model
        return {**super().settings(), "model": model}

    def weight_sources(self) -> Mapping[str, Weights]:
        """Return the model's."""
        return {"model": Weights("rewards.hpsv2.weights", self.weights, self.weights_sha256, HPSV2)}

    def preflight(self) -> Sequence[str]:
        """List missing or wrong weights, a missing device, an unknown network."""
        return [*super().preflight(), *problems_of(self._architecture)]

    def load(self) -> PreferenceScorer:
        """Load the model."""
        return load_hpsv2(self.weight_sources()["model"], self._architecture(), self.runs_on)

    def _architecture(self) -> ClipArchitecture:
        release = None if is_config_file(self.model) else HPSV2_RELEASE
        return find_architecture("rewards.hpsv2.model", self.model, release)


@load_once
def load_hpsv2(weights: Weights, architecture: ClipArchitecture, placed: Placed) -> PreferenceScorer:
    """Build HPSv2 from the CLIP that it was fine-tuned from, or raise InputError.

    The weights have open_clip's names, or, as imscore has them, these after ``model.``.
    """
    import open_clip
    from torchvision import transforms

    network = build_network(architecture)
    tensors = {
        name.removeprefix("module.").removeprefix("model."): tensor for name, tensor in load_state_dict(weights).items()
    }
    load_weights(weights, network, tensors, f"HPSv2 on open_clip's {architecture.name}")
    network.to(placed.device, placed.dtype)
    length, side = architecture.context_length, int(architecture.network["vision_cfg"]["image_size"])
    tokenizer, normalize = open_clip.SimpleTokenizer(context_length=length), transforms.Normalize(mean=MEAN, std=STD)

    def prepare(pixels: Tensor) -> Tensor:
        fitted: Tensor = normalize(fit_square(pixels, side))
        return fitted

    def unit(embeddings: Tensor) -> Tensor:
        return nn.functional.normalize(embeddings.float(), dim=-1)

    def images(prepared: Tensor) -> Tensor:
        return unit(network.encode_image(prepared))  # type: ignore[operator]

    def texts(prompts: list[str]) -> Tensor:
        return unit(network.encode_text(tokenizer(prompts).to(placed.device)))  # type: ignore[operator]

    def count_tokens(prompt: str) -> int:
        return len(tokenizer.encode(prompt)) + 2

    return PreferenceScorer(prepare, images, texts, 1.0, count_tokens, length, placed)


def fit_square(pixels: Float32[Tensor, "1 3 height width"], side: int) -> Float32[Tensor, "1 3 side side"]:
    """Scale an image until its long side has this length, and pad the other with black on both sides."""
    from torchvision.transforms import InterpolationMode, functional

    height, width = pixels.shape[-2:]
    scale = side / max(height, width)
    if scale != 1.0:
        height, width = round(height * scale), round(width * scale)
        pixels = functional.resize(pixels, [height, width], InterpolationMode.BICUBIC)
    down, across = side - height, side - width
    return nn.functional.pad(pixels, (across // 2, across - across // 2, down // 2, down - down // 2))
