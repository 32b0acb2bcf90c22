"""One writer at a time in a bucket: refused while it is renewed, taken over when it is not, told when it was lost."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator

import fsspec
import pytest

from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.locks import lease
from tasks.storage.locks.lock_holder import this_process
from tasks.storage.locks.run_lock import LOCK, LockLostError
from tests.tasks.storage import lock_holders
from tests.tasks.storage.lock_holders import BUCKET, described_by_this_process, held, held_elsewhere, refusal, winners

heard = lock_holders.heard

PATIENT = 60.0
"""Seconds in which whoever watches a lease sees it renewed, however busy the machine; no test waits for their end."""


@pytest.fixture
def leased(monkeypatch: pytest.MonkeyPatch) -> Iterator[ArtifactStore]:
    monkeypatch.setattr(lease, "RENEWAL_SECONDS", 0.05)
    monkeypatch.setattr(lease, "LEASE_SECONDS", 0.6)
    yield ArtifactStore(BUCKET, "run")
    memory = fsspec.filesystem("memory")
    if memory.exists("/bucket"):
        memory.rm("/bucket", recursive=True)


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
    def test_second_writer_is_refused_as_soon_as_the_lease_is_renewed(
        self, leased: ArtifactStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lasting = 2 * lease.LEASE_SECONDS
        monkeypatch.setattr(lease, "LEASE_SECONDS", PATIENT)
        with held(leased) as lock:
            for _ in range(2):
                assert f"process {os.getpid()}" in refusal(leased)
            time.sleep(lasting)
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

    def test_one_of_many_at_once(self, leased: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(lease, "LEASE_SECONDS", PATIENT)
        assert winners(leased, 16) == 1

    @pytest.mark.parametrize("third", ["holds", "holds and removes", "is gone"])
    def test_one_that_slept_between_looking_and_taking_does_not_hold_beside_another(
        self, leased: ArtifactStore, monkeypatch: pytest.MonkeyPatch, third: str
    ) -> None:
        filesystem, folder = leased.filesystem, leased.path(LOCK)
        real, made = filesystem.pipe_file, []

        def sleeping(path: str, value: bytes, **options: object) -> None:
            if options.get("mode") == "create" and not made:
                made.append(None)
                taken = lease.take_lease(filesystem, folder, this_process())
                assert isinstance(taken, lease.Lease)
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
        taken = lease.take_lease(filesystem, folder, this_process())
        if third == "is gone":
            assert isinstance(taken, lease.Lease)
            assert "removed" in str(taken._look())
            taken.release()
            return
        assert isinstance(taken, str)
        assert "ann on far-away" in taken
        assert list(objects(leased)) == ["000002"]

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
            deadline = time.monotonic() + 60
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

    def test_refused_while_it_lives_and_taken_over_when_killed(
        self, bucket: str, heard: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(lease, "LEASE_SECONDS", PATIENT)
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
