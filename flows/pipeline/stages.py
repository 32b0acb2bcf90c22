"""How flows call their stages: under a name, with their records in the run's folder, rewards side by side."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import ParamSpec, TypeVar

from prefect import Task, get_run_logger
from prefect.context import SyncClientContext
from prefect.futures import wait

from configs.placement_sections import PlacementSection
from configs.reward_sections import RewardSection
from flows.server.temporary import end_temporary_server_with_this_process
from tasks.execution.caching import configured
from tasks.execution.child_process import close_stage_processes
from tasks.execution.pool_run import stages_cancelled_on_interrupt, stages_cancelled_on_signal
from tasks.execution.shards import clear_shards
from tasks.progress import has_listener, listen
from tasks.rewards.process_pool import close_scoring_processes
from tasks.rewards.score import score_reward_task
from tasks.rewards.stored import failed_scores
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.store import ArtifactStore, current_store, use_store
from tasks.storage.locks.run_lock import RunLock, current_lock, use_lock
from tasks.storage.prefect_results.result_storage import registered_records, use_records

P = ParamSpec("P")
R = TypeVar("R", ArtifactRef, PolicyRef)


class RunLog:
    """Tells the flow run's log in the UI, where nobody sits at a terminal."""

    def advance(self, stage: str, done: int, total: int) -> None:
        """Its stages stand in the UI by themselves."""

    def log(self, line: str) -> None:
        """A line of the log."""
        get_run_logger().info(line)


@asynccontextmanager
async def recording(store: ArtifactStore, lock: RunLock) -> AsyncIterator[None]:
    """Tasks of this context keep their artifacts, and the records of them, in the run's folder while it is held."""
    if not has_listener():
        listen(RunLog())
    use_store(store)
    use_lock(lock)
    use_records(await registered_records())
    end_temporary_server_with_this_process()
    # Without a client of the whole run each task opens one of its own, with a TLS context that takes longer than it.
    with SyncClientContext.get_or_create(), stages_cancelled_on_signal():
        try:
            yield
        finally:
            close_scoring_processes()
            close_stage_processes()


def named(stage: Task[P, R], title: str, placement: PlacementSection) -> Task[P, R]:
    """The stage's task under a name that says which iteration it belongs to, tried again as the placement says.

    Raises:
        LockLostError: another process writes the run.
    """
    current_lock().require_held()
    return configured(stage, f"{title}: {stage.name}", placement)


def score_side_by_side(
    rollouts: ArtifactRef,
    rewards: Sequence[RewardSection],
    folder: str,
    title: str,
    placement: PlacementSection,
    earlier: Mapping[str, tuple[ArtifactRef, ...]] | None = None,
) -> Mapping[str, ArtifactRef]:
    """One task a reward, all at once; when one fails, the others still finish, and their scores are kept.

    Args:
        rollouts: the samples.
        rewards: what scores them.
        folder: of the tables.
        title: of the iteration or evaluation.
        placement: threads of this process.
        earlier: by the reward's label, tables that already hold some of its scores.

    Raises:
        LockLostError: another process writes the run.
    """
    current_lock().require_held()
    futures = {}
    for section in rewards:
        known = (earlier or {}).get(section.label, ())
        stage = configured(score_reward_task, f"{title}: score {section.label}", placement)
        # A record of a table with failures is no reason not to try those again.
        stage = stage.with_options(refresh_cache=any(failed_scores(each) for each in known))
        futures[section.label] = stage.submit(rollouts, section, folder, title, placement, known)
    with stages_cancelled_on_interrupt():
        wait(list(futures.values()))
    made = {label: future.result() for label, future in futures.items()}
    if placement.rewards.shards > 1:
        clear_shards(current_store(), folder.rpartition("/")[0])
    return made
