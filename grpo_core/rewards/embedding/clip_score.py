"""How well the image fits its prompt: the cosine of their CLIP embeddings.

Hessel, Holtzman, Forbes, Le Bras and Choi, 2021, "CLIPScore: A Reference-free Evaluation Metric for Image Captioning"
(arXiv:2104.08718), section 3: w max(cos, 0), there with w = 2.5 and ViT-B/32.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from grpo_core.rewards.embedding.clip_model import NO_DIRECTION
from grpo_core.rewards.embedding.clip_settings import DEFAULT_MODEL, ClipSettings, library_version
from grpo_core.rewards.images import to_rgb
from grpo_core.rewards.long_prompts import LONG_PROMPTS, check_prompts
from grpo_core.rewards.protocol import Reward, Score, ScoringBatch
from grpo_core.rewards.scoring import clamp_unit
from grpo_core.rewards.settings import check_choice, check_positive


@dataclass(frozen=True)
class ClipScoreReward(Reward):
    """Value clip(scale * max(cos, 0), 0, 1); raw the cosine in [-1, 1].

    Cosines of images with their own captions lie around 0.2 to 0.35.

    Attributes:
        model: open_clip's tag of the network, or the path of an open_clip_config.json.
        pretrained: open_clip's name of the release that the weights are; by default ``openai``. It says how images
            are prepared, and must have been trained with the network's activation.
        weights: open_clip's state dict: its path (.safetensors, or .pt of named tensors), or ``hf://owner/repo/file``.
        weights_sha256: digest that the file must have, whole or its first 8 digits or more.
        scale: what the cosine is multiplied with; the paper's is 2.5.
        long_prompts: CLIP reads 77 tokens, some 50 words. ``cut`` scores against the beginning of a longer prompt and
            says so in the log; ``refuse`` ends with an error that names the sample.
        device: where to compute: ``cpu``, ``cuda`` or ``cuda:N``.
    """

    model: str = DEFAULT_MODEL
    pretrained: str | None = None
    weights: str | None = None
    weights_sha256: str | None = None
    scale: float = 1.0
    long_prompts: str = "cut"
    device: str = "cpu"

    name: ClassVar[str] = "clip_score"

    def __post_init__(self) -> None:
        self._clip().check()
        check_positive("rewards.clip_score.scale", self.scale, "value per cosine")
        check_choice("rewards.clip_score.long_prompts", self.long_prompts, LONG_PROMPTS)

    @property
    def version(self) -> str:
        """The library that prepares images and texts belongs to it."""
        return f"1+{library_version()}"

    def settings(self) -> Mapping[str, object]:
        """Network, release and scale; what happens to long prompts."""
        return {**self._clip().settings(), "scale": float(self.scale), "long_prompts": self.long_prompts}

    def weight_digests(self) -> Mapping[str, str]:
        """CLIP's."""
        return {"clip": self._clip().weight_file().sha256}

    def preflight(self) -> Sequence[str]:
        """A release that does not fit the network, missing or wrong weights, a device that is not there."""
        return [str(problem) for problem in self._clip().problems()]

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """One score a sample; the first call of a process loads the weights.

        Raises:
            InputError: missing or wrong weights, an image of an unknown mode, a long prompt that is to be refused.
        """
        model = self._clip().load()
        check_prompts(self.name, batch, model.count_tokens, model.architecture.context_length, self.long_prompts)
        scores = []
        for sample_id, image, prompt in zip(batch.sample_ids, batch.images, batch.prompts, strict=True):
            image = to_rgb(image, f"rewards.clip_score, sample {sample_id}")
            cosine = (model.image_embedding(image) @ model.text_embedding(prompt)).item()
            finite = math.isfinite(cosine)
            scores.append(Score(clamp_unit(self.scale * cosine), cosine) if finite else Score.failed(NO_DIRECTION))
        return scores

    def _clip(self) -> ClipSettings:
        return ClipSettings(
            self.name, self.model, self.pretrained, self.weights, self.weights_sha256, device=self.device
        )
