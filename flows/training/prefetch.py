"""The first three stages of every iteration, in turn with the updates or ahead of them."""

import contextvars
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from flows.pipeline.run import Run
from flows.pipeline.stages import collect_rollouts, compute_advantages, score_rewards
from flows.training.history import TrainingHistory
from tasks.execution.cancellation import stages_cancelled_on_interrupt, stages_withdrawn_on_failure
from tasks.rollouts.plan import RolloutPlan
from tasks.runs.layout import REWARDS
from tasks.runs.records import SamplingRound
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef


@dataclass(frozen=True)
class ScoredRollouts:
    """What an iteration learns from.

    Attributes:
        policy: that sampled it.
        draws: rollouts and rewards.
        advantages: of all draws.
    """

    policy: PolicyRef
    rounds: tuple[SamplingRound, ...]
    advantages: ArtifactRef


@dataclass
class RolloutPrefetcher:
    """Draws iteration after iteration, each with the policy that is `run.staleness` versions older than it might be.

    Which policy samples an iteration is settled by its number, not by who is faster; so a run that is done again, or in
    another place, is the same.

    Attributes:
        run: that is trained.
        history: of the run.
        thread: draws ahead; None where drawing and updating take turns.
        policies: that are known, by version.
        ahead: iterations that the thread has been given.
    """

    run: Run
    history: TrainingHistory
    thread: ThreadPoolExecutor | None
    policies: dict[int, PolicyRef] = field(default_factory=dict)
    ahead: dict[int, Future[ScoredRollouts]] = field(default_factory=dict)

    def publish_policy(self, policy: PolicyRef) -> None:
        """There is another version; the thread may draw the iterations that wait for it."""
        self.policies[policy.version] = policy
        if self.thread is None:
            return
        first = max(self.ahead, default=0) + 1
        last = min(policy.version + 1 + self.run.config.run.staleness, self.run.config.run.iterations)
        for iteration in range(first, last + 1):
            self.ahead[iteration] = self.thread.submit(contextvars.copy_context().run, self._draw, iteration)

    def take(self, iteration: int) -> ScoredRollouts:
        """What the iteration learns from, once it is there.

        Raises:
            Exception: as one of its stages raised it.
        """
        if self.thread is None:
            return self._draw(iteration)
        with stages_cancelled_on_interrupt():
            return self.ahead[iteration].result()

    def _draw(self, iteration: int) -> ScoredRollouts:
        policy = self.policies[max(0, iteration - 1 - self.run.config.run.staleness)]
        rounds, advantages = sample_groups(self.run, policy, iteration, self.history)
        self.history.drawn.append(advantages)
        return ScoredRollouts(policy, rounds, advantages)


@contextmanager
def prefetching(run: Run, history: TrainingHistory, policy: PolicyRef) -> Iterator[RolloutPrefetcher]:
    """Draw for a run that begins with this policy.

    What is still being drawn when it ends is waited for; what has not begun, or lies untaken on a pool, is left.
    """
    if run.config.run.staleness == 0:
        yield RolloutPrefetcher(run, history, None, {policy.version: policy})
        return
    thread = ThreadPoolExecutor(1, thread_name_prefix="prefetching")
    try:
        groups = RolloutPrefetcher(run, history, thread)
        groups.publish_policy(policy)
        with stages_cancelled_on_interrupt(), stages_withdrawn_on_failure():
            yield groups
    finally:
        thread.shutdown(wait=True, cancel_futures=True)


def sample_groups(
    run: Run, policy: PolicyRef, iteration: int, history: TrainingHistory
) -> tuple[tuple[SamplingRound, ...], ArtifactRef]:
    """The first three stages; where asked, groups that teach nothing are replaced by others, a bounded number of times.

    Yu et al., 2025, DAPO (arXiv:2503.14476), section 3.2, dynamic sampling.
    """
    section, wanted = run.config.advantages, run.config.rollout.prompts_per_iteration
    rounds: tuple[SamplingRound, ...] = ()
    plans: tuple[RolloutPlan, ...] = ()
    count, statistics = wanted, history.statistics(run)
    for draw in range(1, section.max_rounds + 1):
        plan = run.plan(iteration, draw, count, statistics, plans)
        rollouts = collect_rollouts(run, policy, plan)
        rewards = score_rewards(run, rollouts, plan, run.config.rewards, REWARDS)
        rounds, plans = (*rounds, SamplingRound(rollouts, rewards)), (*plans, plan)
        advantages = compute_advantages(run, rounds, plan.folder, plan.title, history.advantages)
        count = wanted - int(advantages.metrics["groups_kept"])
        if section.constant_groups != "redraw" or count <= 0:
            break
    return rounds, advantages
