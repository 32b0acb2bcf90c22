"""A stage done in parts side by side, each a stage of its own with its own record, and joined in order."""

from collections.abc import Callable

from prefect.futures import PrefectFuture, wait

from configs.placement_sections import PlacementSection
from tasks.placing.stages import Arguments, Part, Reference, Stage
from tasks.storage.reference import ArtifactRef

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
        Exception: as the first part that failed raised it, once the others are over.
    """
    assert stage.sharding is not None, "only a stage that can be cut has shards"
    futures = [submit(part) for part in stage.sharding.cut(arguments, stage.shards(arguments))]
    wait(futures)
    made = [future.result() for future in futures]
    return stage.sharding.join(arguments, [part for part in made if isinstance(part, ArtifactRef)])


def shard_folder(folder: str, index: int, count: int) -> str:
    """Where a part of what is kept in `folder` lies until it is joined: beside it, in a folder of its own."""
    above, _, last = folder.rpartition("/")
    return "/".join(filter(None, [above, SHARDS, f"{index + 1:02d}of{count:02d}", last]))


def unsharded(arguments: Arguments) -> PlacementSection:
    """The placement of a shard, which is not cut again."""
    placement: PlacementSection = arguments["placement"]
    change = {
        "rollouts": placement.rollouts.model_copy(update={"shards": 1}),
        "rewards": placement.rewards.model_copy(update={"shards": 1}),
    }
    return placement.model_copy(update=change)
