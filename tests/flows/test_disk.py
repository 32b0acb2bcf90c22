"""Disks that take no more, at every stage: one message, nothing damaged, and the same end once they do again."""

import asyncio
import contextlib
import contextvars
import errno
import os
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from configs.loader import read_config
from grpo_core.errors import InputError, InputErrors
from tasks.progress import listen
from tasks.storage.filesystem.failures import StorageError
from tests.flows.conftest import TINY, Runs, Start

Compare = Callable[[Runs, Start], None]
STAGES = ("collect rollouts", "score psnr", "score ssim", "compute advantages", "update policy")
PAGE = 4096


class Doing:
    """A listener that does something once a stage begins."""

    def __init__(self, stage: str, action: Callable[[], object]) -> None:
        self.stage, self.action, self.done = stage, action, False

    def advance(self, stage: str, done: int, total: int) -> None:
        if stage == self.stage and not self.done:
            self.done = True
            self.action()

    def log(self, line: str) -> None:
        pass


def start(runs: Runs, listener: Doing) -> None:
    """A training that hears of nothing but this listener."""
    from flows.training.train import train

    config = read_config(TINY, runs.overrides(run__name="run"))

    def body() -> None:
        listen(listener)
        asyncio.run(train(config))

    contextvars.copy_context().run(body)


def fill(disk: Path, left: int = 0) -> None:
    """Write until nothing goes, then leave so many bytes."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as stream:
        # The file system gives no more than whole pages.
        with contextlib.suppress(OSError):
            while stream.write(bytes(PAGE)):
                pass
        stream.truncate(max(0, filler.stat().st_size // PAGE * PAGE - left))


def whole(runs: Runs) -> dict[str, object]:
    return dict(runs.tables()) if runs.path().exists() else {}


def told(error: pytest.ExceptionInfo[StorageError], disk: Path, reason: str) -> None:
    assert str(error.value).startswith(f"storage.root: got '{disk}', where {reason}")
    assert "start again with the same command" in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_full_when_a_stage_writes(
    undisturbed: tuple[Runs, Start], small_disk: Path, final: Compare, stage: str
) -> None:
    runs, title = Runs(small_disk), f"iteration 2: {stage}"
    seen: dict[str, object] = {}

    def action() -> None:
        seen.update(whole(runs))
        fill(small_disk)

    with pytest.raises(StorageError) as error:
        start(runs, Doing(title, action))
    told(error, small_disk, "the disk is full (0.0 MiB free)")
    assert seen.items() <= whole(runs).items()
    (small_disk / "filler").unlink()
    again = runs.start()
    assert again.stages[0] in (title, "iteration 2: score psnr")
    assert not [name for name in again.stages if name.startswith("iteration 1")]
    final(runs, again)


@pytest.mark.slow
def test_full_again_and_again_wherever_that_falls(
    undisturbed: tuple[Runs, Start], small_disk: Path, final: Compare
) -> None:
    runs, places = Runs(small_disk), []
    left = 2 * PAGE
    while True:
        fill(small_disk, left)
        before = whole(runs)
        try:
            again = runs.start()
            break
        except StorageError as error:
            frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
            frames += [frame.name for frame in traceback.extract_tb((error.__cause__ or error).__traceback__)]
            places.append(next((name for name in reversed(frames) if name in PLACES), frames[-1]))
        assert before.items() <= whole(runs).items()
        # A little more each time, so that what was written stays and the next thing is cut short.
        left = PAGE * (2 + 3 * len(places))
        assert len(places) < 150
    (small_disk / "filler").unlink()
    final(runs, again)
    print(f"full {len(places)} times, in {sorted(set(places))}")
    assert len(places) > 5
    assert runs.start().stages == ()


PLACES = ("_take_file", "_write_description", "write_path", "write_metrics", "commit", "staging", "_move_away", "save")


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.EROFS, "the disk is read-only"),
        pytest.param(errno.EIO, "the disk reports an error", marks=pytest.mark.slow),
        pytest.param(errno.EDQUOT, "the quota is used up", marks=pytest.mark.slow),
    ],
)
def test_a_disk_that_fails_while_it_writes(
    empty: Runs, final: Compare, monkeypatch: pytest.MonkeyPatch, number: int, reason: str
) -> None:
    real = os.fsync

    def failing(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    def action() -> None:
        monkeypatch.setattr(os, "fsync", failing)

    with pytest.raises(StorageError) as error:
        start(empty, Doing("iteration 1: update policy", action))
    told(error, empty.root, reason)
    monkeypatch.setattr(os, "fsync", real)
    again = empty.start()
    assert again.stages[0] == "iteration 1: update policy"
    final(empty, again)


def test_full_before_anything_was_written(
    undisturbed: tuple[Runs, Start], small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(small_disk)
    with pytest.raises((InputError, InputErrors, StorageError), match=r"storage\.root: got .*(No space left|is full)"):
        Runs(small_disk).start()
    assert shutil.disk_usage(small_disk).free < PAGE
