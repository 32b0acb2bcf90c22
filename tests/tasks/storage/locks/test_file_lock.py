"""One writer at a time on a disk: refused while the holder lives, taken over when it died."""

import errno
import fcntl
import os
import shutil
import signal
from pathlib import Path

import pytest

from grpo_core.errors import InputError
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.locks.lock_holder import described_holder
from tasks.storage.locks.run_lock import LOCK, LockLostError
from tests.tasks.storage import lock_holders
from tests.tasks.storage.lock_holders import held, held_elsewhere, refusal, winners

heard = lock_holders.heard


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(str(tmp_path), "run")


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
