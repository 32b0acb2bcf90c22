"""The rewards by name, and how one is built from a configuration."""

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from grpo_core.errors import InputError
from grpo_core.rewards.completions.answer import AnswerReward
from grpo_core.rewards.likeness.lpips import LpipsReward
from grpo_core.rewards.likeness.psnr import PsnrReward
from grpo_core.rewards.likeness.ssim import SsimReward
from grpo_core.rewards.looks.jpeg import JpegReward
from grpo_core.rewards.protocol import Reward

REWARDS: Mapping[str, type[Reward]] = MappingProxyType(
    {
        SsimReward.name: SsimReward,
        PsnrReward.name: PsnrReward,
        LpipsReward.name: LpipsReward,
        JpegReward.name: JpegReward,
        AnswerReward.name: AnswerReward,
    }
)
"""Every reward that a configuration may name; the arguments of its class are its settings."""


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
            mend = f"The reward {name} has no such setting. {_nearest(key, known)}"
            raise InputError(f"rewards.{name}", key, mend)
    return build(**settings)


def _nearest(given: str, known: Sequence[str]) -> str:
    if not known:
        return "It takes no settings."
    close = difflib.get_close_matches(str(given), known, n=1)
    listed = f"Known: {', '.join(known)}."
    return f"Did you mean {close[0]}? {listed}" if close else listed
