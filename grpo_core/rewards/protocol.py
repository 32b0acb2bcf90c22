"""What a reward is: a named, versioned function from finished samples to scores.

A reward sees a batch of samples and nothing of the training; the same samples give the same scores
whatever the batch or the order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from PIL import Image

from grpo_core.records import Medium


@dataclass(frozen=True)
class ScoringBatch:
    """Samples to be scored, one entry a sample in every field.

    Attributes:
        sample_ids: stable names of the samples.
        prompts: the prompt of each sample.
        images: the picture of each sample (RGB, 8 bit); empty where samples are texts.
        targets: the target picture that belongs to the sample's prompt, None where there is none; empty for texts.
        columns: every other column of the prompt file, by name, one value a sample.
        completions: the text of each sample; empty where samples are pictures.
    """

    sample_ids: Sequence[str]
    prompts: Sequence[str]
    images: Sequence[Image.Image] = ()
    targets: Sequence[Image.Image | None] = ()
    columns: Mapping[str, Sequence[object]] = field(default_factory=dict)
    completions: Sequence[str] = ()

    def __post_init__(self) -> None:
        outputs = self.completions or self.images
        sizes = {len(self.prompts), len(outputs), len(self.targets or outputs), *map(len, self.columns.values())}
        assert sizes <= {len(self.sample_ids)}, f"one entry a sample in every field, got {sizes}"
        assert not (self.completions and self.images), "a sample is a picture or a text"

    def __len__(self) -> int:
        return len(self.sample_ids)

    def select(self, rows: Sequence[int]) -> "ScoringBatch":
        """The samples with these indices, in this order."""
        return ScoringBatch(
            sample_ids=[self.sample_ids[row] for row in rows],
            prompts=[self.prompts[row] for row in rows],
            images=[self.images[row] for row in rows] if self.images else (),
            targets=[self.targets[row] for row in rows] if self.targets else (),
            columns={name: [values[row] for row in rows] for name, values in self.columns.items()},
            completions=[self.completions[row] for row in rows] if self.completions else (),
        )


@dataclass(frozen=True)
class Score:
    """One sample's score.

    Attributes:
        value: in [0, 1] where the reward is bounded, higher is better; None where the reward does not apply.
        raw: the measured quantity in its own unit (dB, bytes, distance); None with value None.
    """

    value: float | None
    raw: float | None


@runtime_checkable
class Reward(Protocol):
    """A reward; its settings are fixed when it is built and named in its provenance."""

    @property
    def name(self) -> str:
        """The registered name."""

    @property
    def medium(self) -> Medium:
        """What it scores."""

    @property
    def version(self) -> str:
        """Changes whenever the same picture would score otherwise."""

    @property
    def needs_target(self) -> bool:
        """Whether a sample without a target picture has no score."""

    @property
    def needs_column(self) -> str | None:
        """Column of the prompt file without which no sample has a score."""

    @property
    def min_side(self) -> int:
        """Smallest side of a picture that it can score, in pixels."""

    def settings(self) -> Mapping[str, object]:
        """The settings that determine the scores, as plain JSON values."""

    def preflight(self) -> Sequence[str]:
        """What stands in the way of scoring (missing weights, wrong digest), each with its mend; empty when ready.

        Loads no model.
        """

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """One score a sample, in order."""
