"""What PickScore and HPSv2 share: a CLIP of the imscore package, built from checked weights.

Both are a CLIP ViT-H/14 fine-tuned on people's choices between two images; the measure is the cosine of prompt and
image, PickScore's times CLIP's learned scale (near 100). Differences count, not levels: two images with the same
prompt compare, two prompts do not.

The package's constructors download the base CLIP before they load the model, and accept weights with missing tensors.
Here its classes get their parts, and compute the scores.
"""

import abc
import importlib.util
from collections.abc import Callable, Sequence
from typing import ClassVar

from jaxtyping import Float32
from torch import Tensor, nn

from grpo_core.errors import InputError
from grpo_core.rewards.embedding.clip import LongPrompts, check_prompts
from grpo_core.rewards.model_reward import ModelReward, exact_inference
from grpo_core.rewards.reward import Score, ScoringBatch, clamp_unit
from grpo_core.rewards.tensors import to_tensor

MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Of OpenAI's CLIP, which both models were prepared with."""


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


class PreferenceReward(ModelReward):
    """Value clip(score / full_scale, 0, 1); raw the model's score."""

    full_scale: float
    long_prompts: LongPrompts

    version: ClassVar[str] = "1+imscore-0.0.11"
    """The package's release is pinned by the project, and belongs to the scores."""

    @abc.abstractmethod
    def load(self) -> PreferenceScorer:
        """Load the model, frozen, in fp32, once per process."""

    def preflight(self) -> Sequence[str]:
        """List a missing package, missing or wrong weights, a missing device."""
        missing = self._find_missing_package()
        return [*super().preflight(), *([] if missing is None else [str(missing)])]

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """Score each sample; the first call of a process loads the weights.

        Raises:
            InputError: imscore is not installed, missing or wrong weights, an image of an unknown mode, a long
                prompt that is refused.
        """
        missing = self._find_missing_package()
        if missing is not None:
            raise missing
        scorer = self.load()
        check_prompts(self.name, batch, scorer.count_tokens, scorer.context_length, self.long_prompts)
        # One at a time: a matrix product's last bits depend on the batch that it runs in, and a score must not.
        pairs = zip(batch.rgb_images(self.name), batch.prompts, strict=True)
        raws = [scorer.score(to_tensor(image), prompt) for image, prompt in pairs]
        return [Score.of(clamp_unit(raw / self.full_scale), raw) for raw in raws]

    def _find_missing_package(self) -> InputError | None:
        if importlib.util.find_spec("imscore") is not None:
            return None
        hint = "It needs imscore, the extra preference (pip install imscore==0.0.11); or use another reward."
        return InputError("rewards", self.name, hint)


def without_constructor(kind: type[nn.Module], **parts: object) -> nn.Module:
    """Make an instance of the package's class with these attributes, without running its constructor."""
    scorer: nn.Module = object.__new__(kind)
    nn.Module.__init__(scorer)
    for name, part in parts.items():
        setattr(scorer, name, part)
    return scorer.requires_grad_(False).eval()
