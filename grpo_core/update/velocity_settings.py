"""How finished images change a denoising model: what the methods that match velocities share, and what each has."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from grpo_core.losses.settings import ImplicitPair, SignedRow, VelocityRow
from grpo_core.settings import check_fields
from grpo_core.update.settings import StepSettings

VelocityMethod = Literal["nft", "awm", "v_grpo", "ram"]
MAX_MATCHED_STALENESS = 16
"""Versions between an image's policy and the trained one: in two dimensions, images of 16 versions before cost neither
reward nor KL, where nothing corrects for them (docs/algorithm.md)."""


@dataclass(frozen=True)
class VelocitySettings(StepSettings):
    """Options that all methods share.

    Attributes:
        timesteps_per_image: noise levels that each image is trained at in an epoch, the same ones for all images of a
            prompt; None: all that it was denoised over.
        shared_noise: the images of a prompt have one noise at a level too.
        kl_coef: weight of the squared distance of the velocity from the reference's, which alone stops the training.
    """

    timesteps_per_image: PositiveInt | None = None
    shared_noise: bool = False
    kl_coef: NonNegativeFloat = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "update")
        self.refuse_two_sizes()

    @property
    def with_reference(self) -> bool:
        """Whether the reference is needed."""
        return self.kl_coef > 0

    @property
    def row(self) -> VelocityRow:
        """The loss of a noised image."""
        raise NotImplementedError

    @property
    def cautions(self) -> tuple[str, ...]:
        """What a run with these settings has to expect."""
        return () if self.with_reference else ("kl_coef 0: nothing stops the policy when the reward no longer rises",)


@dataclass(frozen=True)
class NftSettings(VelocitySettings):
    """Options of one update by DiffusionNFT (Zheng et al., 2025, arXiv:2509.16117).

    Attributes:
        nft_beta: distance of the two implicit policies, old +- nft_beta (policy - old), from the old one. A smaller one
            moves the policy further.
        advantage_clip: bound of |A|, at which an image is wholly positive or wholly negative.
        old_decay: largest decay d of the old policy, which samples: after update i it becomes d * old + (1 - d) *
            policy, with d = min(old_decay_step * i, old_decay). 0: it is the policy before the update.
        old_decay_step: growth of the decay with each update.
    """

    nft_beta: PositiveFloat = 1.0
    advantage_clip: PositiveFloat = 5.0
    old_decay: Annotated[float, Field(ge=0, lt=1)] = 0.5
    old_decay_step: PositiveFloat = 0.001

    @property
    def row(self) -> ImplicitPair:
        """The errors of both implicit policies."""
        return ImplicitPair(self.nft_beta, self.advantage_clip)

    def old_policy_decay(self, update: int) -> float:
        """Return min(old_decay_step * update, old_decay)."""
        return min(self.old_decay_step * update, self.old_decay)


@dataclass(frozen=True)
class AwmSettings(VelocitySettings):
    """Options of one update by advantage weighted matching (Xue et al., 2025, AWM, arXiv:2509.25050).

    Attributes:
        advantage_clip: bound of |A|, at which an image is wholly positive or wholly negative.
        error_power: p of an image's loss A t^level_power / p l^p with its error l at the noise level t; ghuber_power in
            AWM's code.
        level_power: exponent of the weight of a level; 0 weighs all alike.
        clip_range: bound of the ratio exp(error of the policy before the update - error); None: no ratio, and so no
            pass under that policy.
    """

    advantage_clip: PositiveFloat = 1.0
    error_power: Annotated[float, Field(gt=0, le=1)] = 0.25
    level_power: NonNegativeFloat = 1.0
    clip_range: Annotated[float | None, Field(gt=0, lt=1)] = None

    @property
    def row(self) -> SignedRow:
        """A within +-advantage_clip, errors by their power."""
        return SignedRow(
            bound=self.advantage_clip,
            error_power=self.error_power,
            level_power=self.level_power,
            clip_range=self.clip_range,
        )


@dataclass(frozen=True)
class VGrpoSettings(VelocitySettings):
    """Options of one update by V-GRPO (2026, arXiv:2604.23380).

    Attributes:
        advantage_clip: n of n tanh(A / n).
        clip_range: bound of the ratio exp(error of the policy before the update - error); None: no ratio, and so no
            pass under that policy.
    """

    advantage_clip: PositiveFloat = 3.0
    clip_range: Annotated[float | None, Field(gt=0, lt=1)] = None

    @property
    def row(self) -> SignedRow:
        """A softly within +-advantage_clip, errors over their size."""
        return SignedRow(bound=self.advantage_clip, soft=True, clip_range=self.clip_range)


@dataclass(frozen=True)
class RamSettings(VelocitySettings):
    """Options of one update by RAM (2026, arXiv:2605.10759).

    Attributes:
        reward_multiplier: scale of A, the centred reward with advantages.scale none. Outlying images win in long runs,
            the later the smaller it is; awm and v_grpo do not have this fault.
        kl_coef: weight of the squared distance of the velocity from the reference's, which alone stops the training.
    """

    reward_multiplier: PositiveFloat = 1.0
    kl_coef: NonNegativeFloat = 1.0

    @property
    def cautions(self) -> tuple[str, ...]:
        """Also that it breaks late."""
        late = f"reward_multiplier {self.reward_multiplier:g}: in long runs outlying images win; awm does not have this"
        return (*super().cautions, late)

    @property
    def row(self) -> SignedRow:
        """The error itself, at any level."""
        return SignedRow(scale=self.reward_multiplier, error_power=1.0)


VELOCITY_METHODS: Mapping[VelocityMethod, type[VelocitySettings]] = MappingProxyType(
    {"nft": NftSettings, "awm": AwmSettings, "v_grpo": VGrpoSettings, "ram": RamSettings}
)
"""By the name in update.algorithm."""
