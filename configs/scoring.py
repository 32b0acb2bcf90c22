"""The sections of a configuration about rewards: each reward of the mix, and guardrails against reward hacking."""

import re
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, PositiveInt

from configs.validation import NAME_PATTERN, Name, Section
from grpo_core.rewards.hacking import HackingRule
from grpo_core.rewards.mix.terms import RewardTerm
from grpo_core.streams import Stream

Scalar = str | int | float | bool


class RewardSection(Section, RewardTerm):
    """One reward of the mix."""

    keyless = frozenset({"max_failures", "batch_size", "processes", "pool"})

    reward: str = Field(min_length=1, description="registered name")
    name: Name | None = Field(
        None, description="name in tables and plots; null: the reward's name, of `function` the function's"
    )
    datasets: tuple[str, ...] | None = Field(None, description="score these datasets only; null: all")
    where: dict[str, tuple[Scalar, ...]] | None = Field(
        None, description="score only prompts whose column has one of these values; null: all"
    )
    streams: tuple[Stream, ...] | None = Field(
        None, description="train these on it, `tokens` or `denoising`; null: all that the run trains"
    )
    max_failures: float = Field(
        0.1, ge=0, le=1, description="share of its samples that may fail; if more fail, the run stops"
    )
    batch_size: PositiveInt = Field(32, description="samples scored at once; larger if a group is larger")
    processes: int = Field(
        0, ge=0, le=256, description="processes that score in parallel, one thread each; 0: score in the run's process"
    )
    pool: Name | None = Field(None, description="a work pool for this reward; null: the pool of placement.rewards")
    settings: dict[str, object] = Field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name in tables and plots."""
        return self.name or self._function_name() or self.reward

    def _function_name(self) -> str | None:
        """Return the name of the function that a reward calls, as TRL names it; None for other rewards."""
        function = self.settings.get("function") if self.reward == "function" else None
        if not isinstance(function, str):
            return None
        name = function.rpartition(":")[2].lstrip("_")
        return name if re.fullmatch(NAME_PATTERN, name) else None

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


class GuardrailsSection(Section, HackingRule):
    """Held-out scores that should not fall while the reward rises."""

    rewards: tuple[RewardSection, ...] = Field((), description="scored on held-out samples, never trained on")
    on_fall: Literal["report", "stop", "pause"] = Field(
        "report",
        description="when a guardrail falls: only report it, end the run, or wait for a person to resume it in the UI",
    )
    pause_timeout: PositiveInt = Field(86_400, description="seconds that a paused run waits before it ends as failed")
