"""One writer at a time: refused while the holder lives, taken over when it died, and told when a lease was lost."""

import contextlib
import contextvars
import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from grpo_core.errors import InputError
from tasks.progress import listen
from tasks.storage import lease
from tasks.storage.lock_holder import described_holder, this_process
from tasks.storage.run_lock import LOCK, LockLostError, RunLock, locked
from tasks.storage.store import ArtifactStore

REPOSITORY = Path(__file__).resolve().parents[3]
BUCKET = "memory://bucket/runs"
# Holds a place of a run and does as it is told, a word a line; says so in a line each.
HOLDER = """
import os, subprocess, sys, time
from tasks.storage import lease
from tasks.storage.run_lock import locked
from tasks.storage.store import ArtifactStore
lease.RENEWAL_SECONDS, lease.LEASE_SECONDS = 0.2, float(sys.argv[3])
with locked(ArtifactStore(sys.argv[1], "run"), sys.argv[2], setting="run.name", value="run") as lock:
    print("held", flush=True)
    for line in sys.stdin:
        if line == "fork\\n":
            if os.fork() == 0:
                print("forked", flush=True)
                time.sleep(60)
        if line == "start\\n":
            print(subprocess.Popen(["sleep", "60"]).pid, flush=True)
        if line == "require\\n":
            lock.require_held()
            print("still", flush=True)
"""


class Process:
    """The script above, in a process of its own."""

    def __init__(self, root: str, place: str = "", *, lease_seconds: float = 2.0) -> None:
        command = [sys.executable, "-c", HOLDER, root, place, str(lease_seconds)]
        self.child = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.pid = self.child.pid

    def says(self) -> str:
        assert self.child.stdout is not None
        return self.child.stdout.readline().strip()

    def told(self, word: str) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(f"{word}\n")
        self.child.stdin.flush()

    def ended(self) -> str:
        """What it said on the way out."""
        return self.child.communicate(timeout=60)[1]

    def kill(self) -> None:
        self.child.kill()
        self.child.wait()

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.child.communicate()


@contextlib.contextmanager
def held_elsewhere(root: str, place: str = "", *, lease_seconds: float = 2.0) -> Iterator[Process]:
    process = Process(root, place, lease_seconds=lease_seconds)
    try:
        assert process.says() == "held", process.ended()
        yield process
    finally:
        process.close()


class Lines:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def advance(self, stage: str, done: int, total: int) -> None:
        pass

    def announce(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """The lines that people are told."""
    listener, context = Lines(), contextvars.copy_context()
    listen(listener)
    yield listener.lines
    for variable, value in context.items():
        variable.set(value)


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(str(tmp_path), "run")


@pytest.fixture
def leased(monkeypatch: pytest.MonkeyPatch) -> Iterator[ArtifactStore]:
    monkeypatch.setattr(lease, "RENEWAL_SECONDS", 0.05)
    monkeypatch.setattr(lease, "LEASE_SECONDS", 0.6)
    yield ArtifactStore(BUCKET, "run")
    memory = fsspec.filesystem("memory")
    if memory.exists("/bucket"):
        memory.rm("/bucket", recursive=True)


def held(store: ArtifactStore, place: str = "") -> contextlib.AbstractContextManager[RunLock]:
    return locked(store, place, setting="run.name", value="run")


def refusal(store: ArtifactStore, place: str = "") -> str:
    with pytest.raises(InputError) as caught, held(store, place):
        pass
    assert caught.value.place == "run.name"
    return str(caught.value)


class TestLocalDisk:
    def test_second_writer_is_told_who_holds_it_and_the_first_goes_on(self, store: ArtifactStore) -> None:
        with held_elsewhere(store.root) as other:
            message = refusal(store)
            holder = described_holder(Path(store.path(LOCK)).read_bytes())
            assert holder is not None
            assert holder.pid == other.pid
            assert str(holder) in message
            for word in (holder.user, holder.host, f"process {other.pid}", holder.since, f"-c {store.root}"):
                assert word in message
            other.told("require")
            assert other.says() == "still"

    def test_killed_holder_is_taken_over_at_once_and_people_are_told(
        self, store: ArtifactStore, heard: list[str]
    ) -> None:
        with held_elsewhere(store.root) as other:
            other.kill()
            with held(store) as lock:
                lock.require_held()
                assert [f"process {other.pid}" in line and "taken over" in line for line in heard] == [True]
                assert f"process {os.getpid()}" in refusal(store)
        with held(store):
            assert len(heard) == 1  # this process released it, and left nothing to take over
        assert Path(store.path(LOCK)).read_bytes() == b""

    @pytest.mark.parametrize("kind", ["fork", "start"])
    def test_processes_that_the_holder_started_do_not_hold_it(self, store: ArtifactStore, kind: str) -> None:
        with held_elsewhere(store.root) as other:
            other.told(kind)
            assert other.says() != ""
            os.kill(other.pid, signal.SIGKILL)  # and not its group: what it started lives on
            os.waitpid(other.pid, 0)
            other.child.returncode = -signal.SIGKILL
            with held(store) as lock:
                lock.require_held()

    def test_held_lock_refuses_whatever_its_file_says(self, store: ArtifactStore) -> None:
        with held(store):
            for content in (b"", b"\xff{", b'{"user": "me"}', b"[1]"):
                Path(store.path(LOCK)).write_bytes(content)
                assert "another process, which has not said who it is" in refusal(store)

    def test_places_are_held_apart(self, store: ArtifactStore) -> None:
        with held(store), held(store, "rescored/mine"), held(store, "rescored/yours"):
            assert "being written by" in refusal(store, "rescored/mine")
            with held(ArtifactStore(store.root, "other")):
                pass
        assert sorted(path.relative_to(store.root).as_posix() for path in Path(store.root).rglob(LOCK)) == [
            "other/.lock",
            "run/.lock",
            "run/rescored/mine/.lock",
            "run/rescored/yours/.lock",
        ]

    def test_released_when_the_work_fails(self, store: ArtifactStore) -> None:
        with pytest.raises(ZeroDivisionError), held(store):
            _ = 1 / 0
        with held(store):
            pass

    def test_a_folder_that_was_moved_away_is_no_longer_held(self, store: ArtifactStore, tmp_path: Path) -> None:
        with held(store) as lock:
            shutil.move(store.path(), tmp_path / "elsewhere")
            with pytest.raises(LockLostError, match=r"run is no longer held.*moved or removed"):
                lock.require_held()
            with held(store) as second:
                second.require_held()
                with pytest.raises(LockLostError):
                    lock.require_held()

    def test_a_disk_without_locks_is_refused(self, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
        def flock(descriptor: int, operation: int) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "flock", flock)
        with pytest.raises(InputError, match=r"storage\.root: .*keeps no locks"), held(store):
            pass

    def test_one_of_many_at_once(self, store: ArtifactStore) -> None:
        assert winners(store, 16) == 1

    def test_colleagues_of_the_folder_may_take_it_after(self, store: ArtifactStore) -> None:
        Path(store.path()).mkdir()
        Path(store.path()).chmod(0o775)
        with held(store):
            pass
        assert Path(store.path(LOCK)).stat().st_mode & 0o777 == 0o664


def winners(store: ArtifactStore, count: int) -> int:
    """How many of so many threads that begin at one moment get hold of it before the first lets go."""
    begin, end, got = threading.Barrier(count), threading.Barrier(count), []

    def take() -> None:
        begin.wait()
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(InputError):
                stack.enter_context(held(store))
                got.append(1)
            end.wait()

    threads = [threading.Thread(target=take) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(got)


def write_lease(store: ArtifactStore, number: int, **changes: object) -> None:
    """A lease as another process left it."""
    holder = this_process().model_copy(update={"user": "ann", "host": "far-away", "machine": "another", **changes})
    content = json.dumps({"holder": holder.model_dump(), "count": 7}).encode()
    store.filesystem.pipe_file(store.path(f"{LOCK}/{number:06d}"), content)


def objects(store: ArtifactStore) -> dict[str, bytes]:
    filesystem = store.filesystem
    return {
        path.rsplit("/", 1)[-1]: filesystem.cat_file(path) for path in filesystem.ls(store.path(LOCK), detail=False)
    }


class TestLease:
    def test_second_writer_is_refused_as_soon_as_the_lease_is_renewed(self, leased: ArtifactStore) -> None:
        with held(leased) as lock:
            for _ in range(2):
                assert f"process {os.getpid()}" in refusal(leased)
            time.sleep(2 * lease.LEASE_SECONDS)
            lock.require_held()
            assert f"process {os.getpid()}" in refusal(leased)

    def test_released_lease_names_nobody_and_is_taken_at_once(self, leased: ArtifactStore, heard: list[str]) -> None:
        for number in ("000001", "000002", "000003"):
            with held(leased):
                assert list(objects(leased)) == [number]
            assert objects(leased) == {number: b'{"released": true}'}
        assert heard == []

    def test_holder_of_this_machine_that_is_gone_is_taken_over_at_once(
        self, leased: ArtifactStore, heard: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(lease, "LEASE_SECONDS", 600.0)
        with subprocess.Popen(["true"]) as ended:
            ended.wait()
        gone = this_process().model_copy(update={"pid": ended.pid})
        write_lease(leased, 4, **gone.model_dump())
        with held(leased) as lock:
            lock.require_held()
        assert ["taken over" in line and f"process {gone.pid}" in line for line in heard] == [True]
        # A process id that another process has got since then is not the holder's.
        write_lease(leased, 9, **this_process().model_copy(update={"started": 1.0}).model_dump())
        with held(leased):
            pass
        assert "taken over" in heard[-1]

    def test_silent_holder_of_another_machine_is_taken_over_after_the_lease_time(
        self, leased: ArtifactStore, heard: list[str]
    ) -> None:
        write_lease(leased, 1)
        begun = time.monotonic()
        with held(leased) as lock:
            assert time.monotonic() - begun >= lease.LEASE_SECONDS
            lock.require_held()
        assert [("looking" in line, "taken over" in line, "ann on far-away" in line) for line in heard] == [
            (True, False, True),
            (False, True, True),
        ]

    def test_lease_that_cannot_be_read_is_watched_like_any_other(self, leased: ArtifactStore, heard: list[str]) -> None:
        leased.filesystem.pipe_file(leased.path(f"{LOCK}/000001"), b"\xff\x00")
        with held(leased):
            pass
        assert "has not said who it is" in heard[0]

    def test_holder_whose_lease_was_taken_is_told_and_disturbs_nobody(self, leased: ArtifactStore) -> None:
        with held(leased) as lock:
            write_lease(leased, 2)
            theirs = objects(leased)["000002"]
            time.sleep(0.3)
            with pytest.raises(LockLostError, match=r"run is no longer held.*taken by ann on far-away"):
                lock.require_held()
        assert objects(leased)["000002"] == theirs

    def test_lease_that_was_removed_is_no_longer_held(self, leased: ArtifactStore) -> None:
        with held(leased) as lock:
            leased.filesystem.rm(leased.path(LOCK), recursive=True)
            with held(leased) as second:
                time.sleep(0.3)
                second.require_held()
                with pytest.raises(LockLostError, match=f"removed|taken by {described_by_this_process()}"):
                    lock.require_held()

    def test_one_of_many_at_once(self, leased: ArtifactStore) -> None:
        assert winners(leased, 16) == 1

    def test_a_bucket_that_is_gone_at_the_end_hides_no_error(self, leased: ArtifactStore) -> None:
        def failing(path: str) -> bytes:
            raise ConnectionResetError("the network is away")

        with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError), held(leased):  # noqa: PT012
            patch.setattr(leased.filesystem, "cat_file", failing)
            _ = 1 / 0
        # Its process lives, so nobody but the lease time can tell that it is over.
        with held(leased) as lock:
            lock.require_held()

    def test_renewals_outlive_a_fault_of_the_network(
        self, leased: ArtifactStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real, faults = leased.filesystem.pipe_file, []

        def failing(path: str, value: bytes, **options: object) -> None:
            if threading.current_thread().name == "lease" and len(faults) < 3:
                faults.append(path)
                raise ConnectionResetError("the network is away")
            real(path, value, **options)

        monkeypatch.setattr(leased.filesystem, "pipe_file", failing)
        with held(leased) as lock:
            before = objects(leased)
            deadline = time.monotonic() + 10
            while objects(leased) == before and time.monotonic() < deadline:
                time.sleep(0.02)
            assert len(faults) == 3
            assert objects(leased) != before
            lock.require_held()


class TestBucketOfTwoProcesses:
    """The same over the S3 protocol, between processes."""

    @pytest.fixture(autouse=True)
    def short(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lease, "RENEWAL_SECONDS", 0.2)
        monkeypatch.setattr(lease, "LEASE_SECONDS", 2.0)

    def test_refused_while_it_lives_and_taken_over_when_killed(self, bucket: str, heard: list[str]) -> None:
        store = ArtifactStore(f"{bucket}/killed", "run")
        with held_elsewhere(f"{bucket}/killed") as other:
            assert f"process {other.pid}" in refusal(store)
            other.told("require")
            assert other.says() == "still"
            other.kill()
            begun = time.monotonic()
            with held(store) as lock:
                assert time.monotonic() - begun < lease.LEASE_SECONDS
                lock.require_held()
        assert "taken over" in heard[-1]

    def test_holder_that_slept_through_the_loss_of_its_lease_stops_itself(self, bucket: str) -> None:
        store = ArtifactStore(f"{bucket}/slept", "run")
        with held_elsewhere(f"{bucket}/slept") as other:
            os.kill(other.pid, signal.SIGSTOP)
            with held(store) as lock:
                os.kill(other.pid, signal.SIGCONT)
                other.told("require")
                said = other.ended()
                assert "LockLostError: run is no longer held by this process" in said
                assert f"taken by {described_by_this_process()}" in said
                lock.require_held()
            with held(store):
                pass


def described_by_this_process() -> str:
    holder = this_process()
    return f"{holder.user} on {holder.host}, process {holder.pid}"
