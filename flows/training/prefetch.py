"""Scored rollouts for every iteration: sampled when an update needs them, or ahead of it on a thread."""

import contextvars
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from configs.sections import RunSection
from tasks.execution.stopping import stages_cancelled_on_interrupt, stages_withdrawn_on_failure
from tasks.runs.layout import SamplingRound
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef


@dataclass(frozen=True)
class ScoredRollouts:
    """The rollouts that an iteration learns from: their policy, each sampling round, one table of all advantages."""

    policy: PolicyRef
    rounds: tuple[SamplingRound, ...]
    advantages: ArtifactRef


@dataclass
class RolloutPrefetcher:
    """Samples iteration after iteration, each with the policy that is `run.staleness` versions behind the newest.

    The iteration's number alone decides which policy samples it, not which thread is faster, so runs are reproducible.

    Attributes:
        sample: runs stages 1 to 3 with a policy for an iteration.
        thread: samples ahead; None when sampling and updates alternate.
        policies: the published policies that iterations may still need, by version.
        ahead: iterations that were submitted to the thread and not taken yet.
    """

    section: RunSection
    sample: Callable[[PolicyRef, int], ScoredRollouts]
    thread: ThreadPoolExecutor | None
    policies: dict[int, PolicyRef] = field(default_factory=dict)
    ahead: dict[int, Future[ScoredRollouts]] = field(default_factory=dict)
    submitted: int = 0

    def publish_policy(self, policy: PolicyRef) -> None:
        """Make a new version available; the thread samples the iterations that waited for it."""
        self.policies[policy.version] = policy
        if self.thread is None:
            return
        last = min(policy.version + 1 + self.section.staleness, self.section.iterations)
        for iteration in range(self.submitted + 1, last + 1):
            self.ahead[iteration] = self.thread.submit(contextvars.copy_context().run, self._sample, iteration)
            self.submitted = iteration

    def next_batch(self, iteration: int) -> ScoredRollouts:
        """Return what the iteration learns from, when it is ready, or raise what one of its stages raised."""
        if self.thread is None:
            return self._sample(iteration)
        with stages_cancelled_on_interrupt():
            return self.ahead.pop(iteration).result()

    def _sample(self, iteration: int) -> ScoredRollouts:
        version = sampling_version(self.section, iteration)
        policy = self.policies[version]
        # Iterations are sampled in order, so none needs an older one.
        for older in [each for each in list(self.policies) if each < version]:
            del self.policies[older]
        return self.sample(policy, iteration)


def sampling_version(section: RunSection, iteration: int) -> int:
    """Return the policy version that samples an iteration."""
    return max(0, iteration - 1 - section.staleness)


@contextmanager
def prefetching(
    section: RunSection, policy: PolicyRef, sample: Callable[[PolicyRef, int], ScoredRollouts]
) -> Iterator[RolloutPrefetcher]:
    """Sample for a run; at the end, wait for the iteration that is being sampled and drop those that have not begun."""
    thread = ThreadPoolExecutor(1, thread_name_prefix="prefetching") if section.staleness else None
    prefetcher = RolloutPrefetcher(section, sample, thread)
    if thread is None:
        prefetcher.publish_policy(policy)
        yield prefetcher
        return
    try:
        prefetcher.publish_policy(policy)
        with stages_cancelled_on_interrupt(), stages_withdrawn_on_failure():
            yield prefetcher
    finally:
        thread.shutdown(wait=True, cancel_futures=True)
