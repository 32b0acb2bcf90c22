"""What a reward is: a named, versioned function from finished samples to scores.

A reward sees a batch of samples and nothing of the training; the same samples give the same scores
whatever the batch or the order.
"""

import abc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from PIL import Image

from grpo_core.records import Modality


@dataclass(frozen=True)
class ScoringBatch:
    """Samples to be scored, one entry a sample in every field.

    Attributes:
        sample_ids: stable names of the samples.
        prompts: the prompt of each sample.
        images: the image of each sample (RGB, 8 bit); empty where samples are texts.
        targets: the target image that belongs to the sample's prompt, None where there is none; empty for texts.
        columns: every other column of the prompt file, by name, one value a sample.
        completions: the text of each sample; empty where samples are images.
        group_ids: siblings have the same; whole groups stand together. Empty where nothing says it.
        token_ids: the tokens that each sample was decoded from; empty where no reward needs them, or nothing says it.
    """

    sample_ids: Sequence[str]
    prompts: Sequence[str]
    images: Sequence[Image.Image] = ()
    targets: Sequence[Image.Image | None] = ()
    columns: Mapping[str, Sequence[object]] = field(default_factory=dict)
    completions: Sequence[str] = ()
    group_ids: Sequence[str] = ()
    token_ids: Sequence[Sequence[int]] = ()

    def __post_init__(self) -> None:
        outputs = self.completions or self.images
        optional = (self.targets, self.group_ids, self.token_ids)
        sizes = {len(self.prompts), len(outputs), *(len(values or outputs) for values in optional)}
        sizes |= {len(values) for values in self.columns.values()}
        assert sizes <= {len(self.sample_ids)}, f"one entry a sample in every field, got {sizes}"
        assert not (self.completions and self.images), "a sample is an image or a text"

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
            group_ids=[self.group_ids[row] for row in rows] if self.group_ids else (),
            token_ids=[self.token_ids[row] for row in rows] if self.token_ids else (),
        )


@dataclass(frozen=True)
class Score:
    """One sample's score: a value, or not applicable (no value, no failure), or a failure (no value, a reason).

    Attributes:
        value: in [0, 1] where the reward is bounded, higher is better; None where there is none.
        raw: the measured quantity in its own unit (dB, bytes, distance); None with value None.
        failure: why a sample to which the reward applies could not be scored; None where nothing went wrong.
    """

    value: float | None
    raw: float | None
    failure: str | None = None

    def __post_init__(self) -> None:
        assert self.value is None or self.failure is None, "a score or the reason why there is none"

    @classmethod
    def failed(cls, reason: str) -> "Score":
        """The reward applies, and something else than the sample stood in the way of scoring it."""
        return cls(None, None, reason)


NOT_APPLICABLE = Score(None, None)
"""The reward has nothing to say about the sample: no target, no quoted text."""


class Reward(abc.ABC):
    """A reward; its settings are fixed when it is built and named in its provenance.

    A class attribute stands in for each property whose answer does not depend on the settings.
    """

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The registered name."""

    @property
    @abc.abstractmethod
    def version(self) -> str:
        """Changes whenever the same sample would score otherwise."""

    @property
    def media(self) -> tuple[Modality, ...]:
        """What it scores."""
        return ("image",)

    @property
    def needs_target(self) -> bool:
        """Whether a sample without a target image has no score."""
        return False

    @property
    def needs_column(self) -> str | None:
        """Column of the prompt file without which no sample has a score."""
        return None

    @property
    def needs_group(self) -> bool:
        """Whether a sample's score depends on its siblings, so that a batch must hold them all."""
        return False

    @property
    def needs_tokens(self) -> bool:
        """Whether it looks at the tokens that a sample was decoded from."""
        return False

    @property
    def min_side(self) -> int:
        """Smallest side of an image that it can score, in pixels."""
        return 1

    @property
    def max_aspect(self) -> float:
        """Largest ratio of an image's long side to its short one."""
        return math.inf

    @abc.abstractmethod
    def settings(self) -> Mapping[str, object]:
        """The settings that determine the scores, as plain JSON values; no path, device or address."""

    def weight_digests(self) -> Mapping[str, str]:
        """sha256 of every weight file that the scores come from, by role.

        Raises:
            InputError: a file is missing or not the right one.
        """
        return {}

    def preflight(self) -> Sequence[str]:
        """What stands in the way of scoring (missing weights, wrong digest), each with its hint; empty when ready.

        Loads no model.
        """
        return []

    @abc.abstractmethod
    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """One score a sample, in order; a sample's does not depend on the others, its siblings apart."""
