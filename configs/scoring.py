"""The sections of a configuration about rewards, guardrails and advantages."""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt

from configs.validation import NAME_PATTERN, Name, Section
from grpo_core.advantages.settings import AdvantageSettings
from grpo_core.errors import InputError
from grpo_core.rewards.registry import HackingRule, RewardTerm
from grpo_core.rollouts.streams import Stream
from grpo_core.uses import Uses

Scalar = str | int | float | bool


def reward_label(section: Mapping[str, Any]) -> str:
    """Return a reward's name in tables and plots: its own, that of its function, as in TRL, or its reward's."""
    settings = section.get("settings")
    function = (
        settings.get("function") if section.get("reward") == "function" and isinstance(settings, Mapping) else None
    )
    called = function.rpartition(":")[2].lstrip("_") if isinstance(function, str) else ""
    return str(section.get("name") or (re.fullmatch(NAME_PATTERN, called) and called) or section.get("reward"))


class RewardSection(Section, RewardTerm):
    """One reward of the mix."""

    keyless = frozenset({"max_failures", "batch_size", "processes", "pool"})

    reward: Annotated[str, Uses.NOTHING] = Field(min_length=1, description="registered name")
    name: Name | None = Field(
        None, description="in tables and plots; null: the reward's name, of `function` the function's"
    )
    datasets: Annotated[tuple[str, ...] | None, Uses.NOTHING] = Field(None, description="score these only; null: all")
    where: Annotated[dict[str, tuple[Scalar, ...]] | None, Uses.NOTHING] = Field(
        None, description="score only prompts whose column has one of these values; null: all"
    )
    streams: tuple[Stream, ...] | None = Field(None, description="train these on it; null: all that the run trains")
    max_failures: float = Field(0.1, ge=0, le=1, description="share of its samples that may fail before the run stops")
    batch_size: PositiveInt = Field(32, description="samples scored at once; larger if a group is larger")
    processes: int = Field(
        0, ge=0, le=256, description="that score in parallel, one thread each; 0: the run's process scores"
    )
    pool: Name | None = Field(None, description="a work pool for this reward; null: the pool of placement.rewards")
    settings: Annotated[dict[str, object], Uses.OF_REWARD] = Field(
        default_factory=dict, description="the reward's own; `grpo rewards list` has them"
    )

    def contradictions(self) -> Iterator[InputError]:
        """Yield scopes in which it would score nothing, or count for nothing."""
        if self.datasets == ():
            hint = "The reward would score nothing; name a dataset, or leave it out to score all."
            yield InputError("datasets", [], hint)
        if self.streams == ():
            yield InputError("streams", [], "It would count for nothing; leave it out to count for all.")

    @property
    def label(self) -> str:
        """The name in tables and plots."""
        return reward_label({"name": self.name, "reward": self.reward, "settings": self.settings})

    def with_device(self, device: str) -> Self:
        """Return the section with this device in the place of `auto`."""
        if self.settings.get("device") != "auto":
            return self
        return self.model_copy(update={"settings": {**self.settings, "device": device}})

    def scores(self, dataset: str) -> bool:
        """Return whether the reward scores the dataset."""
        return self.datasets is None or dataset in self.datasets

    def scores_prompt(self, dataset: str, columns: Mapping[str, Any]) -> bool:
        """Return whether the reward scores a prompt of the dataset with these other columns."""
        if not self.scores(dataset):
            return False
        return all(columns.get(name) in values for name, values in (self.where or {}).items())

    def counts_for(self, stream: Stream) -> bool:
        """Return whether the reward is part of the mix that a stream is trained on."""
        return self.streams is None or stream in self.streams


_OF_THE_MIX = ("weight", "role", "threshold", "clamp", "normalize", "range", "streams")
"""Fields that weigh a reward in the mix."""


class GuardrailsSection(Section, HackingRule):
    """Held-out scores that should not fall while the reward rises."""

    rewards: tuple[RewardSection, ...] = Field((), description="scored on held-out samples, never trained on")
    on_fall: Literal["report", "stop", "pause"] = Field(
        "report",
        description="when a guardrail falls: report it, end the run, or wait until a person resumes it in the UI",
    )
    pause_timeout: PositiveInt = Field(86_400, description="seconds until a paused run fails")

    def contradictions(self) -> Iterator[InputError]:
        """Yield settings of the mix, of which a guardrail is no part, and what to do about guardrails without any."""
        for index, section in enumerate(self.rewards):
            plain = RewardSection(reward=section.reward)
            for field in _OF_THE_MIX:
                if (value := getattr(section, field)) != getattr(plain, field):
                    hint = "A guardrail is only watched and not part of the reward; leave it out."
                    yield InputError(f"rewards.{index}.{field}", value, hint)
        if self.on_fall != "report" and not self.rewards:
            hint = "Nothing is watched; name guardrails.rewards, or leave it out."
            yield InputError("on_fall", self.on_fall, hint)


class AdvantagesSection(Section, AdvantageSettings):
    """How rewards become advantages."""

    max_rounds: PositiveInt = Field(4, description="sampling rounds per iteration, with redraw")
