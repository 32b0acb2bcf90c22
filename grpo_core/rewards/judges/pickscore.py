"""PickScore: which image people would prefer for a prompt.

Kirstain, Polyak, Singer, Matiana, Penna and Levy, 2023, "Pick-a-Pic: An Open Dataset of User Preferences for
Text-to-Image Generation" (arXiv:2305.01569), equation 1.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from grpo_core.rewards.embedding.clip import LongPrompts
from grpo_core.rewards.judges.preference import MEAN, STD, PreferenceReward, PreferenceScorer, without_constructor
from grpo_core.rewards.model_reward import Device, Sha256, load_once
from grpo_core.rewards.reward import STRICT, Positive
from grpo_core.rewards.weights.models import ModelSource

PICKSCORE = "yuvalkirstain/PickScore_v1"


@dataclass(frozen=True, config=STRICT)
class PickScoreReward(PreferenceReward):
    """Value clip(score / full_scale, 0, 1); raw PickScore, about 17 to 24.

    Attributes:
        model: folder of a CLIPModel and its tokenizer as transformers saves them, or ``owner/repo[@revision]`` on the
            Hub (``yuvalkirstain/PickScore_v1``).
        model_sha256: digest over the model's files that it must have, complete or its first 8 digits or more.
        full_scale: score at which the value saturates; 26 is what Flow-GRPO (arXiv:2505.05470) divides by.
        long_prompts: ``cut`` or ``refuse`` a prompt of more than 77 tokens.
        device: where to compute: ``cpu``, ``cuda`` or ``cuda:N``.
    """

    model: str | None = None
    model_sha256: Sha256 | None = None
    full_scale: Positive = 26.0
    long_prompts: LongPrompts = "cut"
    device: Device = "cpu"

    name: ClassVar[str] = "pickscore"
    free_settings: ClassVar[frozenset[str]] = frozenset({"device", "model", "model_sha256"})

    def weight_sources(self) -> Mapping[str, ModelSource]:
        """Return the model, over its files."""
        return {"model": self._source()}

    def load(self) -> PreferenceScorer:
        """Load the model.

        Raises:
            InputError: it is missing or another model.
        """
        source = self._source()
        return load_pickscore(source, source.digest(), self.device)

    def _source(self) -> ModelSource:
        return ModelSource("rewards.pickscore.model", self.model, self.model_sha256, PICKSCORE)


@load_once
def load_pickscore(source: ModelSource, digest: str, device: str) -> PreferenceScorer:
    """Build PickScore, frozen, in fp32.

    Args:
        source: a CLIPModel and its tokenizer as transformers saves them.
        digest: of its files, so that changed files are loaded again.
        device: where it goes.

    Raises:
        InputError: the folder has other content.
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
