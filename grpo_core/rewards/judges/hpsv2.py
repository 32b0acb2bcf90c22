"""HPSv2: which image people would prefer for a prompt.

Wu, Hao, Sun, Chen, Zhu, Zhao and Li, 2023, "Human Preference Score v2" (arXiv:2306.09341).
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from grpo_core.errors import InputError
from grpo_core.rewards.embedding.clip import ClipArchitecture, LongPrompts, find_architecture, is_config_file
from grpo_core.rewards.embedding.clip_model import build_network
from grpo_core.rewards.judges.preference import MEAN, STD, PreferenceReward, PreferenceScorer, without_constructor
from grpo_core.rewards.model_reward import Device, Sha256, load_once
from grpo_core.rewards.reward import STRICT, Positive
from grpo_core.rewards.weights.files import PublishedWeights, WeightFile, WeightSource
from grpo_core.rewards.weights.tensors import load_state_dict, load_weights

HPSV2_NETWORK, HPSV2_RELEASE = "ViT-H-14", "laion2b_s32b_b79k"
HPSV2 = PublishedWeights(
    "HPS_v2.1_compressed.pt",
    "the authors of HPSv2 (Apache-2.0)",
    "https://huggingface.co/xswu/HPSv2",
    "hf://xswu/HPSv2/HPS_v2.1_compressed.pt",
    digest="",
    note="as .safetensors: hf://RE-N-Y/hpsv21/model.safetensors",
)


@dataclass(frozen=True, config=STRICT)
class HpsV2Reward(PreferenceReward):
    """Value clip(score / full_scale, 0, 1); raw the score, a cosine, about 0.2 to 0.35.

    Attributes:
        weights: HPSv2's state dict: its path, or ``hf://owner/repo/file``; as its makers publish it, or imscore.
        weights_sha256: digest that the file must have, complete or its first 8 digits or more.
        model: the CLIP that it was fine-tuned from: ``ViT-H-14``, or the path of an open_clip_config.json.
        full_scale: score at which the value saturates.
        long_prompts: ``cut`` or ``refuse`` a prompt of more than 77 tokens.
        device: where to compute: ``cpu``, ``cuda`` or ``cuda:N``.
    """

    weights: str | None = None
    weights_sha256: Sha256 | None = None
    model: str = HPSV2_NETWORK
    full_scale: Positive = 0.5
    long_prompts: LongPrompts = "cut"
    device: Device = "cpu"

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
        """Load the model.

        Raises:
            InputError: the weights are missing or of another model.
        """
        return load_hpsv2(self._architecture(), self._source().resolve(), self.device)

    def _architecture(self) -> ClipArchitecture:
        release = None if is_config_file(self.model) else HPSV2_RELEASE
        return find_architecture("rewards.hpsv2.model", self.model, release)

    def _source(self) -> WeightSource:
        return WeightSource("rewards.hpsv2.weights", self.weights, self.weights_sha256, HPSV2)


@load_once
def load_hpsv2(architecture: ClipArchitecture, weights: WeightFile, device: str) -> PreferenceScorer:
    """Build HPSv2, frozen, in fp32.

    Args:
        architecture: the CLIP that it was fine-tuned from.
        weights: with open_clip's names, as its authors publish them, or these after ``model.``, as the package does.
        device: where it goes.

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
    tokenizer = open_clip.SimpleTokenizer(context_length=architecture.context_length)
    side = int(architecture.network["vision_cfg"]["image_size"])
    scorer = without_constructor(
        HPSv2,
        model=network,
        tokenizer=tokenizer,
        resize=_Square(ResizeMaxSize(side), side),
        normalize=transforms.Normalize(mean=MEAN, std=STD),
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
