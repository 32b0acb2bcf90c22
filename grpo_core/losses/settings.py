"""Every option of the losses, and what each loss accepts; checked before torch, which takes seconds, is imported."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat

from grpo_core.errors import InputError
from grpo_core.settings import check_fields
from grpo_core.user_code.functions import REFERENCE, UserFunction, load_function
from grpo_core.uses import Uses

ImportanceLevel = Literal["token", "sequence"]
MismatchMode = Literal["none", "truncate", "mask"]
KlEstimator = Literal["k1", "k2", "k3"]
LossKlEstimator = KlEstimator | Literal["exact"]


@dataclass(frozen=True)
class MismatchSettings:
    """How the mismatch ratio becomes a weight.

    Attributes:
        mode: truncate clamps exp(old - rollout) to [floor, cap] (TIS); mask sets it to 0 outside (IcePop).
        level: one ratio per token, or their product over a row.
        cap: upper bound.
        floor: lower bound.
    """

    mode: MismatchMode = "none"
    level: ImportanceLevel = "token"
    cap: Annotated[float, Field(ge=1)] = 3.0
    floor: Annotated[float, Field(ge=0, le=1)] = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "update.mismatch")
        if self.floor >= self.cap:
            hint = "A ratio of 1 is perfect agreement; give a number from 0 to 1, below the cap."
            raise InputError("update.mismatch.floor", self.floor, hint)


@dataclass(frozen=True)
class LossTraits:
    """The functions of one loss, by name, and what distinguishes its options from those of another.

    Attributes:
        reduction: makes one number of one value per token; a KL is reduced the same way.
        importance_levels: that the loss is defined for; the first is the default.
        clips: whether the ratio is clipped, so that `delta` has a meaning.
        uses_mismatch_weights: the term contains the mismatch weights; otherwise it is multiplied by them.
        reads_gaussians: the term needs the Gaussians of denoising steps, which tokens do not have.
        reads_row: the term of a token depends on the log-probs of its row's other tokens, whatever the level.
        settings: defaults of the numbers that only this loss has, all of them above 0.
    """

    term: str = "clipped"
    reduction: str = "mean_of_row_means"
    importance_levels: tuple[ImportanceLevel, ...] = ("token", "sequence")
    clips: bool = False
    uses_mismatch_weights: bool = False
    reads_gaussians: bool = False
    reads_row: bool = False
    settings: Mapping[str, float] = field(default_factory=dict)


_SAPO = {"sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05}
_VESPO = {"vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0, "vespo_lambda_neg": 2.0}

LOSSES: Mapping[str, LossTraits] = MappingProxyType(
    {
        "grpo": LossTraits(clips=True),
        "bnpo": LossTraits(reduction="mean_of_tokens", clips=True),
        "dr_grpo": LossTraits(reduction="constant_length_mean", clips=True),
        "dapo": LossTraits(reduction="mean_of_expected_tokens", clips=True),
        "gspo": LossTraits(importance_levels=("sequence",), clips=True),
        "luspo": LossTraits(reduction="mean_of_row_sums", importance_levels=("sequence",), clips=True),
        "cispo": LossTraits("cispo", "mean_of_expected_tokens", ("token",), settings={"ratio_cap": 5.0}),
        "sapo": LossTraits("sapo", settings=_SAPO),
        "vespo": LossTraits(
            "vespo",
            "mean_of_expected_tokens",
            ("token",),
            uses_mismatch_weights=True,
            reads_row=True,
            settings=_VESPO,
        ),
        "grpo_guard": LossTraits("grpo_guard", importance_levels=("token",), clips=True, reads_gaussians=True),
        "flow_dppo": LossTraits(
            "flow_dppo", importance_levels=("token",), reads_gaussians=True, settings={"dppo_threshold": 1e-5}
        ),
    }
)
"""By the name in `update.loss`."""


@dataclass(frozen=True)
class LossSettings:
    """Select the loss and its coefficients.

    Attributes:
        loss: a name in docs/algorithm.md, or your function as `package.module:function` or `file.py:function`.
        importance_level: one ratio per token, or one per sequence; None: the loss's default.
        clip_range: the ratio is clipped from below at 1 - clip_range.
        clip_range_high: from above at 1 + clip_range_high; None: as clip_range.
        delta: cap on the ratio of the unclipped branch, above 1 + clip_range_high.
        loss_settings: numbers that only one loss has. cispo: ratio_cap; sapo: sapo_temperature_pos, _neg, its tau by
            the sign of A; vespo: vespo_k_pos, vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg, its k and lambda
            likewise; flow_dppo: dppo_threshold, in nats. Your function reads any.
        kl_coef: weight of the KL to the reference, added after masks, clipping and weights.
        kl_estimator: k1, k2 or k3 of the sampled actions, or of denoising steps the exact KL of their distributions.
        kl_importance_correction: multiply the KL by the importance ratio, gradient included, and by the mismatch
            weights; the exact KL needs neither.
        entropy_coef: weight of the bonus, the mean entropy of the trained tokens.
        mismatch: weights for a sampler that is not the policy.
        off_policy_threshold: rows with A < 0 from which the policy moved by more nats per token have no policy term
            (DeepSeek-V3.2, arXiv:2512.02556).
    """

    loss: Annotated[str, Uses.CODE] = "grpo"
    importance_level: ImportanceLevel | None = None
    clip_range: Annotated[float, Field(gt=0, lt=1)] = 0.2
    clip_range_high: PositiveFloat | None = None
    delta: PositiveFloat | None = None
    loss_settings: Mapping[str, float] = field(default_factory=dict)
    kl_coef: NonNegativeFloat = 0.0
    kl_estimator: LossKlEstimator = "k3"
    kl_importance_correction: bool = True
    entropy_coef: NonNegativeFloat = 0.0
    mismatch: MismatchSettings = field(default_factory=MismatchSettings)
    off_policy_threshold: PositiveFloat | None = None

    def __post_init__(self) -> None:
        check_fields(self, "update")
        if self.loss not in LOSSES:
            _require_reference(self.loss)
        self._check_level()
        self._check_loss_settings()
        self._check_bounds()

    @property
    def own(self) -> Mapping[str, float]:
        """The numbers that only this loss has, defaults included."""
        return {**self.traits.settings, **self.loss_settings}

    @property
    def traits(self) -> LossTraits:
        """What the loss by that name accepts; any for a user's function."""
        return LOSSES.get(self.loss, LossTraits())

    @property
    def measures_drift(self) -> bool:
        """Whether the loss can read how far an update has moved denoising steps; a user's function may."""
        return self.traits.reads_gaussians or self.loss not in LOSSES

    @property
    def couples_actions(self) -> bool:
        """Whether the gradient by an action's log-prob can depend on those of its row's other actions."""
        mismatch = self.mismatch.mode != "none" and self.mismatch.level == "sequence"
        by_row = self.level == "sequence" or self.traits.reads_row or mismatch
        return by_row or self.off_policy_threshold is not None or self.loss not in LOSSES

    @property
    def level(self) -> ImportanceLevel:
        """The importance level, the loss's default if none is set."""
        return self.importance_level or self.traits.importance_levels[0]

    @property
    def upper_clip_range(self) -> float:
        """clip_range_high, or clip_range if none is set."""
        return self.clip_range if self.clip_range_high is None else self.clip_range_high

    def _check_level(self) -> None:
        levels = self.traits.importance_levels
        if self.level not in levels:
            other = "gspo" if self.level == "sequence" else "grpo"
            hint = f"{self.loss} is defined with {levels[0]} ratios; set it to {levels[0]}, or update.loss to {other}."
            raise InputError("update.importance_level", self.level, hint)
        if self.traits.uses_mismatch_weights and self.mismatch.mode != "none" and self.mismatch.level != "token":
            hint = f"{self.loss} multiplies the token weights of a row itself; set it to token, or choose another loss."
            raise InputError("update.mismatch.level", self.mismatch.level, hint)

    def _check_loss_settings(self) -> None:
        known = self.traits.settings
        for name, value in self.loss_settings.items() if self.loss in LOSSES else ():
            place = f"update.loss_settings.{name}"
            if name not in known:
                owned = f"only {', '.join(known)}" if known else "none"
                raise InputError(place, value, f"{self.loss} has {owned}; leave it out.")
            if value <= 0:
                raise InputError(place, value, "It has to be above 0.")
            if name == "ratio_cap" and value < 1:
                hint = "It caps the ratio itself, not its distance from 1; give at least 1, for example 5.0."
                raise InputError(place, value, hint)

    def _check_bounds(self) -> None:
        if self.delta is None:
            return
        if not self.traits.clips:
            clipping = ", ".join(name for name, traits in LOSSES.items() if traits.clips)
            hint = f"{self.loss} does not clip; leave it out, or choose one of {clipping}."
            raise InputError("update.delta", self.delta, hint)
        bound = 1 + self.upper_clip_range
        if not self.delta > bound:
            hint = f"It bounds ratios beyond the upper clip; give more than 1 + clip_range_high = {bound:g}."
            raise InputError("update.delta", self.delta, hint)


@dataclass(frozen=True)
class ImplicitPair:
    """DiffusionNFT's loss of a noised image: the errors of two policies at old +- beta (policy - old).

    Attributes:
        clip: bound of |A|, at which one of both errors counts alone.
    """

    beta: float
    clip: float

    @property
    def with_old(self) -> bool:
        """Whether the old policy's velocity is needed where it is not the policy's own."""
        return True


@dataclass(frozen=True)
class SignedRow:
    """The loss of a noised image under the policy alone: A' t^level_power / p l^p.

    l is the mean square of velocity - (noise - image), t the noise level and A' the advantage within a bound.

    Attributes:
        bound: largest |A'|; None: none.
        soft: A' approaches the bound as bound tanh(A / bound); otherwise A is cut there.
        scale: A' per A.
        error_power: p; None: in place of l^p / p t l over the error's mean absolute value, a constant.
        level_power: exponent of the weight of a level.
        clip_range: bound of the ratio exp(old policy's error - error) from 1; None: no ratio.
    """

    bound: float | None = None
    soft: bool = False
    scale: float = 1.0
    error_power: float | None = None
    level_power: float = 0.0
    clip_range: float | None = None

    @property
    def with_old(self) -> bool:
        """Whether the old policy's velocity is needed where it is not the policy's own."""
        return self.clip_range is not None


VelocityRow = ImplicitPair | SignedRow


def custom_loss_digest(name: str) -> str | None:
    """Return the sha256 of a custom loss's code; None for a loss of LOSSES."""
    return None if name in LOSSES else load_custom_loss(name).code.digest


def load_custom_loss(name: str) -> UserFunction:
    """Import a user's function as a loss; InputError if there is none, or its module cannot be imported."""
    _require_reference(name)
    return load_function("update.loss", name)


def _require_reference(name: str) -> None:
    """Refuse what is neither a loss nor written as a function; nothing is imported, since reading runs no code."""
    if not REFERENCE.fullmatch(name):
        close = difflib.get_close_matches(name, LOSSES, n=1)
        suggestion = f"Did you mean {close[0]}? " if close else ""
        hint = f"{suggestion}Choose one of {', '.join(LOSSES)}, or name your own function as package.module:function."
        raise InputError("update.loss", name, hint)
