"""The image that a sample is compared with: the target of its prompt, or one of the images in the prompt."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from PIL import Image
from pydantic import Field
from pydantic.dataclasses import dataclass

from grpo_core.errors import InputError
from grpo_core.rewards.reward import STRICT, Needs, Reward, ScoringBatch


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
        """Return what determines the scores; the reference only where it is not the usual one.

        So the scores of a reward that had no such setting are still those of this one.
        """
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
