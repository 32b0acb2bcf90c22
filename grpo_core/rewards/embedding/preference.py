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

from jaxtyping import Float32
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
    Sha256,
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
    """A model's measure of one image [1, 3, height, width], in [0, 1] on the CPU, with its prompt: one number.

    It reads `context_length` tokens of a prompt, start and end marks included.
    """

    measure: Callable[[Tensor, str], Tensor]
    count_tokens: Callable[[str], int]
    context_length: int
    device: str

    def score(self, pixels: Float32[Tensor, "1 3 height width"], prompt: str) -> float:
        """Return the model's measure of one image (in [0, 1]) with its prompt."""
        with exact_inference(self.device):
            return self.measure(pixels.to(self.device), prompt).item()


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
        """Load the model, frozen, in fp32, once per process; InputError for missing or other weights."""

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """Score each sample; the first call of a process loads the weights."""
        scorer = self.load()
        check_prompts(self.name, batch, scorer.count_tokens, scorer.context_length, self.long_prompts)
        # One at a time: a matrix product's last bits depend on the batch that it runs in, and a score must not.
        pairs = zip(batch.rgb_images(self.name), batch.prompts, strict=True)
        raws = [scorer.score(to_tensor(image), prompt) for image, prompt in pairs]
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
        return load_pickscore(self.weight_sources()["model"], self.device)


@load_once
def load_pickscore(weights: Weights, device: str) -> PreferenceScorer:
    """Build PickScore; InputError for a folder with other content than a CLIPModel and its tokenizer."""
    from torchvision import transforms
    from transformers import CLIPModel

    model, tokenizer = load_model(weights, CLIPModel).to(device), load_tokenizer(weights)
    side: int = model.config.vision_config.image_size  # type: ignore[union-attr, assignment]
    length: int = model.config.text_config.max_position_embeddings  # type: ignore[union-attr, assignment]
    prepare = transforms.Compose(
        [
            transforms.Resize(side, interpolation=transforms.InterpolationMode.BICUBIC),
            transforms.CenterCrop(side),
            transforms.Normalize(mean=MEAN, std=STD),
        ]
    )

    def measure(pixels: Tensor, prompt: str) -> Tensor:
        tokens = tokenizer(text=[prompt], truncation=True, max_length=length, return_tensors="pt").to(device)
        image = model.get_image_features(pixel_values=prepare(pixels)).pooler_output  # type: ignore[operator]
        text = model.get_text_features(**tokens).pooler_output  # type: ignore[operator]
        cosine: Tensor = (text / text.norm(dim=-1, keepdim=True)) @ (image / image.norm(dim=-1, keepdim=True)).T
        return model.logit_scale.exp() * cosine  # type: ignore[operator]

    return PreferenceScorer(measure, lambda prompt: len(tokenizer(prompt).input_ids), length, device)


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
        return load_hpsv2(self.weight_sources()["model"], self._architecture(), self.device)

    def _architecture(self) -> ClipArchitecture:
        release = None if is_config_file(self.model) else HPSV2_RELEASE
        return find_architecture("rewards.hpsv2.model", self.model, release)


@load_once
def load_hpsv2(weights: Weights, architecture: ClipArchitecture, device: str) -> PreferenceScorer:
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
    network.to(device)
    length, side = architecture.context_length, int(architecture.network["vision_cfg"]["image_size"])
    tokenizer, normalize = open_clip.SimpleTokenizer(context_length=length), transforms.Normalize(mean=MEAN, std=STD)

    def measure(pixels: Tensor, prompt: str) -> Tensor:
        image = network.encode_image(normalize(fit_square(pixels, side)), normalize=True)  # type: ignore[operator]
        text = network.encode_text(tokenizer([prompt]).to(device), normalize=True)  # type: ignore[operator]
        cosine: Tensor = image @ text.T
        return cosine

    return PreferenceScorer(measure, lambda prompt: len(tokenizer.encode(prompt)) + 2, length, device)


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
