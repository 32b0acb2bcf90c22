"""How well the image fits its prompt: the cosine of their CLIP embeddings.

Hessel, Holtzman, Forbes, Le Bras and Choi, 2021, "CLIPScore: A Reference-free Evaluation Metric for Image Captioning"
(arXiv:2104.08718), section 3: w max(cos, 0), there with w = 2.5 and ViT-B/32.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar

from pydantic.dataclasses import dataclass

from grpo_core.rewards.embedding.clip import DEFAULT_MODEL, ClipSource, LongPrompts, check_prompts, library_version
from grpo_core.rewards.embedding.clip_model import NO_DIRECTION, load_clip
from grpo_core.rewards.model_reward import Device, ModelReward, Sha256
from grpo_core.rewards.reward import STRICT, Positive, Score, ScoringBatch, Text, clamp_unit


@dataclass(frozen=True, config=STRICT)
class ClipScoreReward(ModelReward):
    """Value clip(scale * max(cos, 0), 0, 1); raw the cosine in [-1, 1].

    Cosines of images with their own captions are around 0.2 to 0.35.

    Attributes:
        model: open_clip's tag of the network, or the path of an open_clip_config.json.
        pretrained: open_clip's name of the release of the weights; by default ``openai``. It determines how images
            are prepared, and must have been trained with the network's activation.
        weights: open_clip's state dict: its path (.safetensors, or .pt of named tensors), or ``hf://owner/repo/file``.
        weights_sha256: digest that the file must have, complete or its first 8 digits or more.
        scale: factor of the cosine; the paper's is 2.5.
        long_prompts: CLIP reads 77 tokens, some 50 words. ``cut`` scores against the beginning of a longer prompt and
            logs a warning; ``refuse`` ends with an error that names the sample.
        device: where to compute: ``cpu``, ``cuda`` or ``cuda:N``.
    """

    model: Text = DEFAULT_MODEL
    pretrained: Text | None = None
    weights: str | None = None
    weights_sha256: Sha256 | None = None
    scale: Positive = 1.0
    long_prompts: LongPrompts = "cut"
    device: Device = "cpu"

    name: ClassVar[str] = "clip_score"

    @property
    def version(self) -> str:
        """Includes the library that prepares images and texts."""
        return f"1+{library_version()}"

    def settings(self) -> Mapping[str, object]:
        """Return network, release, scale and `long_prompts`."""
        return {**super().settings(), **self._clip().settings()}

    def weight_sources(self) -> Mapping[str, ClipSource]:
        """Return CLIP's."""
        return {"clip": self._clip()}

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """Score each sample; the first call of a process loads the weights.

        Raises:
            InputError: missing or wrong weights, an image of an unknown mode, a long prompt that is refused.
        """
        model = load_clip(self._clip(), self.device)
        check_prompts(self.name, batch, model.count_tokens, model.architecture.context_length, self.long_prompts)
        scores = []
        for image, prompt in zip(batch.rgb_images(self.name), batch.prompts, strict=True):
            cosine = (model.image_embedding(image) @ model.text_embedding(prompt)).item()
            scores.append(Score.of(clamp_unit(self.scale * cosine), cosine, NO_DIRECTION))
        return scores

    def _clip(self) -> ClipSource:
        return ClipSource(self.name, self.model, self.pretrained, self.weights, self.weights_sha256)
