"""What a configuration may say of rewards: each by itself, and the watch over a run that is hacking them."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from configs.section import Digits, Name, NonNegativeFloat, Positive, Section
from grpo_core.rewards.mix.terms import Normalization, Role

Scalar = str | int | float | bool


class RewardSection(Section):
    """One reward of the mix."""

    reward: str = Field(min_length=1, description="registered name")
    name: Name | None = Field(None, description="name in tables and plots; by default the reward's")
    weight: float = 1.0
    role: Role = Field("sum", description="a gate multiplies the sum of the others")
    threshold: float | None = Field(None, description="of a gate: from there on it is 1, below 0; null: its value")
    clamp: tuple[float, float] | None = Field(None, description="lowest and highest value that count")
    normalize: Normalization = Field(
        "none", description="by group or by running mean and std, in the advantage alone; or a fixed range"
    )
    range: tuple[float, float] | None = Field(None, description="with normalize: range, the values that become 0 and 1")
    datasets: tuple[str, ...] | None = Field(None, description="score these datasets alone; null: all")
    where: dict[str, tuple[Scalar, ...]] | None = Field(
        None, description="score prompts alone whose column has one of these values; null: all"
    )
    max_failures: float = Field(
        0.1, ge=0, le=1, description="share of the samples it is meant for; beyond it the run stops"
    )
    batch_size: Digits = Field(32, description="samples handed over at once, more where a group is larger")
    processes: int = Field(
        0, ge=0, le=256, description="of its own that score side by side, one thread each; 0: none, a thread of the run"
    )
    pool: Name | None = Field(None, description="a work pool for this reward alone; null: as placement.rewards says")
    settings: dict[str, object] = Field(default_factory=dict)

    @property
    def label(self) -> str:
        """The name in tables and plots."""
        return self.name or self.reward

    def scores(self, dataset: str) -> bool:
        """Whether it is meant for the dataset."""
        return self.datasets is None or dataset in self.datasets

    def scores_prompt(self, dataset: str, columns: Mapping[str, Any]) -> bool:
        """Whether it is meant for a prompt of the dataset with these other columns."""
        if not self.scores(dataset):
            return False
        return all(columns.get(name) in values for name, values in (self.where or {}).items())


class WatchSection(Section):
    """Held-out guardrails that ought not to fall while the reward rises."""

    guardrails: tuple[RewardSection, ...] = Field((), description="scored on held-out samples, never trained on")
    rise: Positive = Field(0.05, description="share of its level by which the held-out reward must have risen")
    fall: Annotated[float, Field(gt=0, le=1)] = Field(0.1, description="share by which a guardrail must have fallen")
    patience: Digits = Field(3, description="evaluations in a row at which the guardrail must stand that much lower")
    noise: NonNegativeFloat = Field(
        5.0, description="standard errors that both changes must exceed; 0: noise is no matter"
    )
    stop: bool = Field(False, description="end the run when a guardrail falls so")
