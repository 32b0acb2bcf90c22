"""The sections of a configuration about rewards, guardrails, advantages and the policy update."""

import difflib
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationInfo,
    field_validator,
)
from pydantic_core import PydanticKnownError

from configs.validation import NAME_PATTERN, Name, Section
from grpo_core.advantages.settings import AdvantageSettings
from grpo_core.losses.settings import LossKlEstimator, MismatchSettings, custom_loss_digest
from grpo_core.policies.trained.settings import Reference
from grpo_core.rewards.registry import HackingRule, RewardTerm
from grpo_core.streams import Stream
from grpo_core.update.settings import NftSettings, OptimizerSettings, ScheduleValue, StepSettings, UpdateSettings
from grpo_core.uses import Uses

if TYPE_CHECKING:
    from grpo_core.parity import ParityTolerance

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
        None, description="name in tables and plots; null: the reward's name, of `function` the function's"
    )
    datasets: Annotated[tuple[str, ...] | None, Uses.NOTHING] = Field(
        None, description="score these datasets only; null: all"
    )
    where: Annotated[dict[str, tuple[Scalar, ...]] | None, Uses.NOTHING] = Field(
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
    settings: Annotated[dict[str, object], Uses.OF_REWARD] = Field(
        default_factory=dict, description="the reward's own; `grpo rewards list` has them"
    )

    @property
    def label(self) -> str:
        """The name in tables and plots."""
        return reward_label({"name": self.name, "reward": self.reward, "settings": self.settings})

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


GRPO: Literal["grpo"] = "grpo"
"""The algorithm of an update that names none."""


class AdvantagesSection(Section, AdvantageSettings):
    """How rewards become advantages."""

    max_rounds: PositiveInt = Field(4, description="maximum number of sampling rounds per iteration, with redraw")


_TOLERANCES: Mapping[Stream, tuple[tuple[float, float], ...]] = MappingProxyType(
    {"tokens": ((1e-3, 1e-4),), "denoising": ((1e-5, 1e-6), (1e-3, 1e-4))}
)
"""Largest and mean difference by stream, in fp32 and in 16 bits; what these round of tokens depends on the model."""
_ENGINE_TOLERANCES = ((1e-3, 1e-4, 1e-3), (0.5, 0.05, 0.02))
"""Of tokens that an engine sampled, whose kernels round at other places: the least that is allowed as largest and mean
difference, and the share beyond, in fp32 and in 16 bits."""


class ParitySection(Section):
    """Largest allowed difference of stored and recomputed log-probs, in nats.

    Sampling tokens with a cache and scoring them in one pass round differently: by 7e-6 nats at most in fp32 on a tiny
    GLM-Image, in 16 bits by what the depth of the model and the entropy of the text make of their rounding.
    A denoising step is sampled and scored by the same pass, and its log-prob is a mean over the latents.
    """

    max_difference: PositiveFloat | None = Field(
        None,
        description="null: 1e-3 in fp32, and in 16 bits 40 times what these round of a logit; of denoising steps 1e-5 "
        "and 1e-3, and for a sum as much for each value",
    )
    mean_difference: PositiveFloat | None = Field(
        None,
        description="null: 1e-4 in fp32, and in 16 bits three times what these are expected to round at this depth and "
        "entropy; of denoising steps 1e-6 and 1e-4",
    )
    share_beyond: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="share of the tokens that may differ by more than max_difference; null: 0, and of tokens that an "
        "engine sampled 1e-3 in fp32 and 0.02 in 16 bits",
    )

    def tolerance(
        self,
        stream: Stream,
        *,
        in_fp32: bool,
        summed_values: int = 1,
        by_engine: bool = False,
        rounding: "ParityTolerance | None" = None,
    ) -> "ParityTolerance":
        """Return the tolerance, with the defaults of the stream and the precision filled in.

        Args:
            summed_values: how many values a log-prob is a sum over, which round each on their own; 1 for a mean.
            by_engine: whether rollout.engine is another than the policy itself.
            rounding: the tolerance of tokens in 16 bits; not needed for any other.
        """
        from grpo_core.parity import ParityTolerance

        precision, expected, beyond = 0 if in_fp32 else 1, 0.0, 0.0
        if stream == "tokens" and not in_fp32:
            assert rounding is not None, "it is computed from the tokens"
            largest, mean, expected = rounding.max_difference, rounding.mean_difference, rounding.rounding
        else:
            largest, mean = _TOLERANCES[stream][precision]
        if by_engine:
            floor, least, beyond = _ENGINE_TOLERANCES[precision]
            largest, mean = max(largest, floor), max(mean, least)
        return ParityTolerance(
            self.max_difference or largest * summed_values,
            self.mean_difference or mean * summed_values,
            beyond if self.share_beyond is None else self.share_beyond,
            expected,
        )


class MismatchSection(Section, MismatchSettings):
    """Correction by exp(old - rollout) where the sampler is not the policy that is trained (TIS, IcePop)."""


class ReferenceSection(Section):
    """The policy that the KL is measured against."""

    keyless = frozenset({"placement"})

    placement: Literal["auto"] | Reference = Field(
        "auto", description="a copy on the device or in CPU memory when every weight is trained; auto: when needed"
    )
    refresh_every: NonNegativeInt = Field(0, description="iterations between refreshes; 0: never")
    mix: float = Field(0.6, gt=0, le=1, description="share of the policy in a refreshed reference")


class BaseUpdateSection(Section, StepSettings, OptimizerSettings):
    """How stored rollouts change the policy, whatever the algorithm."""

    keyless = frozenset({"micro_batch_size", "offload_optimizer"})

    learning_rate: float = Field(1e-5, gt=0, le=1e3, description="after warm-up")
    lr_scheduler_kwargs: Annotated[dict[str, ScheduleValue], Uses.NOTHING] = Field(default_factory=dict)
    reference: ReferenceSection = ReferenceSection()

    def result_settings(self) -> dict[str, Any]:
        """Return the fields that determine results; the number of minibatches where it does."""
        values = super().result_settings()
        return values if self.minibatches is not None else {k: v for k, v in values.items() if k != "minibatches"}

    @property
    def objective(self) -> str:
        """Name of the loss."""
        raise NotImplementedError

    @property
    def custom_loss(self) -> str | None:
        """The sha256 of the code of a user's loss; None for one of grpo_core."""
        return None

    def importance_weights(self, default: MismatchSection) -> MismatchSection | None:
        """Return the correction for rows that other weights sampled, or the default; None if the algorithm has none."""
        return None

    def corrected(self, default: MismatchSection) -> Self:
        """Return the section with that correction switched on."""
        return self


class UpdateSection(BaseUpdateSection, UpdateSettings):
    """How stored rollouts change the policy by their importance ratios."""

    algorithm: Literal["grpo"] = Field(GRPO, description="grpo: importance ratios, with any of the losses")
    loss_settings: Annotated[dict[str, float], Uses.NOTHING] = Field(default_factory=dict)
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
        """The sha256 of the code of a user's loss; None for one of grpo_core."""
        return custom_loss_digest(self.loss)

    def importance_weights(self, default: MismatchSection) -> MismatchSection:
        """Return the configured correction, or the default."""
        return default if self.mismatch.mode == "none" else self.mismatch

    def corrected(self, default: MismatchSection) -> Self:
        """Return the section with that correction switched on."""
        return self.model_copy(update={"mismatch": self.importance_weights(default)})


def _of_denoising(algorithm: object) -> object:
    """Refuse an algorithm that no section of denoising has, with those that there are."""
    if algorithm not in (GRPO, "nft"):
        raise PydanticKnownError("literal_error", {"expected": "'grpo' or 'nft'"})
    return algorithm


class NftUpdateSection(BaseUpdateSection, NftSettings):
    """How stored images change the denoising model by DiffusionNFT."""

    algorithm: Annotated[Literal["nft"], BeforeValidator(_of_denoising)] = Field(
        "nft", description="nft: DiffusionNFT, a regression on finished images"
    )
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

    algorithm: Annotated[Literal["grpo"], BeforeValidator(_of_denoising)] = Field(
        GRPO, description="grpo: importance ratios, with any of the losses"
    )
    # Log-probs are means over thousands of values, so that ratios are within about 1e-4 of 1.
    clip_range: Annotated[float, Field(gt=0, lt=1)] = 1e-4
    learning_rate: float = Field(3e-4, gt=0, le=1e3, description="after warm-up")
    kl_estimator: LossKlEstimator = "exact"


ALGORITHMS: Mapping[Stream, Mapping[str, type[AnyUpdateSection]]] = MappingProxyType(
    {
        "tokens": MappingProxyType({GRPO: UpdateSection}),
        "denoising": MappingProxyType({GRPO: DenoisingUpdateSection, "nft": NftUpdateSection}),
    }
)
"""The section of a stream's update, by its `algorithm`."""


def update_section(stream: Stream, values: Any) -> type[AnyUpdateSection]:
    """Return the section that reads plain values of a stream's update: of their `algorithm`, or the nearest to it."""
    known = ALGORITHMS[stream]
    given = values.get("algorithm", GRPO) if isinstance(values, Mapping) else GRPO
    near = difflib.get_close_matches(str(given), known, n=1)
    return known[near[0] if near else GRPO]


def read_update(stream: Stream, values: Any, context: Any) -> Any:
    """Read plain values of a stream's update as its section; a section is returned as it is."""
    if isinstance(values, BaseUpdateSection):
        return values
    return update_section(stream, values).model_validate(values, context=context)


class StreamUpdatesSection(Section):
    """How stored rollouts change a policy of which several streams are trained: the update of each."""

    tokens: UpdateSection = UpdateSection()
    denoising: DenoisingUpdateSection | NftUpdateSection = DenoisingUpdateSection()

    @field_validator("denoising", mode="before")
    @classmethod
    def _by_algorithm(cls, values: Any, info: ValidationInfo) -> Any:
        return read_update("denoising", values, info.context)
