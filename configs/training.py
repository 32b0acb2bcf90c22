"""The sections of a configuration about advantages and the policy update."""

from typing import TYPE_CHECKING, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from configs.validation import Section
from grpo_core.advantages.settings import AdvantageSettings
from grpo_core.losses.settings import MismatchSettings
from grpo_core.optimizer.settings import OptimizerSettings, ScheduleValue
from grpo_core.policies.trained.choice import Reference
from grpo_core.update.settings import UpdateSettings

if TYPE_CHECKING:
    from grpo_core.parity import ParityTolerance


class AdvantagesSection(Section, AdvantageSettings):
    """How rewards become advantages."""

    max_rounds: PositiveInt = Field(4, description="maximum number of sampling rounds per iteration, with redraw")


class ParitySection(Section):
    """Largest allowed difference of stored and recomputed log-probs, in nats.

    Sampling with a cache and scoring in one pass round differently: by 7e-6 nats at most in fp32 on a tiny GLM-Image,
    by 1.6e-2 at most and 2.7e-3 on average in bf16. Deeper models differ more, in single tokens far more.
    """

    max_difference: PositiveFloat | None = Field(None, description="null: by dtype, 1e-3 in fp32 and 1.0 in 16 bits")
    mean_difference: PositiveFloat | None = Field(None, description="null: by dtype, 1e-4 in fp32 and 0.05 in 16 bits")

    def tolerance(self, *, in_fp32: bool) -> "ParityTolerance":
        """Return the tolerance, with the defaults of the precision filled in."""
        from grpo_core.parity import ParityTolerance

        largest, mean = (1e-3, 1e-4) if in_fp32 else (1.0, 0.05)
        return ParityTolerance(self.max_difference or largest, self.mean_difference or mean)


class MismatchSection(Section, MismatchSettings):
    """Correction by exp(old - rollout) where the sampler is not the policy that is trained (TIS, IcePop)."""


class ReferenceSection(Section):
    """The policy that the KL is measured against."""

    memory_settings = frozenset({"placement"})

    placement: Literal["auto"] | Reference = Field(
        "auto", description="a copy on the device or in CPU memory when every weight is trained; auto: when needed"
    )
    refresh_every: NonNegativeInt = Field(0, description="iterations between refreshes; 0: never")
    mix: float = Field(0.6, gt=0, le=1, description="share of the policy in a refreshed reference")


class UpdateSection(Section, UpdateSettings, OptimizerSettings):
    """How stored rollouts change the policy."""

    memory_settings = frozenset({"micro_batch_size"})
    optional_settings = frozenset({"ema"})

    learning_rate: float = Field(1e-5, gt=0, le=1e3, description="after warm-up")
    lr_scheduler_kwargs: dict[str, ScheduleValue] = Field(default_factory=dict)
    mismatch: MismatchSection = MismatchSection()
    parity: ParitySection = ParitySection()
    reference: ReferenceSection = ReferenceSection()

    def __post_init__(self) -> None:
        # The schedule is checked with the run, which determines its length.
        UpdateSettings.__post_init__(self)
