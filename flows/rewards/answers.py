"""Answers of `grpo rewards serve`, in child processes: a request's file in, the status and body of its answer out.

What takes time with a stranger's request happens here, from its JSON on, since a process can be ended at any moment.
"""

import functools
import hashlib
import json
import math
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import ValidationError

from configs.scoring import RewardSection
from grpo_core.errors import InputError
from grpo_core.rewards.registry import build_reward
from grpo_core.rewards.remote import wire
from grpo_core.rewards.reward import Reward, provenance_of, score_samples
from grpo_core.rewards.scoring_batch import ScoringBatch
from grpo_core.rollouts.streams import MAX_PIXELS
from tasks.progress import log

Answer = tuple[int, dict[str, object]]
"""Status of an HTTP answer, and its body."""


@dataclass(frozen=True)
class RequestLimits:
    """What one request may contain: pixels of all images, and characters of all texts, with token ids."""

    max_pixels: int = 4 * MAX_PIXELS
    max_characters: int = 16 * 1024 * 1024


def answer_request(rewards: Mapping[str, Reward], limits: RequestLimits, body: bytes) -> Answer:
    """Score the samples of a request, the JSON of `wire.ScoreRequest`, or refuse it with the reason."""
    try:
        requested = wire.ScoreRequest.model_validate_json(body)
    except ValidationError as error:
        return _refusal(422, wire.first_error(error))
    if requested.reward not in rewards:
        return _refusal(404, f"no reward {requested.reward!r}; this server has {', '.join(sorted(rewards))}")
    reward = rewards[requested.reward]
    try:
        if (characters := wire.count_characters(requested)) > limits.max_characters:
            return _refusal(413, f"the texts have {characters} characters together, more than {limits.max_characters}")
        if (pixels := wire.declared_pixels(requested)) > limits.max_pixels:
            return _refusal(413, f"the images have {pixels} pixels together, more than {limits.max_pixels}")
        batch = wire.read_batch(requested)
        if (unfit := _why_unfit(reward, batch)) is not None:
            return _refusal(422, unfit)
        scores = score_samples(reward, batch)
    except InputError as error:
        return _refusal(422, str(error))
    except Exception as error:
        # Its message is for those who run the server.
        log(traceback.format_exc())
        return _refusal(500, f"the reward raised {type(error).__name__}; the server's log says more")
    return 200, wire.write_answer(_described(requested.reward, reward), batch.sample_ids, scores)


def _refusal(status: int, reason: str) -> Answer:
    return status, {"error": reason}


def _why_unfit(reward: Reward, batch: ScoringBatch) -> str | None:
    kind = "text" if batch.completions else "image"
    if kind not in reward.needs.media:
        return f"this reward scores {' and '.join(reward.needs.media)}s, and these samples are {kind}s"
    if reward.needs.group and not batch.group_ids:
        return "this reward compares siblings, and these samples come without group_id"
    return None


@functools.lru_cache(maxsize=256)
def _described(name: str, reward: Reward) -> wire.RewardDescription:
    return describe_reward(name, reward)


def describe_reward(name: str, reward: Reward) -> wire.RewardDescription:
    """Describe a reward, whose weight files must be right; the version follows from everything in its provenance."""
    provenance, needs = provenance_of(reward), reward.load_needs()
    canonical = json.dumps(provenance, sort_keys=True, allow_nan=False)
    return wire.RewardDescription(
        name=name,
        version=f"{reward.version}+{hashlib.sha256(canonical.encode()).hexdigest()[:16]}",
        media=list(needs.media),
        needs_target=needs.target,
        needs_group=needs.group,
        needs_sources=needs.sources == "required",
        needs_column=needs.column,
        min_side=needs.min_side,
        max_aspect=None if math.isinf(needs.max_aspect) else needs.max_aspect,
        provenance=provenance,
    )


def answer_payload(rewards: tuple[RewardSection, ...], limits: RequestLimits, body: Path) -> dict[str, object]:
    """Return what the handler takes: the rewards of the server, its limits, and the file with a request's body."""
    described = json.dumps([section.model_dump(mode="json") for section in rewards])
    return {"rewards": described, "limits": asdict(limits), "body": str(body)}


def answering_handler() -> Callable[[dict[str, object]], Answer]:
    """Set this process to one thread, and return the function that answers the server's requests."""
    import torch

    torch.set_num_threads(1)

    def answer(payload: dict[str, object]) -> Answer:
        limits, file = RequestLimits(**payload["limits"]), Path(str(payload["body"]))  # type: ignore[arg-type]
        return answer_request(_rewards(str(payload["rewards"])), limits, file.read_bytes())

    return answer


@functools.lru_cache(maxsize=1)
def _rewards(described: str) -> Mapping[str, Reward]:
    return build_rewards(tuple(RewardSection.model_validate(each) for each in json.loads(described)))


def build_rewards(sections: tuple[RewardSection, ...]) -> dict[str, Reward]:
    """Build the rewards of a server, by the names that requests use: those of tables and plots."""
    return {section.label: build_reward(section.reward, section.settings) for section in sections}
