"""How well the image fits its prompt: the cosine of their CLIP embeddings.

Hessel, Holtzman, Forbes, Le Bras and Choi, 2021, "CLIPScore: A Reference-free Evaluation Metric for Image Captioning"
(arXiv:2104.08718), section 3: w max(cos, 0), there with w = 2.5 and ViT-B/32.
"""

from collections.abc import Sequence
from typing import ClassVar

from pydantic.dataclasses import dataclass

from grpo_core.rewards.embedding.clip import ClipReward, LongPrompts, check_prompts
from grpo_core.rewards.embedding.clip_model import NO_DIRECTION, load_clip
from grpo_core.rewards.model_reward import exact_inference
from grpo_core.rewards.reward import STRICT, Positive, Score, ScoringBatch, clamp_unit


@dataclass(frozen=True, config=STRICT)
class ClipScoreReward(ClipReward):
    """Value clip(scale * max(cos, 0), 0, 1); raw the cosine in [-1, 1].

    Cosines of images with their own captions are around 0.2 to 0.35.

    Attributes:
        scale: factor of the cosine; the paper's is 2.5.
        long_prompts: CLIP reads 77 tokens, some 50 words. ``cut`` scores against the beginning of a longer prompt and
            logs a warning; ``refuse`` ends with an error that names the sample.
    """

    scale: Positive = 1.0
    long_prompts: LongPrompts = "cut"

    name: ClassVar[str] = "clip_score"

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """Score each sample; the first call of a process loads the weights."""
        model = load_clip(self)
        check_prompts(self.name, batch, model.count_tokens, model.architecture.context_length, self.long_prompts)
        scores = []
        for image, prompt in zip(batch.rgb_images(self.name), batch.prompts, strict=True):
            with exact_inference("cpu"):
                cosine = (model.image_embedding(image) @ model.text_embedding(prompt)).item()
            scores.append(Score.of(clamp_unit(self.scale * cosine), cosine, NO_DIRECTION))
        return scores
