"""A run killed at a few moments, between the steps that must stay together, and in a process of one of its stages."""

import asyncio
import contextlib
import contextvars
import errno
import os
import shutil
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefect.settings import PREFECT_API_URL

from configs.loader import read_config
from flows.pruning.plan import plan_run
from flows.pruning.request import Age, Retention
from flows.training.train import train
from grpo_core.errors import InputError
from tasks.progress import listen
from tasks.runs.read_run import read_run
from tasks.runs.reader import RunReader
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.roots import StorageError
from tests.chaos.campaign import Campaign, Plan
from tests.chaos.operations import Golden, Operation
from tests.chaos.processes import ForkServer, forking
from tests.chaos.settings import (
    BOTH_STREAMS,
    OFFLOADED,
    PREVIEWED,
    QUANTIZED,
    offloaded,
    previewed,
    quantized,
    small_images,
)
from tests.flows.conftest import TINY, TINY_SD3_NFT, Compare, Runs, Start
from tests.flows.training.test_train import without_last_update
from tests.flows.workers.test_pools import joined_tables

PLANS = (
    # Files of rollouts in their place, the manifest not; then while they are moved away.
    Plan(operation=Operation("rename */iteration_000001/rollouts.manifest.json", 1)),
    Plan(operation=Operation("rename */quarantine/*/iteration_000001/*", 1)),
    # Scores complete, the record of the second reward not.
    Plan(operation=Operation("rename */run-001/run-001/.stages/score-*", 2)),
    Plan(operation=Operation("open */training_state.json", 1)),
    Plan(operation=Operation("rename */metrics.parquet", 1)),
)
# The last one: what a machine has done by then, and so what is left for the others, is a matter of its speed.
A_MOMENT = Plan(seconds=1.0)


@pytest.fixture(scope="module")
def fork_server(server: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    folder = tmp_path_factory.mktemp("fork-server")
    environment = {"PREFECT_API_URL": str(PREFECT_API_URL.value()), "PREFECT_HOME": str(folder)}
    with forking(environment, folder / "log") as started:
        yield started


def kill_at(plans: tuple[Plan, ...], golden: Golden, settings: Any, fork_server: ForkServer, folder: Path) -> None:
    """Kill a run at these moments; its end must be that of the undisturbed one."""
    campaign = Campaign(golden, settings, fork_server.start, folder)
    campaign.one_run(iter(plans))
    expected = [plan for plan in plans if plan is not A_MOMENT]
    assert campaign.kills[: len(expected)] == expected


@pytest.mark.slow
def test_killed_here_and_there(undisturbed: tuple[Runs, Start], fork_server: ForkServer, tmp_path: Path) -> None:
    golden = Golden(undisturbed[0], "run", str(undisturbed[1].summary.policy_digest))
    kill_at((*PLANS, A_MOMENT), golden, small_images, fork_server, tmp_path)


@pytest.mark.slow
def test_killed_over_a_quantized_base(empty: Runs, fork_server: ForkServer, tmp_path: Path) -> None:
    first = empty.start_text(**underscored(QUANTIZED))
    golden = Golden(empty, "text", str(first.summary.policy_digest))
    kill_at((PLANS[0], *PLANS[-2:]), golden, quantized, fork_server, tmp_path)


def underscored(settings: Mapping[str, object]) -> dict[str, Any]:
    return {name.replace(".", "__"): value for name, value in settings.items()}


@pytest.mark.slow
def test_offloaded_and_killed_it_ends_as_without(empty: Runs, fork_server: ForkServer, tmp_path: Path) -> None:
    golden = Golden(empty, "plain", str(empty.start("plain", **underscored(BOTH_STREAMS)).summary.policy_digest))
    # Under a root of its own, where nothing of the other run can be used again.
    other = Runs(tmp_path / "other")
    moved = other.start("moved", **underscored(OFFLOADED))
    assert moved.summary.policy_digest == golden.digest
    assert other.tables("moved") == empty.tables("plain")
    measured = other.metrics(2, "moved")
    for stage in ("rollouts", "update"):
        assert measured[f"offload/{stage}/moved_gib"] > 0
        assert measured[f"offload/{stage}/moved_seconds"] > 0
    assert not any(name.startswith("offload/") for name in empty.metrics(2, "plain"))
    # In the update also when the tokens' adapter is written and before the decoder's is.
    between = Plan(operation=Operation("mkdir */denoising", 1))
    kill_at((PLANS[0], between, PLANS[-2]), golden, offloaded, fork_server, tmp_path)


@pytest.mark.slow
def test_killed_between_previews_and_full_images(empty: Runs, fork_server: ForkServer, tmp_path: Path) -> None:
    undisturbed = empty.start_text("plain", file=TINY_SD3_NFT, **underscored(PREVIEWED))
    golden = Golden(empty, "plain", str(undisturbed.summary.policy_digest))
    store = ArtifactStore(str(empty.root), "plain")
    read = read_run(RunReader(store))
    assert (read.damages, read.unverified) == ((), 0)
    found = read.iterations[-1].metrics
    assert found == pytest.approx({name: empty.metrics(2, "plain")[name] for name in found})
    seconds = {name: value for name, value in found.items() if name.startswith("seconds/")}
    assert len([name for name in seconds if name.startswith("seconds/previews/")]) == 3
    assert found["step_time"] == pytest.approx(sum(seconds.values()))
    assert read.seconds["previews/rollouts"] > 0
    assert read.cost().samples == 2 * 2 * 2, "iterations, prompts and full images of each"
    config = read_config(TINY_SD3_NFT, empty.overrides(PREVIEWED, run__name="plain"))
    pruned = plan_run(store, config, Retention("test", images=Age(1, "i")), datetime.now(UTC))
    assert [each.name for each in pruned.deleted] == ["iteration_000001/previews", "iteration_000001"]
    places = ("previews/rollouts.manifest.json", "previews/advantages.manifest.json", "rollouts.manifest.json")
    plans = tuple(Plan(operation=Operation(f"rename */iteration_000001/{place}", 1)) for place in places)
    kill_at(plans, golden, previewed, fork_server, tmp_path)


PAGE = 4096


def fill(disk: Path, left: int = 0) -> None:
    """Write until nothing goes, then leave so many bytes."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as stream:
        # The file system gives no more than whole pages.
        with contextlib.suppress(OSError):
            while stream.write(bytes(PAGE)):
                pass
        stream.truncate(max(0, filler.stat().st_size // PAGE * PAGE - left))


@pytest.mark.slow
def test_full_again_and_again_wherever_that_falls(
    undisturbed: tuple[Runs, Start], small_disk: Path, final: Compare
) -> None:
    runs, failures, left = Runs(small_disk), 0, 2 * PAGE
    while True:
        fill(small_disk, left)
        before = runs.tables()
        try:
            again = runs.start()
            break
        except StorageError:
            failures += 1
        assert before.items() <= runs.tables().items()
        # A little more each time, so that what was written stays and the next thing is cut short.
        left = PAGE * (2 + 3 * failures)
        assert failures < 150
    (small_disk / "filler").unlink()
    final(runs, again)
    assert failures > 5
    assert runs.start().stages == ()


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.EROFS, "the disk is read-only"),
        pytest.param(errno.EIO, "the disk reports an error", marks=pytest.mark.slow),
        pytest.param(errno.EDQUOT, "the quota is used up", marks=pytest.mark.slow),
    ],
)
def test_a_disk_that_fails_while_it_writes(
    finished: Runs, monkeypatch: pytest.MonkeyPatch, number: int, reason: str
) -> None:
    """What failed half-way leaves no version; the next start is that of any failure, as in test_train."""
    without_last_update(finished)

    def failing(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    class Listener:
        def advance(self, stage: str, done: int, total: int) -> None:
            if stage == "iteration 2: update policy":
                monkeypatch.setattr(os, "fsync", failing)

        def log(self, line: str) -> None:
            pass

    def body() -> None:
        listen(Listener())
        asyncio.run(train(read_config(TINY, finished.overrides(run__name="run"))))

    with pytest.raises(StorageError) as caught:
        contextvars.copy_context().run(body)
    assert (caught.value.place, caught.value.value) == ("storage.root", str(finished.root))
    assert caught.value.reason.startswith(reason)
    assert not finished.path("policies", "000002").exists()


def test_full_before_anything_was_written(
    undisturbed: tuple[Runs, Start], small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(small_disk)
    with pytest.raises((InputError, StorageError)) as caught:
        Runs(small_disk).start()
    assert (caught.value.place, caught.value.value) == ("storage.root", str(small_disk))
    assert shutil.disk_usage(small_disk).free < PAGE


# A scored batch takes long enough to be killed in the middle.
REWARD = """
import time


def slow_brightness(images, **columns):
    time.sleep(1.0)
    return [sum(image.convert("L").resize((1, 1)).tobytes()) / 255 for image in images]
"""
STAGES = ("collect rollouts", "score slow_brightness", "update policy")


def device_processes() -> list[psutil.Process]:
    found = psutil.Process().children()
    return sorted((each for each in found if each.cmdline()[-1:] == ["device"]), key=lambda each: each.create_time())


class Killer:
    """Kills a process in each stage of the second iteration, once every process works at it."""

    def __init__(self) -> None:
        self.working: dict[str, set[str]] = {stage: set() for stage in STAGES}
        self.killed: list[tuple[str, int]] = []
        self.lines: list[str] = []

    def advance(self, title: str, done: int, total: int) -> None:
        stage = next((each for each in STAGES if title.startswith("iteration 2") and title.endswith(each)), None)
        if stage is None or stage in dict(self.killed):
            return
        self.working[stage].add(title)
        in_the_middle = 0 < done < total if stage == "update policy" else len(self.working[stage]) == 2
        if in_the_middle:
            victim = device_processes()[-1]
            victim.kill()
            self.killed.append((stage, victim.pid))

    def log(self, line: str) -> None:
        self.lines.append(line)


@pytest.mark.slow
def test_killed_in_every_stage(server: None, tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(REWARD)
    function = f"{tmp_path / 'rewards.py'}:slow_brightness"
    changes: dict[str, object] = {
        "rewards": [{"reward": "function", "settings": {"function": function}}],
        "rollout__prompts_per_batch": 1,
        "update__epochs": 6,
        "placement__retries__delay": 0.1,
    }
    one, two = Runs(tmp_path / "one"), Runs(tmp_path / "two")
    alone = one.start(**changes)
    killer = Killer()

    def body() -> str | None:
        listen(killer)
        placed = two.overrides(run__name="run", **changes, placement__devices=["cpu", "cpu"])
        return asyncio.run(train(read_config(TINY, placed))).policy_digest

    assert contextvars.copy_context().run(body) == alone.summary.policy_digest
    assert [stage for stage, _ in killer.killed] == list(STAGES)
    assert len({pid for _, pid in killer.killed}) == len(STAGES)
    named = [line for line in killer.lines if "of 2 ended by SIGKILL" in line]
    assert [sum(stage in line for line in named) for stage in STAGES] == [1, 1, 1], killer.lines
    assert joined_tables(two) == joined_tables(one)
    assert len(list(two.path("iteration_000002", "rollouts").glob("part-*.parquet"))) == 2
    assert not list(two.path().rglob("shards"))
    assert not device_processes()
    # Placement is in no key.
    assert two.start(**changes).stages == ()
    assert one.start(**changes, placement__devices=["cpu", "cpu"]).stages == ()
