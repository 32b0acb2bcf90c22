"""What a reward gets, a batch of finished samples, and what it returns: a score for each."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from PIL import Image

from grpo_core.errors import InputError
from grpo_core.rollouts.images import require_fit, to_rgb


@dataclass(frozen=True)
class ScoringBatch:
    """Samples to score, one entry per sample in every field.

    Attributes:
        images: of the samples (RGB, 8 bit); empty where samples are texts.
        targets: the target images of the samples' prompts, None where there is none; empty for texts.
        columns: every other column of the prompt file, by name, one value per sample.
        completions: the texts of the samples; empty where samples are images.
        group_ids: the same for siblings; groups are complete and contiguous. Empty where groups are not known.
        token_ids: the tokens that each sample was decoded from; empty where they are not needed or not known.
        source_images: the images in each sample's prompt (RGB, 8 bit), in its order; empty where no prompt has any.
        starts: what the chat template wrote of each text before the model went on; empty where it wrote nothing.
    """

    sample_ids: Sequence[str]
    prompts: Sequence[str]
    images: Sequence[Image.Image] = ()
    targets: Sequence[Image.Image | None] = ()
    columns: Mapping[str, Sequence[object]] = field(default_factory=dict)
    completions: Sequence[str] = ()
    group_ids: Sequence[str] = ()
    token_ids: Sequence[Sequence[int]] = ()
    source_images: Sequence[Sequence[Image.Image]] = ()
    starts: Sequence[str] = ()

    def __post_init__(self) -> None:
        outputs = self.completions or self.images
        optional = (self.targets, self.group_ids, self.token_ids, self.source_images, self.starts)
        sizes = {len(self.prompts), len(outputs), *(len(values or outputs) for values in optional)}
        sizes |= {len(values) for values in self.columns.values()}
        assert sizes <= {len(self.sample_ids)}, f"one entry per sample in every field, got {sizes}"
        assert not (self.completions and self.images), "a sample is an image or a text"

    def __len__(self) -> int:
        return len(self.sample_ids)

    def select(self, rows: Sequence[int]) -> "ScoringBatch":
        """Return the samples with these indices, in this order."""
        chosen = {
            each.name: [values[row] for row in rows] if (values := getattr(self, each.name)) else ()
            for each in dataclasses.fields(self)
            if each.name != "columns"
        }
        columns = {name: [values[row] for row in rows] for name, values in self.columns.items()}
        return ScoringBatch(**chosen, columns=columns)

    def groups(self, reward: str) -> list[list[int]]:
        """Return the indices of each group's samples; InputError, with the reward's name, without groups."""
        if len(self) and not self.group_ids:
            raise InputError(f"rewards.{reward}.by_group", True, "These samples come without groups. Set it to false.")
        rows = itertools.groupby(range(len(self)), key=lambda row: self.group_ids[row])
        return [list(group) for _, group in rows]

    def rgb_images(self, reward: str, min_side: int = 1, max_aspect: float = math.inf) -> Iterator[Image.Image]:
        """Yield each image in RGB; InputError, with the reward's name, for an unknown mode, too small or too long."""
        for sample_id, image in zip(self.sample_ids, self.images, strict=True):
            place = f"rewards.{reward}, sample {sample_id}"
            rgb = to_rgb(image, place)
            require_fit(rgb, place, reward, min_side, max_aspect)
            yield rgb


@dataclass(frozen=True)
class Score:
    """The score of one sample: a value, not applicable (no value, no failure) or a failure (no value, a reason).

    Attributes:
        value: in [0, 1] where the reward is bounded, higher is better.
        raw: the measured quantity in its own unit (dB, bytes, distance); None with value None.
        failure: why a sample to which the reward applies could not be scored.
        logged: metrics that the call which scored the sample reported, by name.
        extra: what the call reported about the sample, by column: numbers, texts and None.
    """

    value: float | None
    raw: float | None
    failure: str | None = None
    logged: Mapping[str, float] = field(default_factory=dict, compare=False)
    extra: Mapping[str, object] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        assert self.value is None or self.failure is None, "a score or the reason why there is none"

    @classmethod
    def failed(cls, reason: str) -> "Score":
        """Return the score of a sample that could not be scored, for a reason other than the sample."""
        return cls(None, None, reason)

    @classmethod
    def of(cls, value: float, raw: float, reason: str | None = None) -> "Score":
        """Return value and raw, or a failure (`reason`, or the number itself) where raw is not finite."""
        return cls(value, raw) if math.isfinite(raw) else cls.failed(reason or not_finite(raw))


class ScoringError(RuntimeError):
    """A service or an engine gave no score in this attempt; another one may succeed. The message has no address."""


NOT_APPLICABLE = Score(None, None)
"""The reward has nothing to say about the sample: no target, no quoted text."""


def clamp_unit(value: float) -> float:
    """Clamp a value to [0, 1]."""
    return min(max(value, 0.0), 1.0)


def not_finite(number: float) -> str:
    """Return the reason of a failure for NaN or infinity."""
    return f"the reward is {number}, not a finite number"
