"""Which image people would prefer for a prompt: PickScore and HPSv2, built from checked weights.

PickScore: Kirstain, Polyak, Singer, Matiana, Penna and Levy, 2023, "Pick-a-Pic: An Open Dataset of User Preferences for
Text-to-Image Generation" (arXiv:2305.01569), equation 1. HPSv2: Wu, Hao, Sun, Chen, Zhu, Zhao and Li, 2023, "Human
Preference Score v2" (arXiv:2306.09341).

Both are a CLIP ViT-H/14 fine-tuned on people's choices between two images; the measure is the cosine of prompt and
image, PickScore's times CLIP's learned scale (near 100). Differences count, not levels: two images with the same
prompt compare, two prompts do not.

The constructors of the imscore package download the base CLIP before they load the model, and accept weights with
missing tensors. Here its classes get their parts, and compute the scores.
"""

import abc
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

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
from grpo_core.rewards.embedding.clip_model import build_network
from grpo_core.rewards.model_reward import ModelReward, Sha256, exact_inference, load_once
from grpo_core.rewards.reward import STRICT, Positive, Score, ScoringBatch, clamp_unit
from grpo_core.rewards.tensors import to_tensor
from grpo_core.rewards.weights.files import PublishedWeights, WeightFile, WeightSource, load_state_dict, load_weights
from grpo_core.rewards.weights.models import ModelSource

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Of OpenAI's CLIP, which both models were prepared with."""

PICKSCORE = "yuvalkirstain/PickScore_v1"
HPSV2_NETWORK, HPSV2_RELEASE = "ViT-H-14", "laion2b_s32b_b79k"
HPSV2 = PublishedWeights(
    "HPS_v2.1_compressed.pt",
    "the authors of HPSv2 (Apache-2.0)",
    "https://huggingface.co/xswu/HPSv2",
    "hf://xswu/HPSv2/HPS_v2.1_compressed.pt",
    digest="",
    note="as .safetensors: hf://RE-N-Y/hpsv21/model.safetensors",
    licence="Apache-2.0",
)


class PreferenceScorer:
    """A model of the package on a device, with its tokenizer.

    Attributes:
        count_tokens: of a prompt, including the start and end marks.
        context_length: how many tokens of a prompt it reads, including these marks.
    """

    def __init__(self, scorer: nn.Module, count_tokens: Callable[[str], int], context_length: int, device: str) -> None:
        self._scorer, self._device = scorer.to(device), device
        self.count_tokens, self.context_length = count_tokens, context_length

    def score(self, pixels: Float32[Tensor, "1 3 height width"], prompt: str) -> float:
        """Return the model's measure of one image (in [0, 1]) with its prompt."""
        with exact_inference(self._device):
            found: Tensor = self._scorer.score(pixels.to(self._device), [prompt])  # type: ignore[operator]
        return found.item()


@dataclass(frozen=True, config=STRICT)
class PreferenceReward(ModelReward):
    """Value clip(score / full_scale, 0, 1); raw the model's score.

    Attributes:
        full_scale: score at which the value saturates.
        long_prompts: ``cut`` or ``refuse`` a prompt of more than 77 tokens.
    """

    full_scale: Positive = 1.0
    long_prompts: LongPrompts = "cut"

    version: ClassVar[str] = "1+imscore-0.0.11"
    """The package's release is pinned by the project, and belongs to the scores."""

    @abc.abstractmethod
    def load(self) -> PreferenceScorer:
        """Load the model, frozen, in fp32, once per process.

        Raises:
            InputError: the weights are missing or of another model.
        """

    def preflight(self) -> Sequence[str]:
        """List a missing package, missing or wrong weights, a missing device."""
        return [*super().preflight(), *(str(missing) for missing in self._find_missing_package())]

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """Score each sample; the first call of a process loads the weights."""
        for missing in self._find_missing_package():
            raise missing
        scorer = self.load()
        check_prompts(self.name, batch, scorer.count_tokens, scorer.context_length, self.long_prompts)
        # One at a time: a matrix product's last bits depend on the batch that it runs in, and a score must not.
        pairs = zip(batch.rgb_images(self.name), batch.prompts, strict=True)
        raws = [scorer.score(to_tensor(image), prompt) for image, prompt in pairs]
        return [Score.of(clamp_unit(raw / self.full_scale), raw) for raw in raws]

    def _find_missing_package(self) -> list[InputError]:
        if importlib.util.find_spec("imscore") is not None:
            return []
        hint = "It needs imscore, the extra preference (pip install imscore==0.0.11); or use another reward."
        return [InputError("rewards", self.name, hint)]


@dataclass(frozen=True, config=STRICT)
class PickScoreReward(PreferenceReward):
    """Value clip(score / full_scale, 0, 1); raw PickScore, about 17 to 24.

    Attributes:
        model: folder of a CLIPModel and its tokenizer as transformers saves them, or ``owner/repo[@revision]`` on the
            Hub (``yuvalkirstain/PickScore_v1``).
        model_sha256: digest over the model's files that it must have, complete or its first 8 digits or more.
        full_scale: score at which the value saturates; 26 is what Flow-GRPO (arXiv:2505.05470) divides by.
    """

    model: str | None = None
    model_sha256: Sha256 | None = None
    full_scale: Positive = 26.0

    name: ClassVar[str] = "pickscore"
    free_settings: ClassVar[frozenset[str]] = frozenset({"device", "model", "model_sha256"})

    def weight_sources(self) -> Mapping[str, ModelSource]:
        """Return the model, over its files."""
        return {"model": self._source()}

    def load(self) -> PreferenceScorer:
        """Load the model."""
        source = self._source()
        return load_pickscore(source, source.digest(), self.device)

    def _source(self) -> ModelSource:
        return ModelSource("rewards.pickscore.model", self.model, self.model_sha256, PICKSCORE, is_example=False)


@load_once
def load_pickscore(source: ModelSource, digest: str, device: str) -> PreferenceScorer:
    """Build PickScore; `digest` is that of the source's files, so that changed files are loaded again.

    Raises:
        InputError: the folder has other content than a CLIPModel and its tokenizer.
    """
    from imscore.pickscore.model import PickScorer
    from torchvision import transforms
    from transformers import CLIPModel

    model = source.load(CLIPModel)
    tokenizer = source.load_tokenizer()
    side: int = model.config.vision_config.image_size  # type: ignore[union-attr, assignment]
    scorer = without_constructor(
        PickScorer,
        model=_Features(model),
        processor=tokenizer,
        resize=transforms.Resize(side, interpolation=transforms.InterpolationMode.BICUBIC),
        crop=transforms.CenterCrop(side),
        normalize=transforms.Normalize(mean=MEAN, std=STD),
    )
    length: int = model.config.text_config.max_position_embeddings  # type: ignore[union-attr, assignment]
    return PreferenceScorer(scorer, lambda prompt: len(tokenizer(prompt).input_ids), length, device)


class _Features(nn.Module):
    """A CLIPModel whose features are tensors, as the package expects; transformers wraps them since its version 5."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model: Any = model
        self.logit_scale = model.logit_scale

    def get_image_features(self, **inputs: Tensor) -> Tensor:
        features: Tensor = self._model.get_image_features(**inputs).pooler_output
        return features

    def get_text_features(self, **inputs: Tensor) -> Tensor:
        features: Tensor = self._model.get_text_features(**inputs).pooler_output
        return features


@dataclass(frozen=True, config=STRICT)
class HpsV2Reward(PreferenceReward):
    """Value clip(score / full_scale, 0, 1); raw the score, a cosine, about 0.2 to 0.35.

    Attributes:
        weights: HPSv2's state dict: its path, or ``hf://owner/repo/file``; as its makers publish it, or imscore.
        weights_sha256: digest that the file must have, complete or its first 8 digits or more.
        model: the CLIP that it was fine-tuned from: ``ViT-H-14``, or the path of an open_clip_config.json.
    """

    weights: str | None = None
    weights_sha256: Sha256 | None = None
    model: str = HPSV2_NETWORK
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

    def weight_sources(self) -> Mapping[str, WeightSource]:
        """Return the model's."""
        return {"model": self._source()}

    def preflight(self) -> Sequence[str]:
        """List a missing package, missing or wrong weights, an unknown network, a missing device."""
        problems = list(super().preflight())
        try:
            self._architecture()
        except InputError as error:
            problems.append(str(error))
        return problems

    def load(self) -> PreferenceScorer:
        """Load the model."""
        return load_hpsv2(self._architecture(), self._source().resolve(), self.device)

    def _architecture(self) -> ClipArchitecture:
        release = None if is_config_file(self.model) else HPSV2_RELEASE
        return find_architecture("rewards.hpsv2.model", self.model, release)

    def _source(self) -> WeightSource:
        return WeightSource("rewards.hpsv2.weights", self.weights, self.weights_sha256, HPSV2)


@load_once
def load_hpsv2(architecture: ClipArchitecture, weights: WeightFile, device: str) -> PreferenceScorer:
    """Build HPSv2 from the CLIP that it was fine-tuned from.

    Args:
        weights: with open_clip's names, as its authors publish them, or these after ``model.``, as the package does.

    Raises:
        InputError: the file cannot be read, or is of another network.
    """
    import open_clip
    from imscore.hps.model import HPSv2, ResizeMaxSize
    from torchvision import transforms

    network = build_network(architecture)
    tensors = {
        name.removeprefix("module.").removeprefix("model."): tensor for name, tensor in load_state_dict(weights).items()
    }
    load_weights(weights, network, tensors, f"HPSv2 on open_clip's {architecture.name}")
    # Without it open_clip answers with a tuple, which the package does not expect.
    network.output_dict = True  # type: ignore[assignment]
    length, side = architecture.context_length, int(architecture.network["vision_cfg"]["image_size"])
    tokenizer = open_clip.SimpleTokenizer(context_length=length)
    scorer = without_constructor(
        HPSv2,
        model=network,
        tokenizer=tokenizer,
        resize=_Square(ResizeMaxSize(side), side),
        normalize=transforms.Normalize(mean=MEAN, std=STD),
    )
    return PreferenceScorer(scorer, lambda prompt: len(tokenizer.encode(prompt)) + 2, length, device)


class _Square(nn.Module):
    """The package's resizing, which forgets to pad an image whose long side has the right length already."""

    def __init__(self, resize: nn.Module, side: int) -> None:
        super().__init__()
        self._resize, self._side = resize, side

    def forward(self, pixels: Tensor) -> Tensor:
        resized: Tensor = self._resize(pixels)
        height, width = self._side - resized.shape[-2], self._side - resized.shape[-1]
        margins = (width // 2, width - width // 2, height // 2, height - height // 2)
        return nn.functional.pad(resized, margins)


def without_constructor(kind: type[nn.Module], **parts: object) -> nn.Module:
    """Make an instance of the package's class with these attributes, without running its constructor."""
    scorer: nn.Module = object.__new__(kind)
    nn.Module.__init__(scorer)
    for name, part in parts.items():
        setattr(scorer, name, part)
    return scorer.requires_grad_(False).eval()
