"""The sections of a configuration about advantages and the policy update."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from configs.validation import ALL_AT_ONCE, Section
from grpo_core.advantages.settings import AdvantageSettings
from grpo_core.losses.settings import LossKlEstimator, MismatchSettings, custom_loss_digest
from grpo_core.optimizer.settings import OptimizerSettings, ScheduleValue
from grpo_core.policies.trained.choice import Reference
from grpo_core.streams import Stream
from grpo_core.update.settings import NftSettings, StepSettings, UpdateSettings

if TYPE_CHECKING:
    from grpo_core.parity import ParityTolerance


class AdvantagesSection(Section, AdvantageSettings):
    """How rewards become advantages."""

    max_rounds: PositiveInt = Field(4, description="maximum number of sampling rounds per iteration, with redraw")


_TOLERANCES: Mapping[Stream, tuple[tuple[float, float], tuple[float, float]]] = MappingProxyType(
    {"tokens": ((1e-3, 1e-4), (1.0, 0.05)), "denoising": ((1e-5, 1e-6), (1e-3, 1e-4))}
)
"""Largest and mean difference by stream, in fp32 and in 16 bits."""


class ParitySection(Section):
    """Largest allowed difference of stored and recomputed log-probs, in nats.

    Sampling tokens with a cache and scoring them in one pass round differently: by 7e-6 nats at most in fp32 on a tiny
    GLM-Image, by 1.6e-2 at most and 2.7e-3 on average in bf16. Deeper models differ more, in single tokens far more.
    A denoising step is sampled and scored by the same pass, and its log-prob is a mean over the latents.
    """

    max_difference: PositiveFloat | None = Field(
        None,
        description="null: 1e-3 in fp32 and 1.0 in 16 bits; of denoising steps 1e-5 and 1e-3, and for a sum as "
        "much for each value",
    )
    mean_difference: PositiveFloat | None = Field(
        None, description="null: 1e-4 in fp32 and 0.05 in 16 bits; of denoising steps 1e-6 and 1e-4"
    )

    def tolerance(self, stream: Stream, *, in_fp32: bool, summed_values: int = 1) -> "ParityTolerance":
        """Return the tolerance, with the defaults of the stream and the precision filled in.

        Args:
            summed_values: how many values a log-prob is a sum over, which round each on their own; 1 for a mean.
        """
        from grpo_core.parity import ParityTolerance

        largest, mean = _TOLERANCES[stream][0 if in_fp32 else 1]
        return ParityTolerance(
            self.max_difference or largest * summed_values, self.mean_difference or mean * summed_values
        )


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


class BaseUpdateSection(Section, StepSettings, OptimizerSettings):
    """How stored rollouts change the policy, whatever the algorithm."""

    memory_settings = frozenset({"micro_batch_size"})
    optional_settings = frozenset({"ema"})

    learning_rate: float = Field(1e-5, gt=0, le=1e3, description="after warm-up")
    lr_scheduler_kwargs: dict[str, ScheduleValue] = Field(default_factory=dict)
    reference: ReferenceSection = ReferenceSection()

    @property
    def objective(self) -> str:
        """Name of the loss."""
        raise NotImplementedError

    @property
    def custom_loss(self) -> str | None:
        """The sha256 of the source file of a user's loss; None for one of grpo_core."""
        return None

    def importance_weights(self, default: MismatchSection) -> MismatchSection | None:
        """Return the correction for rows that other weights sampled; None if the algorithm has none.

        Args:
            default: if none is configured.
        """
        return None

    def corrected(self, default: MismatchSection) -> Self:
        """Return the section with that correction switched on."""
        return self


class UpdateSection(BaseUpdateSection, UpdateSettings):
    """How stored rollouts change the policy by their importance ratios."""

    optional_settings = BaseUpdateSection.optional_settings | {"dppo_threshold", "algorithm"}

    algorithm: Literal["grpo"] = Field("grpo", description="grpo: importance ratios, with any of the losses")
    mismatch: MismatchSection = MismatchSection()
    parity: ParitySection = ParitySection()

    def __post_init__(self) -> None:
        # The schedule is checked with the run, which determines its length.
        UpdateSettings.__post_init__(self)

    @property
    def objective(self) -> str:
        """Name of the loss."""
        return self.loss

    @property
    def custom_loss(self) -> str | None:
        """The sha256 of the source file of a user's loss; None for one of grpo_core."""
        return custom_loss_digest(self.loss)

    def importance_weights(self, default: MismatchSection) -> MismatchSection:
        """Return the configured correction, or the default."""
        return default if self.mismatch.mode == "none" else self.mismatch

    def corrected(self, default: MismatchSection) -> Self:
        """Return the section with that correction switched on."""
        return self.model_copy(update={"mismatch": self.importance_weights(default)})


class NftUpdateSection(BaseUpdateSection, NftSettings):
    """How stored images change the denoising model by DiffusionNFT."""

    algorithm: Literal["nft"] = Field("nft", description="nft: DiffusionNFT, a regression on finished images")
    learning_rate: float = Field(3e-4, gt=0, le=1e3, description="after warm-up")

    def __post_init__(self) -> None:
        NftSettings.__post_init__(self)

    @property
    def objective(self) -> str:
        """Name of the loss."""
        return self.algorithm


AnyUpdateSection = UpdateSection | NftUpdateSection


class DenoisingUpdateSection(UpdateSection):
    """How stored denoising steps change the policy."""

    # Log-probs are means over thousands of values, so that ratios are within about 1e-4 of 1.
    clip_range: Annotated[float, Field(gt=0, lt=1)] = 1e-4
    learning_rate: float = Field(3e-4, gt=0, le=1e3, description="after warm-up")
    kl_estimator: LossKlEstimator = "exact"


class BothUpdateSection(UpdateSection):
    """How stored tokens change the token model, and stored denoising steps or images the decoder."""

    denoising: AnyUpdateSection

    @property
    def tokens(self) -> UpdateSection:
        """The section without the decoder's."""
        return UpdateSection.model_validate(
            {name: getattr(self, name) for name in UpdateSection.model_fields}, context=ALL_AT_ONCE
        )


class JointUpdateSection(BothUpdateSection):
    """The same with importance ratios for both."""

    denoising: DenoisingUpdateSection = DenoisingUpdateSection()


class JointNftUpdateSection(BothUpdateSection):
    """The same with DiffusionNFT for the decoder."""

    denoising: NftUpdateSection
