"""The rewards by name, each imported when it is built, what one does in the mix, and when a guardrail has fallen.

To add a reward, write its module and name it in `REWARDS`.
"""

import dataclasses
import difflib
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, ValidationError

from grpo_core.errors import InputError
from grpo_core.settings import check_fields, type_hint

if TYPE_CHECKING:
    from grpo_core.rewards.reward import Reward

Role = Literal["sum", "gate"]
Normalization = Literal["none", "group", "running", "range"]
MissingRewards = Literal["group_mean", "renormalize", "drop", "zero"]


@dataclass(frozen=True)
class RewardTerm:
    """A reward that adds to the others, or a gate that multiplies what they add up to.

    A gate is for a condition without which nothing else counts. It makes 0 of the other rewards, so these should be 0
    at worst, with weights above 0: a gate of 0 lifts a penalty.

    Attributes:
        weight: w; 0: the reward is only measured. A gate has none and keeps 1.
        role: sum: w times the value is added; gate: the value multiplies, one below 0 as 0.
        threshold: of a gate: 1 from this value on, 0 below it; None: the value itself.
        clamp: lowest and highest value, before all other steps.
        normalize: how the advantages see a reward that adds. range: by `range`. group: less the mean of the group, over
            its standard deviation. running: the same by all values so far.
        range: of normalize: range: the values that become 0 and 1; others follow the line, beyond it too unless
            clamped.
    """

    weight: float = 1.0
    role: Role = "sum"
    threshold: float | None = None
    clamp: tuple[float, float] | None = None
    normalize: Normalization = "none"
    range: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        check_fields(self, "rewards")
        for field in ("clamp", "range"):
            interval = getattr(self, field)
            if interval is not None and not interval[0] < interval[1]:
                raise InputError(f"rewards.{field}", interval, "Give the lower number first.")
        if self.normalize == "range" and self.range is None:
            raise InputError("rewards.range", None, "normalize is range; give the values that become 0 and 1.")
        if self.normalize != "range" and self.range is not None:
            raise InputError("rewards.range", self.range, "It needs normalize: range; set that, or leave this out.")
        if self.role == "gate":
            self._check_gate()
        elif self.threshold is not None:
            raise InputError("rewards.threshold", self.threshold, "Only a gate has one; set role: gate.")

    def _check_gate(self) -> None:
        if self.weight != 1:
            raise InputError("rewards.weight", self.weight, "A gate multiplies and has no weight; leave it out.")
        if self.normalize in ("group", "running"):
            hint = "What multiplies has to mean the same in every group; choose none or range."
            raise InputError("rewards.normalize", self.normalize, hint)
        if self.threshold is None:
            return
        for field in ("clamp", "range"):
            if getattr(self, field) is not None:
                hint = "A threshold makes the gate 0 or 1 by the unscaled value; leave one of the two out."
                raise InputError(f"rewards.{field}", getattr(self, field), hint)


@dataclass(frozen=True)
class HackingRule:
    """When a guardrail's fall counts as a sign.

    With the defaults and a reward that truly rises, a guardrail that only fluctuates (independent, normal, by 6 to 30 %
    of its level) raised a false sign somewhere in at most 2 % of simulated runs of 5 to 40 evaluations. A fall to less
    than half showed in 87 to 100 % of runs (at 2 to 15 % noise), 3 to 8 evaluations after it had begun.

    Attributes:
        rise: share of its level by which the reward must have risen.
        fall: share of its level by which the guardrail must have fallen.
        patience: evaluations in a row, to the last, at which the guardrail must be that much lower. A level is the mean
            of so many evaluations.
        noise: standard errors that both changes must exceed, from the differences between successive evaluations, so
            that there is no sign before the fourth; 0: none.
    """

    rise: PositiveFloat = 0.05
    fall: Annotated[float, Field(gt=0, le=1)] = 0.1
    patience: Annotated[int, Field(ge=1, le=1000)] = 3
    noise: NonNegativeFloat = 5.0

    def __post_init__(self) -> None:
        check_fields(self, "guardrails")


REWARDS: Mapping[str, str] = MappingProxyType(
    {
        "ssim": "similarity.pairs:SsimReward",
        "psnr": "similarity.pairs:PsnrReward",
        "r2": "similarity.pairs:R2Reward",
        "mse": "similarity.pairs:MseReward",
        "lpips": "similarity.lpips:LpipsReward",
        "text_accuracy": "ocr.text_accuracy:TextAccuracyReward",
        "clip_score": "embedding.clip_rewards:ClipScoreReward",
        "aesthetic": "embedding.clip_rewards:AestheticReward",
        "pickscore": "embedding.preference:PickScoreReward",
        "hpsv2": "embedding.preference:HpsV2Reward",
        "jpeg": "image_statistics:JpegReward",
        "edge_density": "image_statistics:EdgeDensityReward",
        "sharpness": "image_statistics:SharpnessReward",
        "colour_entropy": "image_statistics:ColourEntropyReward",
        "diversity": "embedding.diversity:DiversityReward",
        "answer": "text.rules:AnswerReward",
        "format": "text.rules:FormatReward",
        "box_iou": "text.boxes:BoxIouReward",
        "reward_model": "judges.reward_model:RewardModelReward",
        "judge": "judges.judge:JudgeReward",
        "function": "functions.reward:FunctionReward",
        "remote": "remote.reward:RemoteReward",
    }
)
"""Every reward that a configuration may name: its module in this package, and its class."""


def reward_reference(name: str) -> str:
    """Return the reward's class as ``package.module:name``, not imported; InputError without such a reward."""
    if name not in REWARDS:
        raise InputError("rewards", name, f"There is no such reward. {_nearest(name, tuple(REWARDS))}")
    return f"{__package__}.{REWARDS[name]}"


def reward_class(name: str) -> "type[Reward]":
    """Import a reward's class; its fields are the reward's settings. Raises as :func:`reward_reference`."""
    module, _, class_name = reward_reference(name).partition(":")
    found: type[Reward] = getattr(importlib.import_module(module), class_name)
    return found


def reward_settings(name: str) -> dict[str, object]:
    """Return the settings of a reward with their defaults; raises as :func:`reward_reference`."""
    return {each.name: each.default for each in dataclasses.fields(reward_class(name))}  # type: ignore[arg-type]


def build_reward(name: str, settings: Mapping[str, object] | None = None) -> "Reward":
    """Build the reward with these settings, the others at their defaults, without weights; InputError for any other."""
    settings = settings or {}
    known = tuple(reward_settings(name))
    for key in settings:
        if key not in known:
            hint = f"The reward {name} has no such setting. {_nearest(key, known)}"
            raise InputError(f"rewards.{name}", key, hint)
    try:
        return reward_class(name)(**settings)
    except ValidationError as error:
        # Not chained: pydantic's own message repeats the input, which may be a secret.
        raise _first_error(name, settings, error) from None


def _first_error(name: str, settings: Mapping[str, object], error: ValidationError) -> InputError:
    details = error.errors(include_url=False)
    found = details[0]
    setting = str(found["loc"][0]) if found["loc"] else ""
    raised = found.get("ctx", {}).get("error")
    if isinstance(raised, InputError):
        # The check of a single setting leaves the place to be filled in.
        return InputError(raised.place or f"rewards.{name}.{setting}", raised.value, raised.hint)
    value = settings.get(setting, found["input"])
    return InputError(f"rewards.{name}.{setting}", value, type_hint(details))


def _nearest(given: str, known: Sequence[str]) -> str:
    if not known:
        return "It takes no settings."
    within = [name for name in known if len(str(given)) > 2 and str(given).lower() in name]
    close = list(dict.fromkeys([*within, *difflib.get_close_matches(str(given), known, n=3)]))[:3]
    listed = f"Known: {', '.join(known)}."
    return f"Did you mean {' or '.join(close)}? {listed}" if close else listed
