"""The sections of a configuration about the policy update."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveFloat, ValidationInfo, field_validator
from pydantic_core import PydanticKnownError

from configs.validation import Section
from grpo_core.errors import InputError
from grpo_core.losses.settings import LossKlEstimator, MismatchSettings, custom_loss_digest
from grpo_core.policies.trained.settings import Reference
from grpo_core.rollouts.streams import Stream
from grpo_core.update.optimizer_kinds import OptimizerValue
from grpo_core.update.settings import (
    WITH_LENGTH,
    BackwardPerStep,
    OptimizerSettings,
    ScheduleValue,
    StepSettings,
    UpdateSettings,
)
from grpo_core.update.velocity_settings import AwmSettings, NftSettings, RamSettings, VelocitySettings, VGrpoSettings
from grpo_core.uses import Uses

if TYPE_CHECKING:
    from grpo_core.parity import ParityTolerance

GRPO: Literal["grpo"] = "grpo"
"""The algorithm of an update that names none."""
_OF_DENOISING = "of denoising also by matching velocities: nft (DiffusionNFT), awm, v_grpo or ram"

_TOLERANCES: Mapping[Stream, tuple[tuple[float, float], ...]] = {
    "tokens": ((1e-3, 1e-4),),
    "denoising": ((1e-5, 1e-6), (1e-3, 1e-4)),
}
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
        description="null: 1e-3 in fp32, and in 16 bits by depth and entropy; of denoising steps 1e-5 and 1e-3, for a "
        "sum per value",
    )
    mean_difference: PositiveFloat | None = Field(
        None,
        description="null: 1e-4 in fp32, and in 16 bits by depth and entropy; of denoising steps 1e-6 and 1e-4",
    )
    share_beyond: float | None = Field(
        None,
        ge=0,
        lt=1,
        description="share of the tokens that may differ by more than max_difference; null: 0, of engines 1e-3 in fp32 "
        "and 0.02 in 16 bits",
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
        "auto", description="of a copy, which full training needs; auto: when needed"
    )
    refresh_every: NonNegativeInt = Field(0, description="iterations between refreshes; 0: never")
    mix: float = Field(0.6, gt=0, le=1, description="share of the policy in a refreshed reference")


class BaseUpdateSection(Section, StepSettings, OptimizerSettings):
    """How stored rollouts change the policy, whatever the algorithm."""

    keyless = frozenset({"micro_batch_size", "offload_optimizer"})

    learning_rate: float = Field(1e-5, gt=0, le=1e3, description="after warm-up")
    lr_scheduler_kwargs: Annotated[dict[str, ScheduleValue], Uses.NOTHING] = Field(default_factory=dict)
    optimizer_kwargs: Annotated[dict[str, OptimizerValue], Uses.NOTHING] = Field(default_factory=dict)
    reference: ReferenceSection = ReferenceSection()

    def result_settings(self) -> dict[str, Any]:
        """Return the fields that determine results; those that are seldom set where they are."""
        unset: dict[str, Any] = {
            "minibatches": None,
            "optimizer_kwargs": {},
            "shared_noise": False,
            "old_logprobs": "auto",
        }
        return {name: value for name, value in super().result_settings().items() if (name, value) not in unset.items()}

    def contradictions(self) -> Iterator[InputError]:
        """Yield settings that the optimizer or the schedule does not have."""
        yield from (InputError(*each) for each in self.foreign_to_the_optimizer())
        if self.offload_optimizer and self.optimizer != "adamw":
            hint = f"Only the moments of adamw; {self.optimizer} keeps its own: use adamw, or leave this out."
            yield InputError("offload_optimizer", True, hint)
        if self.warmup_steps and self.lr_scheduler == "constant":
            hint = "It needs lr_scheduler: constant_with_warmup, or another that warms up."
            yield InputError("warmup_steps", self.warmup_steps, hint)
        if self.total_steps is not None and self.lr_scheduler not in WITH_LENGTH:
            hint = f"The schedule {self.lr_scheduler} does not depend on its length; leave it out."
            yield InputError("total_steps", self.total_steps, hint)

    @property
    def chooses_steps(self) -> bool:
        """Whether denoising steps may be gone back one by one where memory asks for it."""
        return False

    def with_steps(self, steps: BackwardPerStep) -> Self:
        """Return the section with this choice, where it leaves one."""
        return self.model_copy(update={"backward_per_step": steps}) if self.chooses_steps else self

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

    keyless = BaseUpdateSection.keyless | {"backward_per_step"}

    algorithm: Literal["grpo"] = Field(GRPO, description=_OF_DENOISING)
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
    known = list(ALGORITHMS["denoising"])
    if algorithm not in known:
        raise PydanticKnownError("literal_error", {"expected": f"{', '.join(known[:-1])} or {known[-1]}"})
    return algorithm


class VelocityUpdateSection(BaseUpdateSection, VelocitySettings):
    """How stored images change the denoising model by matching velocities."""

    algorithm: str
    learning_rate: float = Field(3e-4, gt=0, le=1e3, description="after warm-up")

    def __post_init__(self) -> None:
        # The schedule is checked with the run, which determines its length.
        VelocitySettings.__post_init__(self)

    @property
    def objective(self) -> str:
        """Name of the loss."""
        return self.algorithm


class NftUpdateSection(VelocityUpdateSection, NftSettings):
    """How stored images change the denoising model by DiffusionNFT."""

    algorithm: Annotated[Literal["nft"], BeforeValidator(_of_denoising)] = Field("nft", description=_OF_DENOISING)


class AwmUpdateSection(VelocityUpdateSection, AwmSettings):
    """How stored images change the denoising model by advantage weighted matching."""

    algorithm: Annotated[Literal["awm"], BeforeValidator(_of_denoising)] = Field("awm", description=_OF_DENOISING)


class VGrpoUpdateSection(VelocityUpdateSection, VGrpoSettings):
    """How stored images change the denoising model by V-GRPO."""

    algorithm: Annotated[Literal["v_grpo"], BeforeValidator(_of_denoising)] = Field("v_grpo", description=_OF_DENOISING)


class RamUpdateSection(VelocityUpdateSection, RamSettings):
    """How stored images change the denoising model by RAM."""

    algorithm: Annotated[Literal["ram"], BeforeValidator(_of_denoising)] = Field("ram", description=_OF_DENOISING)


class DenoisingUpdateSection(UpdateSection):
    """How stored denoising steps change the policy."""

    algorithm: Annotated[Literal["grpo"], BeforeValidator(_of_denoising)] = Field(GRPO, description=_OF_DENOISING)
    # Log-probs are means over thousands of values, so that ratios are within about 1e-4 of 1.
    clip_range: Annotated[float, Field(gt=0, lt=1)] = 1e-4
    learning_rate: float = Field(3e-4, gt=0, le=1e3, description="after warm-up")
    kl_estimator: LossKlEstimator = "exact"

    @property
    def chooses_steps(self) -> bool:
        """True for auto."""
        return self.backward_per_step == "auto"


_AnyVelocityUpdate = NftUpdateSection | AwmUpdateSection | VGrpoUpdateSection | RamUpdateSection
AnyUpdateSection = UpdateSection | _AnyVelocityUpdate
AnyDenoisingUpdate = DenoisingUpdateSection | _AnyVelocityUpdate

ALGORITHMS: Mapping[Stream, Mapping[str, type[AnyUpdateSection]]] = {
    "tokens": {GRPO: UpdateSection},
    "denoising": {
        GRPO: DenoisingUpdateSection,
        "nft": NftUpdateSection,
        "awm": AwmUpdateSection,
        "v_grpo": VGrpoUpdateSection,
        "ram": RamUpdateSection,
    },
}
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


def change_algorithm(values: Any, overrides: Sequence[str]) -> None:
    """Drop from the plain values of a stored configuration what an algorithm named by the overrides does not have.

    All settings are stored, so those at their defaults are dropped too: of the same name they have others there.
    InputError for an algorithm of denoising that cannot be trained on what another one stores.
    """
    for path, _, chosen in (override.partition("=") for override in overrides):
        *parents, last = path.strip().split(".")
        update = values
        for name in parents:
            update = update.get(name) if isinstance(update, dict) else None
        if not isinstance(update, dict) or last != "algorithm" or parents[:1] != ["update"]:
            continue
        known, wanted = ALGORITHMS["denoising"], chosen.strip()
        now, was = known.get(wanted), known.get(update.get(last, GRPO))
        if now in (None, was) or was is None or "denoising" not in (values.get("policy") or {}).get("train", ()):
            continue
        if issubclass(was, UpdateSection):
            hint = "The stored rollouts have no final latents, since noisy steps were trained; leave it out."
            raise InputError(path.strip(), wanted, hint)
        if issubclass(now, UpdateSection):
            hint = "The stored rollouts have final latents and no noisy steps; choose one that matches velocities."
            raise InputError(path.strip(), wanted, hint)
        defaults = was().model_dump(mode="json")
        for name, value in [*update.items()]:
            if name not in now.model_fields or value == defaults.get(name):
                del update[name]


class StreamUpdatesSection(Section):
    """How stored rollouts change a policy of which several streams are trained: the update of each."""

    tokens: UpdateSection = UpdateSection()
    denoising: AnyDenoisingUpdate = DenoisingUpdateSection()

    @field_validator("denoising", mode="before")
    @classmethod
    def _by_algorithm(cls, values: Any, info: ValidationInfo) -> Any:
        return read_update("denoising", values, info.context)
