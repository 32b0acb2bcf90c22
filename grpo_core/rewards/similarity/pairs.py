"""Rewards that compare an image with its target or with one in its prompt; pixel by pixel: mse, psnr, r2, ssim.

Their settings are checked without torch, which takes seconds to import; `tensors` computes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from PIL import Image
from pydantic import Field
from pydantic.dataclasses import dataclass

from grpo_core.errors import InputError
from grpo_core.rewards.reward import STRICT, Needs, Positive, Reward
from grpo_core.rewards.scoring_batch import NOT_APPLICABLE, Score, ScoringBatch, clamp_unit
from grpo_core.rollouts.images import WINDOW, fit_to, to_rgb

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, config=STRICT, kw_only=True)
class ComparingReward(Reward):
    """A reward that may compare a sample with an image; without that image the sample has no score.

    Attributes:
        against: target: the target image of the prompt; source: an image in the prompt, of which the sample is an edit;
            prompt: the text, of rewards that can.
        source_index: which of the images in the prompt, from 0; with against: source.
    """

    against: Literal["prompt", "target", "source"] = "target"
    source_index: Annotated[int, Field(ge=0)] = 0

    def check_reference(self) -> None:
        """Raise InputError if there is a source_index and no comparison with a source image."""
        if self.source_index and self.against != "source":
            hint = f"against is {self.against}; set it to source, or leave this out."
            raise InputError(f"rewards.{self.name}.source_index", self.source_index, hint)

    @property
    def needs(self) -> Needs:
        """The image that it compares with."""
        if self.against == "source":
            return Needs(sources="required", source=self.source_index)
        return Needs(target=self.against == "target")

    def settings(self) -> Mapping[str, object]:
        """Return what determines the scores; the reference only where it is not the usual one."""
        left_out = {"against"} if self.against == type(self).against else set()
        left_out |= set() if self.against == "source" else {"source_index"}
        return {name: value for name, value in super().settings().items() if name not in left_out}

    def reference_images(self, batch: ScoringBatch) -> Sequence[Image.Image | None]:
        """Return the target or the source image of each sample; None for a sample without it."""
        if self.against == "target":
            return batch.targets or [None] * len(batch)
        index = self.source_index
        return [each[index] if index < len(each) else None for each in batch.source_images or [()] * len(batch)]

    def reference_place(self, sample_id: str) -> str:
        """Name the image that a sample is compared with, for an error."""
        return f"rewards.{self.name}, sample {sample_id}, {self.against}"


@dataclass(frozen=True, config=STRICT, kw_only=True)
class PairReward(ComparingReward):
    """A reward of an image and its target, or a source image, resized to it; a sample without it has no score.

    Pairs are measured one at a time: a convolution's last bits depend on the batch, and a score must not.
    """

    against: Literal["target", "source"] = "target"

    min_side: ClassVar[int] = 1
    """Smallest side of an image that it can score, in pixels."""

    measured_by: ClassVar[str] = ""
    """Name of the function of `tensors` that measures."""

    undefined: ClassVar[str | None] = None
    """Why a raw quantity may be undefined, {} for target or source; None: it never is."""

    @property
    def measured_at_once(self) -> int:
        """Number of pairs, of one size, that are measured together."""
        return 1

    def __post_init__(self) -> None:
        self.check_reference()

    @property
    def needs(self) -> Needs:
        """The image that it compares with, which is squeezed."""
        return replace(super().needs, squeezes_reference=True, min_side=self.min_side)

    def measure(self, images: "Tensor", targets: "Tensor") -> "Tensor":
        """Return the raw quantities [N] of images and targets (or sources), each [N, 3, H, W] fp32 in [0, 1]."""
        from grpo_core.rewards.similarity import tensors

        found: Tensor = getattr(tensors, self.measured_by)(images, targets)
        return found

    def to_value(self, raw: float) -> float:
        """Return the value in [0, 1] of a raw quantity; by default that, clamped."""
        return clamp_unit(raw)

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """Score each sample; a raw quantity that is not finite is a failure."""
        import torch

        from grpo_core.rewards.similarity.tensors import to_tensor

        scores = [NOT_APPLICABLE] * len(batch)
        undefined = self.undefined and self.undefined.format(self.against)
        for pairs in self._pairs(batch):
            images, references = (
                torch.cat([to_tensor(each) for each in side]) for side in zip(*pairs.values(), strict=True)
            )
            with torch.inference_mode(), torch.autocast("cpu", enabled=False):
                raws = self.measure(images, references).tolist()
            for row, raw in zip(pairs, raws, strict=True):
                scores[row] = Score.of(self.to_value(raw), raw, undefined)
        return scores

    def _pairs(self, batch: ScoringBatch) -> Iterator[dict[int, tuple[Image.Image, Image.Image]]]:
        """Yield images with what they are compared with, by row, as many of one size as are measured together."""
        references = {row: each for row, each in enumerate(self.reference_images(batch)) if each is not None}
        chosen = batch.select(list(references))
        images = chosen.rgb_images(self.name, self.min_side)
        waiting: dict[tuple[int, int], dict[int, tuple[Image.Image, Image.Image]]] = {}
        for (row, reference), sample_id, image in zip(references.items(), chosen.sample_ids, images, strict=True):
            place = self.reference_place(sample_id)
            alike = waiting.setdefault(image.size, {})
            alike[row] = image, fit_to(to_rgb(reference, place), image.size, place)
            if len(alike) == self.measured_at_once:
                yield waiting.pop(image.size)
        yield from waiting.values()


@dataclass(frozen=True, config=STRICT)
class MseReward(PairReward):
    """Value 1 - clip(MSE / full_scale, 0, 1); raw the mean squared error over levels in [0, 1].

    Attributes:
        full_scale: error from which the value is 0; 0.25 is the most that flat mid-grey has, uniform noise has 1/6.
    """

    full_scale: Positive = 0.25

    name: ClassVar[str] = "mse"
    version: ClassVar[str] = "1"
    measured_by: ClassVar[str] = "mean_squared_error"

    def to_value(self, raw: float) -> float:
        """Return 1 without error, 0 from `full_scale` on."""
        return 1.0 - clamp_unit(raw / self.full_scale)


@dataclass(frozen=True, config=STRICT)
class PsnrReward(PairReward):
    """Value clip(PSNR / full_scale_db, 0, 1); raw PSNR in dB, at most 100.

    Attributes:
        full_scale_db: PSNR in dB from which the value is 1.
    """

    full_scale_db: Positive = 50.0

    name: ClassVar[str] = "psnr"
    version: ClassVar[str] = "1"
    measured_by: ClassVar[str] = "peak_signal_to_noise_ratio"

    def to_value(self, raw: float) -> float:
        """Return the ratio as a share of `full_scale_db`."""
        return clamp_unit(raw / self.full_scale_db)


@dataclass(frozen=True, config=STRICT)
class R2Reward(PairReward):
    """Value max(R², 0); raw R², the share of the target's variance that the image explains, at most 1.

    An image of a single colour has 0 or less, where SSIM and PSNR give it much for a plain background.
    """

    name: ClassVar[str] = "r2"
    version: ClassVar[str] = "1"
    undefined: ClassVar[str | None] = "the {} has a single colour, so there is no variance to explain"
    measured_by: ClassVar[str] = "coefficient_of_determination"


@dataclass(frozen=True, config=STRICT)
class SsimReward(PairReward):
    """Value max(SSIM, 0); raw SSIM in [-1, 1], 1 for identical images."""

    name: ClassVar[str] = "ssim"
    version: ClassVar[str] = "1"
    min_side: ClassVar[int] = WINDOW
    measured_by: ClassVar[str] = "structural_similarity"
