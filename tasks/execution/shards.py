"""A stage done in parts side by side, each a stage of its own with its own record, and joined in order."""

from collections.abc import Callable

from prefect.futures import PrefectFuture
from prefect.transactions import CommitMode, transaction

from configs.placement_sections import PlacementSection
from tasks.execution.faults import TriesUsedUpError, fault_of
from tasks.execution.pool_run import stages_cancelled_on_interrupt
from tasks.execution.stages import Arguments, Part, Reference, Stage
from tasks.storage.artifacts.reference import ArtifactRef
from tasks.storage.artifacts.store import ArtifactStore

SHARDS = "shards"
"""Folder for the parts of what lies beside it."""

Submit = Callable[[Part], PrefectFuture[Reference]]


def in_shards(stage: Stage, arguments: Arguments, submit: Submit) -> Reference:
    """Cut the stage, have the parts done, and join them; parts that are done are kept when another fails.

    Args:
        stage: that can be cut.
        arguments: of the whole.
        submit: starts the stage's task on a part.

    Raises:
        TriesUsedUpError: the first part that failed met a fault that may pass, more often than it is tried again.
        Exception: as the first part that failed raised it otherwise; both once the others are over.
    """
    assert stage.sharding is not None, "only a stage that can be cut has shards"
    parts = stage.sharding.cut(arguments, stage.shards(arguments))
    # Each part is recorded when it is done; within the task of the whole Prefect would wait for the end of that.
    with transaction(commit_mode=CommitMode.EAGER):
        futures = [submit(part) for part in parts]
    with stages_cancelled_on_interrupt():
        for future in futures:
            future.wait()
    made = [_result(future) for future in futures]
    return stage.sharding.join(arguments, [part for part in made if isinstance(part, ArtifactRef)])


def _result(part: PrefectFuture[Reference]) -> Reference:
    try:
        return part.result()
    except Exception as error:
        if fault_of(error) is None:
            raise
        raise TriesUsedUpError(f"{type(error).__name__}: {error}") from error


def shard_folder(folder: str, index: int, count: int) -> str:
    """Where the stages of a folder keep a part of what they make until it is joined."""
    return f"{folder}/{SHARDS}/{index + 1:02d}of{count:02d}"


def clear_shards(store: ArtifactStore, folder: str) -> None:
    """Remove the parts of a folder's stages, whose joined artifacts have their records."""
    path = store.path(f"{folder}/{SHARDS}")
    if store.filesystem.exists(path):
        store.filesystem.rm(path, recursive=True)


def unsharded(arguments: Arguments) -> PlacementSection:
    """The placement of a shard, which is not cut again."""
    placement: PlacementSection = arguments["placement"]
    change = {
        "rollouts": placement.rollouts.model_copy(update={"shards": 1}),
        "rewards": placement.rewards.model_copy(update={"shards": 1}),
    }
    return placement.model_copy(update=change)
