"""One writer at a time: refused while the holder lives, taken over when it died, reported when the lock was lost."""

import contextlib
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

from grpo_core.errors import InputError
from tasks.progress import listen, listener
from tasks.storage import lease
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.lease import Lease, read_holder, take_lease, this_process
from tasks.storage.run_lock import LOCK, LockLostError, RunLock, is_locked, locked
from tests.processes import ProgressLog
from tests.tasks.storage.made_artifacts import ON_EACH_KIND_OF_ROOT, another, root_url


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "RENEWAL_SECONDS", 0.1)
    # No test waits for its end, however busy the machine.
    monkeypatch.setattr(lease, "LEASE_SECONDS", 600.0)


# Locks a run and obeys one word a line; answers with a line each.
HOLDER = """
import os, subprocess, sys, time
from tasks.storage import lease
from tasks.storage.run_lock import locked
from tasks.storage.artifacts.store import ArtifactStore
lease.RENEWAL_SECONDS, lease.LEASE_SECONDS = 0.2, 600.0
with locked(ArtifactStore(sys.argv[1], "run"), setting="run.name", value="run") as lock:
    print("held", flush=True)
    for line in sys.stdin:
        if line == "fork\\n":
            if os.fork() == 0:
                print("forked", flush=True)
                time.sleep(600)
        if line == "start\\n":
            print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
        if line == "require\\n":
            lock.require_held()
            print("still", flush=True)
"""


@contextlib.contextmanager
def held_elsewhere(store: ArtifactStore) -> Iterator["subprocess.Popen[str]"]:
    """A process that has the lock; it is killed at the end, with all that it started."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    command = [sys.executable, "-c", HOLDER, root_url(store)]
    with subprocess.Popen(command, text=True, start_new_session=True, **pipes) as process:
        try:
            assert answer(process) == "held"
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def answer(process: "subprocess.Popen[str]", word: str = "") -> str:
    process.stdin.write(f"{word}\n" if word else "")
    process.stdin.flush()
    return process.stdout.readline().strip()


@pytest.fixture
def logged() -> Iterator[list[str]]:
    log, before = ProgressLog(), listener()
    listen(log)
    yield log.lines
    listen(before)


@pytest.fixture
def leased() -> ArtifactStore:
    """A run on a filesystem in memory, which has leases as a bucket has."""
    store = ArtifactStore("memory://leases", "run")
    with contextlib.suppress(FileNotFoundError):
        store.filesystem.rm(store.path(), recursive=True)
    return store


def held(store: ArtifactStore, place: str = "") -> contextlib.AbstractContextManager[RunLock]:
    return locked(store, place, setting="run.name", value="run")


def refusal(store: ArtifactStore, place: str = "") -> str:
    with pytest.raises(InputError) as caught, held(store, place):
        pass
    assert caught.value.place == "run.name"
    return str(caught.value)


class TestBothKinds:
    @ON_EACH_KIND_OF_ROOT
    def test_a_second_writer_is_refused_and_the_first_continues(self, store: ArtifactStore) -> None:
        assert not is_locked(store)
        with held_elsewhere(store) as other:
            assert is_locked(store)
            message = refusal(store)
            for word in (f"process {other.pid}", " on ", ", since ", "UTC (-c "):
                assert word in message
            assert answer(other, "require") == "still"
        with held(store), held(store, "rescored/mine"), held(another(store, "other")):
            assert f"process {os.getpid()}" in refusal(store, "rescored/mine")

    @ON_EACH_KIND_OF_ROOT
    def test_a_killed_holder_is_taken_over_and_logged(self, store: ArtifactStore, logged: list[str]) -> None:
        with held_elsewhere(store) as other:
            other.kill()
            other.wait()
            assert not is_locked(store)
            with held(store) as lock:
                lock.require_held()
                assert is_locked(store)
                assert [f"process {other.pid}" in line and "taken over" in line for line in logged] == [True]
                assert f"process {os.getpid()}" in refusal(store)
        with pytest.raises(ZeroDivisionError), held(store):
            _ = 1 / 0
        with held(store):
            assert [line for line in logged if "taken over" in line] == logged[:1]

    @pytest.mark.parametrize("store", ["local", "leased"], indirect=True)
    def test_one_of_many_at_once(self, store: ArtifactStore) -> None:
        begin, end = threading.Barrier(8), threading.Barrier(8)

        def takes(_: int) -> bool:
            begin.wait()
            with contextlib.ExitStack() as stack:
                with contextlib.suppress(InputError):
                    stack.enter_context(held(store))
                    end.wait()
                    return True
                end.wait()
                return False

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(takes, range(8))) == 1


class TestFile:
    @pytest.mark.parametrize("kind", ["fork", "start"])
    def test_processes_that_the_holder_started_do_not_hold_it(self, local: ArtifactStore, kind: str) -> None:
        with held_elsewhere(local) as other:
            assert answer(other, kind) != ""
            os.kill(other.pid, signal.SIGKILL)  # and not its group: what it started lives on
            os.waitpid(other.pid, 0)
            other.returncode = -signal.SIGKILL
            with held(local) as lock:
                lock.require_held()

    def test_held_lock_refuses_whatever_its_file_says(self, local: ArtifactStore) -> None:
        with held(local):
            for content in (b"", b"\xff{", b'{"user": "me"}', b"[1]"):
                Path(local.path(LOCK)).write_bytes(content)
                assert "another process" in refusal(local)
        assert Path(local.path(LOCK)).read_bytes() == b""
        # As a killed holder left it, and a bit has flipped since.
        Path(local.path(LOCK)).write_bytes(b"\xff{")
        with held(local) as lock:
            lock.require_held()

    def test_a_folder_that_was_moved_away_is_no_longer_held(self, local: ArtifactStore, tmp_path: Path) -> None:
        with held(local) as lock:
            shutil.move(local.path(), tmp_path / "elsewhere")
            with pytest.raises(LockLostError):
                lock.require_held()
            with held(local) as second:
                second.require_held()
                with pytest.raises(LockLostError):
                    lock.require_held()

    def test_colleagues_may_take_it_after(self, local: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
        Path(local.path()).mkdir(parents=True)
        Path(local.path()).chmod(0o775)
        with held(local):
            assert read_holder(Path(local.path(LOCK)).read_bytes()) is not None
        assert Path(local.path(LOCK)).stat().st_mode & 0o777 == 0o664
        monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
        with pytest.raises(InputError) as caught, held(local):
            pass
        assert (caught.value.place, caught.value.value) == ("storage.root", local.path())


def write_lease(store: ArtifactStore, number: int, **changes: object) -> None:
    """A lease as another machine's process left it."""
    holder = this_process().model_copy(update={"user": "ann", "host": "far-away", "machine": "another", **changes})
    content = json.dumps({"holder": holder.model_dump(), "count": 7}).encode()
    store.filesystem.pipe_file(store.path(f"{LOCK}/{number:06d}"), content)


def objects(store: ArtifactStore) -> dict[str, bytes]:
    paths = store.filesystem.ls(store.path(LOCK), detail=False)
    return {path.rsplit("/", 1)[-1]: store.filesystem.cat_file(path) for path in paths}


def wait_until_lost(lock: RunLock) -> str:
    while True:
        try:
            lock.require_held()
        except LockLostError as error:
            return str(error)
        time.sleep(0.01)


class TestLease:
    def test_released_lease_names_nobody_and_is_taken_at_once(self, leased: ArtifactStore, logged: list[str]) -> None:
        for number in ("000001", "000002", "000003"):
            with held(leased):
                assert list(objects(leased)) == [number]
            assert objects(leased) == {number: b'{"released": true}'}
        assert logged == []

    def test_another_process_of_that_id_is_no_holder(self, leased: ArtifactStore, logged: list[str]) -> None:
        with subprocess.Popen(["true"]) as ended:
            ended.wait()
        here = this_process()
        for number, changes in ((4, {"pid": ended.pid}), (9, {"started": 1.0})):
            write_lease(leased, number, **{**here.model_dump(), **changes})
            with held(leased) as lock:
                lock.require_held()
            assert "taken over" in logged[-1]

    @pytest.mark.parametrize("content", [None, b"\xff\x00"])
    def test_silent_holder_is_taken_over_after_the_lease_time(
        self, leased: ArtifactStore, logged: list[str], monkeypatch: pytest.MonkeyPatch, content: bytes | None
    ) -> None:
        monkeypatch.setattr(lease, "LEASE_SECONDS", 0.5)
        write_lease(leased, 1)
        if content is not None:
            leased.filesystem.pipe_file(leased.path(f"{LOCK}/000001"), content)
        with held(leased) as lock:
            lock.require_held()
        assert logged[0].startswith(f"held by {'another process' if content else 'ann on far-away'}")

    def test_holder_whose_lease_was_taken_stops_and_disturbs_nobody(self, leased: ArtifactStore) -> None:
        with held(leased) as lock:
            write_lease(leased, 2)
            theirs = objects(leased)["000002"]
            assert "taken by ann on far-away" in wait_until_lost(lock)
        assert objects(leased)["000002"] == theirs
        # One that was removed is held no longer.
        leased.filesystem.rm(leased.path(LOCK), recursive=True)
        with held(leased) as lock:
            leased.filesystem.rm(leased.path(LOCK), recursive=True)
            with held(leased) as second:
                assert "run is no longer held" in wait_until_lost(lock)
                second.require_held()

    @pytest.mark.parametrize("third", ["holds", "holds and removes", "is gone"])
    def test_one_that_slept_between_looking_and_taking_does_not_hold_it_too(
        self, leased: ArtifactStore, monkeypatch: pytest.MonkeyPatch, third: str
    ) -> None:
        filesystem, folder = leased.filesystem, leased.path(LOCK)
        real, made = filesystem.pipe_file, []

        def sleeping(path: str, value: bytes, **options: object) -> None:
            if options.get("mode") == "create" and not made:
                made.append(None)
                taken = take_lease(filesystem, folder, this_process())
                taken.release()
                write_lease(leased, 2)
                filesystem.rm_file(f"{folder}/000001")
                real(path, value, **options)
                if third == "holds and removes":
                    filesystem.rm_file(path)
                if third == "is gone":
                    filesystem.rm(folder, recursive=True)
                return
            real(path, value, **options)

        monkeypatch.setattr(filesystem, "pipe_file", sleeping)
        taken = take_lease(filesystem, folder, this_process())
        if third == "is gone":
            assert isinstance(taken, Lease)
            assert "removed" in str(taken._check())
            taken.release()
            return
        assert isinstance(taken, str)
        assert "ann on far-away" in taken
        assert list(objects(leased)) == ["000002"]

    def test_a_failing_bucket_hides_no_error(self, leased: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
        def failing(path: str) -> bytes:
            raise ConnectionResetError("the network is away")

        with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError), held(leased):  # noqa: PT012
            patch.setattr(leased.filesystem, "cat_file", failing)
            _ = 1 / 0
        # Its process lives, so only the lease time shows that it is over.
        monkeypatch.setattr(lease, "LEASE_SECONDS", 0.5)
        with held(leased) as lock:
            lock.require_held()

    def test_renewals_survive_a_failing_network(self, leased: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
        real, failures = leased.filesystem.pipe_file, []

        def failing(path: str, value: bytes, **options: object) -> None:
            if threading.current_thread().name == "lease" and len(failures) < 3:
                failures.append(path)
                raise ConnectionResetError("the network is away")
            real(path, value, **options)

        monkeypatch.setattr(leased.filesystem, "pipe_file", failing)
        with held(leased) as lock:
            before = objects(leased)
            while objects(leased) == before:
                time.sleep(0.02)
            assert len(failures) == 3
            lock.require_held()

    def test_holder_that_slept_through_the_loss_of_its_lease_stops(
        self, remote: ArtifactStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(lease, "LEASE_SECONDS", 2.0)
        with held_elsewhere(remote) as other:
            os.kill(other.pid, signal.SIGSTOP)
            with held(remote) as lock:
                os.kill(other.pid, signal.SIGCONT)
                said = other.communicate("require\n", timeout=120)[1]
                assert "LockLostError: run is no longer held" in said
                assert f"process {os.getpid()}" in said
                lock.require_held()
