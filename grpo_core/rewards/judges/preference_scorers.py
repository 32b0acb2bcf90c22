"""The preference models of the imscore package, built from local weights that were checked.

The package's own constructors fetch the CLIP that a model was fine-tuned from before they load the model itself, and
accept weights with missing tensors. Here its classes are given their parts, and compute the scores.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

from jaxtyping import Float32
from torch import Tensor, nn

from grpo_core.rewards.devices import exact_inference
from grpo_core.rewards.embedding.clip_architecture import ClipArchitecture
from grpo_core.rewards.embedding.clip_model import build_network
from grpo_core.rewards.weights import WeightFile, load_pretrained, load_state_dict, load_tokenizer, load_weights

_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Of OpenAI's CLIP, which both models were prepared with."""

_LOADING = threading.Lock()


class PreferenceScorer:
    """One model of the package on one device, with the tokenizer that cuts its prompts up.

    Attributes:
        count_tokens: how many tokens a prompt takes, its two end marks among them.
        context_length: how many tokens of a prompt it reads, the end marks among them.
    """

    def __init__(self, scorer: nn.Module, count_tokens: Callable[[str], int], context_length: int, device: str) -> None:
        self._scorer, self._device = scorer.to(device), device
        self.count_tokens, self.context_length = count_tokens, context_length

    def score(self, pixels: Float32[Tensor, "1 3 height width"], prompt: str) -> float:
        """The model's own measure of one image (in [0, 1]) with its prompt."""
        with exact_inference(self._device):
            found: Tensor = self._scorer.score(pixels.to(self._device), [prompt])  # type: ignore[operator]
        return found.item()


def load_pickscore(place: str, folder: str, sha256: str, device: str) -> PreferenceScorer:
    """PickScore, frozen, in fp32; built once a process for each digest and device.

    Args:
        place: of the setting that holds the model, for messages.
        folder: a CLIPModel and its tokenizer as transformers saves them.
        sha256: of its files, so that changed files are loaded anew.
        device: where it goes.

    Raises:
        InputError: the folder holds something else.
    """
    with _LOADING:
        return _load_pickscore(place, folder, sha256, device)


@functools.lru_cache(maxsize=2)
def _load_pickscore(place: str, folder: str, sha256: str, device: str) -> PreferenceScorer:
    from imscore.pickscore.model import PickScorer
    from torchvision import transforms
    from transformers import CLIPModel

    model = load_pretrained(place, folder, CLIPModel)
    tokenizer = load_tokenizer(place, folder)
    side: int = model.config.vision_config.image_size  # type: ignore[union-attr, assignment]
    scorer = _without_constructor(
        PickScorer,
        model=_Features(model),
        processor=tokenizer,
        resize=transforms.Resize(side, interpolation=transforms.InterpolationMode.BICUBIC),
        crop=transforms.CenterCrop(side),
        normalize=transforms.Normalize(mean=_MEAN, std=_STD),
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


def load_hpsv2(place: str, architecture: ClipArchitecture, weights: WeightFile, device: str) -> PreferenceScorer:
    """HPSv2, frozen, in fp32; built once a process for each network, digest and device.

    Args:
        place: of the setting that holds the weights, for messages.
        architecture: the CLIP that it was fine-tuned from.
        weights: with open_clip's names, as its makers publish them, or these after ``model.``, as the package does.
        device: where it goes.

    Raises:
        InputError: the file cannot be read, or holds another network.
    """
    key = (architecture.name, weights.sha256, device)
    with _LOADING:
        if key not in _HPSV2:
            _HPSV2[key] = _build_hpsv2(place, architecture, weights, device)
        return _HPSV2[key]


_HPSV2: dict[tuple[str, str, str], PreferenceScorer] = {}


def _build_hpsv2(place: str, architecture: ClipArchitecture, weights: WeightFile, device: str) -> PreferenceScorer:
    import open_clip
    from imscore.hps.model import HPSv2, ResizeMaxSize
    from torchvision import transforms

    network = build_network(architecture)
    tensors = {
        name.removeprefix("module.").removeprefix("model."): tensor
        for name, tensor in load_state_dict(place, weights.path).items()
    }
    load_weights(place, weights.path, network, tensors, f"HPSv2 on open_clip's {architecture.name}")
    # Without it open_clip answers with a tuple, which the package does not expect.
    network.output_dict = True  # type: ignore[assignment]
    tokenizer = open_clip.SimpleTokenizer(context_length=architecture.context_length)
    side = int(architecture.network["vision_cfg"]["image_size"])
    scorer = _without_constructor(
        HPSv2,
        model=network,
        tokenizer=tokenizer,
        resize=_Square(ResizeMaxSize(side), side),
        normalize=transforms.Normalize(mean=_MEAN, std=_STD),
    )
    length = architecture.context_length
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


def _without_constructor(kind: type[nn.Module], **parts: object) -> nn.Module:
    """An instance of the package's class with these attributes, its constructor not run."""
    scorer: nn.Module = object.__new__(kind)
    nn.Module.__init__(scorer)
    for name, part in parts.items():
        setattr(scorer, name, part)
    return scorer.requires_grad_(False).eval()
