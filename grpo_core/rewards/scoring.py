"""A reward is asked, and what it answers is checked: one score a sample, each finite or a failure."""

import hashlib
import json
import logging
import math
from collections.abc import Mapping

from grpo_core.errors import InputError
from grpo_core.rewards.protocol import Reward, Score, ScoringBatch

_LOGGER = logging.getLogger(__name__)


def score_samples(reward: Reward, batch: ScoringBatch) -> list[Score]:
    """One score a sample; a value or raw quantity that is not finite is a failure, named in the log.

    Raises:
        InputError: the reward gave another number of scores than there are samples.
    """
    scores = list(reward.score(batch)) if len(batch) else []
    if len(scores) != len(batch):
        hint = f"It got {len(batch)} samples; a reward gives one score a sample, in order."
        raise InputError(f"reward {reward.name}", f"{len(scores)} scores", hint)
    checked = [_finite(score) for score in scores]
    for sample_id, score in zip(batch.sample_ids, checked, strict=True):
        if score.failure is not None:
            _LOGGER.warning("reward %s, sample %s: %s", reward.name, sample_id, score.failure)
    return checked


def not_finite(number: float) -> str:
    """The reason of a failure: a number that is none."""
    return f"the reward came out as {number}, which is not a finite number"


def _finite(score: Score) -> Score:
    broken = [number for number in (score.value, score.raw) if number is not None and not math.isfinite(number)]
    return Score.failed(not_finite(broken[0])) if broken else score


def provenance_of(reward: Reward) -> dict[str, object]:
    """What the reward's scores come from, as JSON values: two rewards with the same give the same scores.

    Returns:
        reward: its name; version: of its code; settings: that determine the scores; settings_digest: sha256 of these;
        weights: sha256 of every weight file by role.

    Raises:
        InputError: a weight file is missing or not the right one.
    """
    settings: Mapping[str, object] = dict(reward.settings())
    canonical = json.dumps(settings, sort_keys=True, allow_nan=False)
    return {
        "reward": reward.name,
        "version": reward.version,
        "settings": settings,
        "settings_digest": hashlib.sha256(canonical.encode()).hexdigest(),
        "weights": dict(reward.weight_digests()),
    }


def clamp_unit(value: float) -> float:
    """The value, at least 0 and at most 1."""
    return min(max(value, 0.0), 1.0)
