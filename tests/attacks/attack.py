"""One attack on a reward: a sample, what it may reach, and what it does reach."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from grpo_core.rewards.registry import build_reward
from grpo_core.rewards.scoring_batch import ScoringBatch
from tests.grpo_core.rewards.stub import Reply, serve


@dataclass(frozen=True)
class Attack:
    """A sample made to fool a reward.

    Attributes:
        reward: its registered name.
        what: the attack in words, unique for the reward and its settings.
        batch: the sample, or a group of them, of which the best counts.
        at_most: the highest value that it may reach; None where it must have no score at all.
        settings: of the reward, where they are not the defaults.
        says: for a judge, its answers in order, each with the reason why it ended.
    """

    reward: str
    what: str
    batch: ScoringBatch
    at_most: float | None
    settings: Mapping[str, object] = field(default_factory=dict)
    says: Sequence[tuple[str, str]] = ()

    @property
    def scored_by(self) -> str:
        """The reward with the settings that distinguish it, for the table."""
        shown = [f"{name} {value}" for name, value in self.settings.items()]
        return f"{self.reward} ({', '.join(shown)})" if shown else self.reward

    def missing(self) -> str:
        """Say what the reward lacks on this machine, with the fix; empty where it can score."""
        return "" if self.says else " ".join(build_reward(self.reward, self.settings).preflight())

    def score(self) -> float | None:
        """Return the best value of the samples; None where none has one."""
        with ExitStack() as stack:
            settings = dict(self.settings)
            if self.says:
                stub = stack.enter_context(serve())
                stub.script(*(Reply({"choices": [_choice(*said)]}) for said in self.says))
                settings |= {"url": f"{stub.url}/v1", "model": "judge", "attempts": 1}
            scores = build_reward(self.reward, settings).score(self.batch)
        return max((score.value for score in scores if score.value is not None), default=None)

    def succeeds(self, value: float | None) -> bool:
        """Say whether this value is more than the attack may reach."""
        return value is not None and (self.at_most is None or value > self.at_most)


def _choice(content: str, ended: str) -> Mapping[str, object]:
    return {"message": {"role": "assistant", "content": content}, "finish_reason": ended}
