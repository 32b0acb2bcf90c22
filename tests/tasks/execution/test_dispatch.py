"""Where a stage runs, shards that equal the uncut stage to the byte, and devices that are lent to one stage each."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from configs.placement import PlacementSection, ShardedStagePlacement
from configs.scoring import RewardSection
from grpo_core.errors import FailedSamplesError
from tasks.execution.devices import DeviceProcesses, visible_devices
from tasks.execution.dispatch import run_in_shards
from tasks.execution.errors import StageCancelledError
from tasks.execution.resources import resource, run_resources
from tasks.execution.stage import Child, Device, Devices, Here, Part, Pool, Shards, clear_shards, place, stage_named
from tasks.execution.stopping import StopSignals
from tasks.rewards.score_rewards import score_reward_task
from tasks.rollouts.collect_rollouts import collect_rollouts_task
from tasks.rollouts.plan import RolloutPlan
from tasks.runs.layout import SCORES_FILE
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef
from tasks.storage.artifacts.store import ArtifactStore, use_store
from tests.tasks.update.update_jobs import IMAGES, groups_of

PROMPTS = tuple(f"a {colour} {shape}" for colour in ("red", "blue") for shape in ("circle", "cross", "square"))[:5]
POOLED = PlacementSection(
    devices="cpu",
    rollouts=ShardedStagePlacement(pool="somewhere", shards=3),
    rewards=ShardedStagePlacement(pool="somewhere", shards=3),
)
LOCAL_PLACEMENT = PlacementSection(devices="cpu")


class Done:
    """A future that is over, as those of Prefect's tasks are read."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def wait(self, timeout: float | None = None) -> None:
        """Nothing to wait for."""

    def result(self) -> Any:
        return self.value


def rollout_arguments(folder: str, placement: PlacementSection) -> dict[str, Any]:
    spec = IMAGES.spec()
    groups = groups_of(PROMPTS, datasets=("odd", "default"))
    return {
        "policy": PolicyRef(version=0, digest=spec.digest),
        "plan": RolloutPlan(
            folder=folder, title="an iteration", iteration=1, seed=5, group_size=2, shared_noise=True, groups=groups
        ),
        "model": spec,
        "rollout": IMAGES.rollout.model_copy(update={"prompts_per_batch": 2}),
        "with_reference": False,
        "placement": placement,
    }


def reward_arguments(
    rollouts: ArtifactRef,
    section: RewardSection,
    folder: str = "iteration_000001/rewards",
    placement: PlacementSection = LOCAL_PLACEMENT,
    title: str = "an iteration",
) -> dict[str, Any]:
    return {
        "rollouts": rollouts,
        "section": section,
        "folder": folder,
        "title": title,
        "placement": placement,
        "earlier": (),
        "part": None,
    }


def here(task: Any) -> Callable[[Part], Any]:
    """Done in this process, as a worker would."""

    def submit(part: Part) -> Any:
        placement = PlacementSection.model_validate(part.arguments["placement"].model_dump())
        assert (placement.rollouts.shards, placement.rewards.shards) == (1, 1)
        return Done(task.fn(**{**part.arguments, "placement": LOCAL_PLACEMENT}))

    return submit


def files(store: ArtifactStore, reference: ArtifactRef) -> list[Path]:
    return sorted(store.local_files(reference).glob("part-*.parquet"))


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory: pytest.TempPathFactory) -> ArtifactStore:
    return ArtifactStore(str(tmp_path_factory.mktemp("runs")), "run")


@pytest.fixture
def store(shared_store: ArtifactStore) -> ArtifactStore:
    """One run for all tests here, each with a folder of its own."""
    use_store(shared_store)
    return shared_store


@pytest.fixture(scope="module")
def collected(shared_store: ArtifactStore) -> tuple[ArtifactRef, ArtifactRef]:
    use_store(shared_store)
    whole = collect_rollouts_task.fn(**rollout_arguments("uncut", LOCAL_PLACEMENT))
    stage = stage_named("collect rollouts")
    joined = run_in_shards(stage, rollout_arguments("cut", POOLED), 3, here(collect_rollouts_task))
    return whole, joined


POLICY = {"rollout": IMAGES.rollout, "with_reference": False}


@pytest.mark.parametrize(
    ("stage", "placement", "expected"),
    [
        ("collect rollouts", {"devices": "cpu"}, Here()),
        ("collect rollouts", {"devices": ["cpu", "cpu"]}, Shards(2)),
        ("collect rollouts", {"devices": [1], "rollouts": {"timeout": 9}}, Device(9)),
        ("collect rollouts", {"rollouts": {"timeout": 9}}, Child(9)),
        ("collect rollouts", {"rollouts": {"pool": "far", "shards": 3}}, Shards(3)),
        ("collect rollouts", {"rollouts": {"pool": "far", "timeout": 9}}, Pool("far", 9)),
        ("update policy", {"devices": [0, 1], "update": {"timeout": 9}}, Devices()),
        ("update policy", {"update": {"timeout": 9}}, Child(9)),
        ("score reward", {"devices": [0]}, Device(None)),
        ("compute advantages", {"devices": [0, 1]}, Here()),
        ("compute advantages", {"devices": [0, 1], "advantages": {"timeout": 9}}, Child(9)),
    ],
)
def test_where_a_stage_runs(stage: str, placement: dict[str, Any], expected: object) -> None:
    arguments = {**POLICY, "placement": PlacementSection.model_validate(placement)}
    assert place(stage_named(stage), arguments) == expected
    pooled = {**arguments, "section": RewardSection(reward="jpeg", pool="judges")}
    if stage == "score reward":
        assert place(stage_named(stage), pooled) == Pool("judges", None)


@pytest.mark.parametrize(("devices", "expected"), [("cpu", Here()), (["cpu", "cpu"], Device(None))])
def test_where_rollouts_run_on_a_worker(devices: object, expected: object) -> None:
    far = PlacementSection.model_validate({"devices": devices, "rollouts": {"pool": "far"}})
    assert place(stage_named("collect rollouts"), {**POLICY, "placement": far}, on_worker=True) == expected


def test_rollouts(store: ArtifactStore, collected: tuple[ArtifactRef, ArtifactRef]) -> None:
    whole, joined = collected
    parts = files(store, joined)
    assert [path.name for path in parts] == ["part-00000.parquet", "part-00001.parquet", "part-00002.parquet"]
    # Batches of two of five prompts: three shards of one batch each.
    assert [pl.read_parquet(path).height for path in parts] == [4, 4, 2]
    assert pl.concat([pl.read_parquet(path) for path in parts]).equals(pl.read_parquet(files(store, whole)[0]))
    assert (joined.digest, joined.rows, joined.metrics) == (whole.digest, whole.rows, whole.metrics)
    assert store.find("cut/shards/02of03/rollouts") is not None
    assert store.find("cut/rollouts") == joined


def test_more_shards_than_batches(store: ArtifactStore) -> None:
    arguments = rollout_arguments("cut", POOLED)
    stage = stage_named("collect rollouts")
    parts = stage.sharding.cut({**arguments, "rollout": IMAGES.rollout.model_copy(update={"prompts_per_batch": 4})}, 8)
    assert [[group.group_id for group in part.arguments["plan"].groups] for part in parts] == [
        ["g0", "g1", "g2", "g3"],
        ["g4"],
    ]
    assert [part.title for part in parts] == [f"an iteration, shard {n} of 2: collect rollouts" for n in (1, 2)]


SECTIONS = [
    RewardSection(reward="jpeg"),
    RewardSection(reward="jpeg", datasets=("odd",)),
    # Its scores depend on the siblings.
    RewardSection(reward="diversity"),
]


@pytest.mark.parametrize("section", SECTIONS, ids=["all", "one dataset", "groups"])
def test_scores(store: ArtifactStore, collected: tuple[ArtifactRef, ArtifactRef], section: RewardSection) -> None:
    rollouts = collected[0]
    folder = f"scores_{SECTIONS.index(section)}"
    whole = score_reward_task.fn(rollouts, section, f"{folder}/whole/rewards", "an iteration", LOCAL_PLACEMENT)
    arguments = reward_arguments(rollouts, section, f"{folder}/cut/rewards", POOLED)
    joined = run_in_shards(stage_named("score reward"), arguments, 3, here(score_reward_task))
    assert (joined.digest, joined.rows, joined.metrics) == (whole.digest, whole.rows, whole.metrics)
    tables = [pl.read_parquet(store.local_files(each) / SCORES_FILE).drop("seconds") for each in (whole, joined)]
    assert tables[0].equals(tables[1])


def test_failures_count_over_all_shards(store: ArtifactStore, collected: tuple[ArtifactRef, ArtifactRef]) -> None:
    def arguments(share: float) -> dict[str, Any]:
        settings = {"function": f"{Path(__file__).parent / 'functions.py'}:fails_for_reds"}
        section = RewardSection(reward="function", settings=settings, max_failures=share)
        return reward_arguments(collected[0], section, f"cut/rewards/{share}", POOLED)

    stage = stage_named("score reward")
    # Every sample of the first shard fails: above the limit of its own samples, within that of all.
    joined = run_in_shards(stage, arguments(0.6), 3, here(score_reward_task))
    assert joined.metrics["rewards/fails_for_reds/failed"] == 6
    with pytest.raises(FailedSamplesError, match="of 10 samples"):
        run_in_shards(stage, arguments(0.5), 3, here(score_reward_task))


def test_parts_are_removed_and_nothing_else(store: ArtifactStore, collected: tuple[ArtifactRef, ArtifactRef]) -> None:
    clear_shards(store, "cut")
    assert store.find("cut/shards/02of03/rollouts") is None
    assert store.find("cut/rollouts") == collected[1]
    clear_shards(store, "cut")


THREE = PlacementSection(devices=("cpu", "cpu", "cpu"))


def test_a_stage_gets_a_free_process_first_the_one_that_did_the_same() -> None:
    devices = DeviceProcesses()
    with devices.borrow(THREE, "score ssim") as first:
        first.process.last_label = "score ssim"
        with devices.borrow(THREE, "score ssim") as second:
            assert second is not first
            second.process.last_label = "collect rollouts"
    with devices.borrow(THREE, "collect rollouts") as again:
        assert again is second
    with devices.borrow(THREE, "score ssim") as again:
        assert again is first


def test_an_update_waits_for_all_and_gets_them_in_order() -> None:
    devices, held, given_back = DeviceProcesses(), threading.Event(), threading.Event()
    order: list[str] = []

    def stage() -> None:
        with devices.borrow(THREE, "a stage"):
            held.set()
            given_back.wait(30)
            order.append("stage")

    def update() -> None:
        with devices.borrow_all(THREE) as processes:
            order.append("update")
            assert [each.process.name for each in processes] == [f"process {number} of 3" for number in (1, 2, 3)]

    with run_resources(), ThreadPoolExecutor(3) as threads:
        futures = [threads.submit(copy_context().run, stage)]
        assert held.wait(30)
        futures += [threads.submit(copy_context().run, update) for _ in range(2)]
        given_back.set()
        for future in futures:
            future.result(30)
    assert order == ["stage", "update", "update"]


def test_nothing_begins_once_the_run_is_stopped_at_once() -> None:
    devices = DeviceProcesses()
    with run_resources(), devices.borrow_all(THREE):
        resource(StopSignals).cancelled.set()
        with pytest.raises(StageCancelledError), devices.borrow(THREE, "a stage"):
            pass


@pytest.mark.parametrize(
    ("seen", "device", "expected"),
    [
        (None, 1, {"CUDA_VISIBLE_DEVICES": "1"}),
        ("4,6,7", 1, {"CUDA_VISIBLE_DEVICES": "6"}),
        ("GPU-aa,MIG-bb", 1, {"CUDA_VISIBLE_DEVICES": "MIG-bb"}),
        ("4,6", "cpu", {}),
    ],
)
def test_indices_count_the_gpus_that_the_run_sees(
    monkeypatch: pytest.MonkeyPatch, seen: str | None, device: int, expected: dict[str, str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if seen is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    assert visible_devices(device) == expected
