"""A run over two processes of the CPU is that of one process, to the bit, also if one is killed in any stage."""

import asyncio
import contextvars
from pathlib import Path

import psutil
import pytest

from configs.loader import read_config
from flows.training.train import train
from tasks.progress import listen
from tests.flows.conftest import TINY, Runs
from tests.flows.workers.test_pools import joined_tables

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
