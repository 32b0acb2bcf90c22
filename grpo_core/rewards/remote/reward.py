"""Scores of a server that speaks the protocol of docs/remote_rewards.md."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import Field, ValidationError
from pydantic.dataclasses import dataclass

from grpo_core.errors import InputError
from grpo_core.rewards.remote import wire
from grpo_core.rewards.remote.http import Request, ServiceReward, ask_side_by_side
from grpo_core.rewards.reward import STRICT, Needs, Text
from grpo_core.rewards.scoring_batch import Score, ScoringBatch, ScoringError
from grpo_core.rollouts.images import require_fit
from grpo_core.rollouts.streams import Modality
from grpo_core.uses import Uses


@dataclass(frozen=True, config=STRICT)
class RemoteReward(ServiceReward):
    """Value and raw of the server; samples without an answer in any attempt have a failure.

    Attributes:
        url: address of the server.
        reward: name of the reward there.
        reward_version: that the reward must have there. Without it the server is queried once per process, and must
            answer whenever the run is started.
        batch_size: samples per request.
        by_group: whether each request is one complete group; for rewards that compare siblings.
        with_targets: whether target images are sent along; for rewards that compare with them.
        with_sources: whether the images in prompts are sent along; for rewards that look at them.
    """

    reward: Annotated[Text, Uses.NOTHING] = ""
    reward_version: Annotated[Text | None, Uses.NOTHING] = None
    batch_size: Annotated[int, Field(ge=1, le=4096)] = 8
    by_group: bool = False
    with_targets: bool = False
    with_sources: bool = False

    name: ClassVar[str] = "remote"
    version: ClassVar[str] = "1"
    free_settings: ClassVar[frozenset[str]] = ServiceReward.free_settings | {"batch_size"}

    @property
    def needs(self) -> Needs:
        """What is sent along."""
        sources: Literal["optional"] | None = "optional" if self.with_sources else None
        return Needs(
            ("image", "text"), target=self.with_targets, group=self.by_group, tokens="optional", sources=sources
        )

    def settings(self) -> Mapping[str, object]:
        """Return the reward and its version at the server; queries the version where none is set."""
        version = self.reward_version
        if version is None:
            try:
                version = _describe(self).version
            except ScoringError as failure:
                hint = f"{failure}. Start the server, or set `reward_version` to go on without it."
                raise InputError("rewards.remote.url", self.url, hint) from failure
        return {**super().settings(), "reward_version": version}

    def check_service(self) -> None:
        """Check that the server has such a reward, in this version."""
        self._check_fit(_describe(self))

    def score(self, batch: ScoringBatch) -> Sequence[Score]:
        """Score each sample."""
        rows = range(len(batch))
        requests = (
            batch.groups(self.name)
            if self.by_group
            else [list(rows[start : start + self.batch_size]) for start in rows[:: self.batch_size]]
        )
        try:
            described = _describe(self)
        except ScoringError as failure:
            return [Score.failed(str(failure))] * len(batch)
        self._check_fit(described)
        self._check_samples(described, batch)

        with self.connected() as request:
            answers = ask_side_by_side(
                lambda rows: self._ask(request, batch.select(rows), described), requests, self.concurrency
            )
        return [score for answer in answers for score in answer]

    def _ask(self, request: Request, batch: ScoringBatch, described: wire.RewardDescription) -> list[Score]:
        asked = {"with_targets": self.with_targets, "with_sources": self.with_sources}
        body = wire.write_request(self.reward, batch, **asked)
        try:
            answer = wire.ScoreAnswer.model_validate(request(wire.SCORE_PATH, body))
            if answer.reward != self.reward:
                raise ValueError(f"scores of the reward {answer.reward!r}")
            self._check_version(answer.version, described.version)
            return wire.read_scores(answer, batch.sample_ids)
        except ScoringError as failure:
            return [Score.failed(str(failure))] * len(batch)
        except InputError:
            raise
        except ValueError as error:
            raise _not_protocol(self.url + wire.SCORE_PATH, error) from error

    def _check_fit(self, described: wire.RewardDescription) -> None:
        self._check_version(described.version)
        if described.needs_group and not self.by_group:
            hint = f"The reward {self.reward} compares siblings. Set it to true."
            raise InputError("rewards.remote.by_group", False, hint)
        if described.needs_target and not self.with_targets:
            hint = f"The reward {self.reward} compares with target images. Set it to true."
            raise InputError("rewards.remote.with_targets", False, hint)
        if described.needs_sources and not self.with_sources:
            hint = f"The reward {self.reward} looks at the images in prompts. Set it to true."
            raise InputError("rewards.remote.with_sources", False, hint)

    def _check_samples(self, described: wire.RewardDescription, batch: ScoringBatch) -> None:
        kind: Modality = "image" if batch.images else "text"
        if len(batch) and kind not in described.media:
            hint = f"It scores {' and '.join(described.media)}s, and these samples are {kind}s. Set another one."
            raise InputError("rewards.remote.reward", self.reward, hint)
        bounds = described.min_side, math.inf if described.max_aspect is None else described.max_aspect
        for sample_id, image in zip(batch.sample_ids, batch.images, strict=False):
            require_fit(image, f"rewards.remote, sample {sample_id}", self.reward, *bounds)

    def _check_version(self, found: str, described: str | None = None) -> None:
        expected = self.reward_version or described
        if expected is not None and found != expected:
            hint = (
                f"The server at {self.url} has version {found} of {self.reward}. Set that, or start the other version."
            )
            raise InputError("rewards.remote.reward_version", expected, hint)


@functools.lru_cache(maxsize=64)
def _describe(reward: RemoteReward) -> wire.RewardDescription:
    """Ask the server about the reward, once per process; failures are retried."""
    try:
        with reward.connected() as request:
            description = wire.Description.model_validate(request(wire.DESCRIBE_PATH))
    except InputError:
        raise
    except ValueError as error:
        raise _not_protocol(reward.address + wire.DESCRIBE_PATH, error) from error
    found = {known.name: known for known in description.rewards}
    if reward.reward not in found:
        hint = f"The server at {reward.address} has {', '.join(sorted(found)) or 'no rewards'}. Set one of them."
        raise InputError("rewards.remote.reward", reward.reward, hint)
    return found[reward.reward]


def _not_protocol(url: str, error: ValueError) -> InputError:
    reason = wire.first_error(error) if isinstance(error, ValidationError) else str(error)
    hint = f"Set a server of protocol {wire.PROTOCOL}; docs/remote_rewards.md describes it."
    return InputError(url, reason, hint)
