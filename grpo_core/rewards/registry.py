"""The rewards by name, each imported when it is built.

To add a reward, write its module and name it in `REWARDS`.
"""

import dataclasses
import difflib
import importlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from pydantic import ValidationError

from grpo_core.errors import InputError

if TYPE_CHECKING:
    from grpo_core.rewards.reward import Reward

REWARDS: Mapping[str, str] = MappingProxyType(
    {
        "ssim": "similarity.pixels:SsimReward",
        "psnr": "similarity.pixels:PsnrReward",
        "r2": "similarity.pixels:R2Reward",
        "mse": "similarity.pixels:MseReward",
        "lpips": "similarity.lpips:LpipsReward",
        "text_accuracy": "ocr.text_accuracy:TextAccuracyReward",
        "clip_score": "embedding.clip_score:ClipScoreReward",
        "aesthetic": "embedding.aesthetic:AestheticReward",
        "pickscore": "judges.preference:PickScoreReward",
        "hpsv2": "judges.preference:HpsV2Reward",
        "jpeg": "image_statistics.statistics:JpegReward",
        "edge_density": "image_statistics.statistics:EdgeDensityReward",
        "sharpness": "image_statistics.statistics:SharpnessReward",
        "colour_entropy": "image_statistics.statistics:ColourEntropyReward",
        "diversity": "image_statistics.diversity:DiversityReward",
        "answer": "text.answer:AnswerReward",
        "format": "text.format:FormatReward",
        "box_iou": "text.box_iou:BoxIouReward",
        "reward_model": "judges.reward_model:RewardModelReward",
        "judge": "judges.judge:JudgeReward",
        "function": "functions:FunctionReward",
        "remote": "remote.reward:RemoteReward",
    }
)
"""Every reward that a configuration may name: its module in this package, and its class."""


def reward_reference(name: str) -> str:
    """Return the reward's class as ``package.module:name``; the class is not imported.

    Raises:
        InputError: there is no such reward.
    """
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
    """Build the reward with these settings, the others at their defaults; loads no weights.

    Raises:
        InputError: no such reward, no such setting, or a value that is not accepted.
    """
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
    """Turn pydantic's first complaint into place, value and hint."""
    found = error.errors(include_url=False)[0]
    setting = str(found["loc"][0]) if found["loc"] else ""
    raised = found.get("ctx", {}).get("error")
    if isinstance(raised, InputError):
        # The check of a single setting leaves the place to be filled in.
        return InputError(raised.place or f"rewards.{name}.{setting}", raised.value, raised.hint)
    value = settings.get(setting, found["input"])
    return InputError(f"rewards.{name}.{setting}", value, f"{found['msg'].replace(' should ', ' must ')}.")


def _nearest(given: str, known: Sequence[str]) -> str:
    if not known:
        return "It takes no settings."
    within = [name for name in known if len(str(given)) > 2 and str(given).lower() in name]
    close = list(dict.fromkeys([*within, *difflib.get_close_matches(str(given), known, n=3)]))[:3]
    listed = f"Known: {', '.join(known)}."
    return f"Did you mean {' or '.join(close)}? {listed}" if close else listed
