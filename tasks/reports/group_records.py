"""What a person sees of a collection of rollouts, once read: frozen records of samples and their groups."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from PIL import Image


@dataclass(frozen=True)
class SampleView:
    """One sample and what was thought of it.

    Attributes:
        sample_id: joins every table.
        seed: that its tokens were sampled with.
        logprob: sum over its trained tokens, in nats, recorded while sampling.
        length: trained tokens.
        finished: False where it was cut at its greatest length.
        reward: None where no reward applies or none was computed.
        advantage: None likewise, and where its group was dropped.
        breakdown: value by reward, before weights; None where the reward does not apply.
        output: an RGB image, made smaller where it was large; or the whole text; None for an image that was pruned.
    """

    sample_id: str
    seed: int
    logprob: float
    length: int
    finished: bool
    reward: float | None
    advantage: float | None
    breakdown: Mapping[str, float | None]
    output: Image.Image | str | None


@dataclass(frozen=True)
class GroupView:
    """Siblings of one prompt occurrence.

    Attributes:
        group_id: of the occurrence.
        dataset: the prompt set that it comes from.
        prompt: as it was given.
        dropped: the group has no spread and was left out of the update.
        target: the image that it ought to give; None where there is none, or none can be read.
        samples: best reward first, those without one last; in the order drawn where rewards are equal.
    """

    group_id: str
    dataset: str
    prompt: str
    dropped: bool
    target: Image.Image | None
    samples: tuple[SampleView, ...]

    @property
    def rated(self) -> tuple[SampleView, ...]:
        """The samples that have a reward."""
        return tuple(sample for sample in self.samples if sample.reward is not None)

    @property
    def best(self) -> SampleView | None:
        """Highest reward; None where nothing has one."""
        return next(iter(self.rated), None)

    @property
    def worst(self) -> SampleView | None:
        """Lowest reward; None with fewer than two rewards."""
        return self.rated[-1] if len(self.rated) > 1 else None

    @property
    def reward(self) -> float | None:
        """Mean over the samples that have one."""
        rewards = [sample.reward for sample in self.samples if sample.reward is not None]
        return math.fsum(rewards) / len(rewards) if rewards else None

    @property
    def spread(self) -> float | None:
        """Highest less lowest reward; None with fewer than two rewards."""
        if len(self.rated) < 2:
            return None
        rewards = [sample.reward for sample in self.samples if sample.reward is not None]
        return max(rewards) - min(rewards)


@dataclass(frozen=True)
class Groups:
    """The first groups of a collection.

    Attributes:
        shown: these groups.
        total: groups that there are.
        draws: collections that they come from; more than one where groups without spread were replaced.
        dropped: groups of them all that were left out of the update.
        datasets: names of the prompt sets that they come from, sorted.
    """

    shown: tuple[GroupView, ...]
    total: int
    rounds: int
    dropped: int
    datasets: tuple[str, ...]
