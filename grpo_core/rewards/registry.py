"""The rewards by name, and how one is built from a configuration."""

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from grpo_core.errors import InputError
from grpo_core.rewards.embedding.aesthetic import AestheticReward
from grpo_core.rewards.embedding.clip_score import ClipScoreReward
from grpo_core.rewards.functions.reward import FunctionReward
from grpo_core.rewards.image_statistics.colour_entropy import ColourEntropyReward
from grpo_core.rewards.image_statistics.diversity import DiversityReward
from grpo_core.rewards.image_statistics.edge_density import EdgeDensityReward
from grpo_core.rewards.image_statistics.jpeg import JpegReward
from grpo_core.rewards.image_statistics.sharpness import SharpnessReward
from grpo_core.rewards.judges.judge import JudgeReward
from grpo_core.rewards.judges.preference import HpsV2Reward, PickScoreReward
from grpo_core.rewards.judges.reward_model import RewardModelReward
from grpo_core.rewards.ocr.text_accuracy import TextAccuracyReward
from grpo_core.rewards.protocol import Reward
from grpo_core.rewards.remote.reward import RemoteReward
from grpo_core.rewards.similarity.lpips import LpipsReward
from grpo_core.rewards.similarity.mse import MseReward
from grpo_core.rewards.similarity.psnr import PsnrReward
from grpo_core.rewards.similarity.ssim import SsimReward
from grpo_core.rewards.text.answer import AnswerReward
from grpo_core.rewards.text.box_iou import BoxIouReward
from grpo_core.rewards.text.format import FormatReward

_KINDS: tuple[type[Reward], ...] = (
    SsimReward,
    PsnrReward,
    MseReward,
    LpipsReward,
    TextAccuracyReward,
    ClipScoreReward,
    AestheticReward,
    PickScoreReward,
    HpsV2Reward,
    JpegReward,
    EdgeDensityReward,
    SharpnessReward,
    ColourEntropyReward,
    DiversityReward,
    AnswerReward,
    FormatReward,
    BoxIouReward,
    RewardModelReward,
    JudgeReward,
    FunctionReward,
    RemoteReward,
)

REWARDS: Mapping[str, type[Reward]] = MappingProxyType({str(kind.name): kind for kind in _KINDS})
"""Every reward that a configuration may name; the arguments of its class are its settings."""


def reward_module(name: str) -> str:
    """Return the dotted name of the module that implements a reward."""
    return REWARDS[name].__module__


def build_reward(name: str, settings: Mapping[str, object] | None = None) -> Reward:
    """The reward of that name with these settings, the others at their defaults; loads no weights.

    Raises:
        InputError: no such reward, no such setting, or a value that will not do.
    """
    settings = settings or {}
    if name not in REWARDS:
        raise InputError("rewards", name, f"There is no such reward. {_nearest(name, tuple(REWARDS))}")
    build: Callable[..., Reward] = REWARDS[name]
    known = tuple(inspect.signature(build).parameters)
    for key in settings:
        if key not in known:
            hint = f"The reward {name} has no such setting. {_nearest(key, known)}"
            raise InputError(f"rewards.{name}", key, hint)
    return build(**settings)


def _nearest(given: str, known: Sequence[str]) -> str:
    if not known:
        return "It takes no settings."
    within = [name for name in known if len(str(given)) > 2 and str(given).lower() in name]
    close = list(dict.fromkeys([*within, *difflib.get_close_matches(str(given), known, n=3)]))[:3]
    listed = f"Known: {', '.join(known)}."
    return f"Did you mean {' or '.join(close)}? {listed}" if close else listed
