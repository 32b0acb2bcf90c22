"""A bucket that refuses or does not answer: what is told, and that a run can go on after it."""

import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_core.errors import InputError
from tasks.execution.errors import Retryable, retryable_kind
from tasks.storage.artifacts.reference import StaleReferenceError
from tasks.storage.artifacts.store import ArtifactStore, use_store
from tasks.storage.filesystem import roots
from tasks.storage.filesystem.failures import StorageError, UnreachableStorageError
from tasks.storage.prefect_results.result_storage import StageRecords
from tasks.storage.prefect_results.serializer import decode_reference, encode_reference
from tests.s3_server import S3Server, forget_clients
from tests.tasks.storage import s3_runs
from tests.tasks.storage.made_artifacts import FILES, FOLDER, commit
from tests.tasks.storage.s3_runs import read

store = s3_runs.store


@contextlib.contextmanager
def environment(monkeypatch: pytest.MonkeyPatch, values: dict[str, str]) -> Iterator[None]:
    with monkeypatch.context() as changed:
        for name, value in values.items():
            changed.setenv(name, value)
        forget_clients()
        yield
    forget_clients()


class TestRefusals:
    def refusal(self, root: str) -> InputError:
        started = time.monotonic()
        with pytest.raises(InputError) as caught:
            ArtifactStore(root, "run").require_writable()
        assert time.monotonic() - started < 30
        return caught.value

    def test_absent_bucket(self, bucket: str) -> None:
        error = self.refusal(f"{bucket}-absent/runs")
        assert "There is no such bucket; make it" in error.hint
        assert error.value == f"{bucket}-absent/runs"

    @pytest.mark.parametrize(
        "actions",
        [
            ("s3:ListBucket", "s3:GetObject", "s3:DeleteObject"),
            ("s3:ListBucket", "s3:PutObject", "s3:DeleteObject"),
            ("s3:PutObject", "s3:GetObject", "s3:DeleteObject"),
            ("s3:ListBucket", "s3:PutObject", "s3:GetObject"),
        ],
        ids=["no writing", "no reading", "no listing", "no removing"],
    )
    def test_missing_rights(
        self, s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch, actions: tuple[str, ...]
    ) -> None:
        with environment(monkeypatch, s3.make_user(*actions)), s3.enforcing_rights():
            error = self.refusal(f"{bucket}/runs")
        assert "list, read, write and delete objects" in error.hint
        assert "AWS_PROFILE" in error.hint

    def test_wrong_keys(self, s3: S3Server, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
        wrong = {"AWS_ACCESS_KEY_ID": "AKIAWRONG", "AWS_SECRET_ACCESS_KEY": "hidden-secret"}
        with environment(monkeypatch, wrong), s3.enforcing_rights():
            error = self.refusal(f"{bucket}/runs")
        assert "The bucket refuses" in error.hint
        assert "hidden-secret" not in str(error)

    def test_no_keys(self, bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
        forget_clients()
        assert "No credentials were found" in self.refusal(f"{bucket}/runs").hint

    def test_nobody_at_the_address(self, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        with environment(monkeypatch, {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}):
            assert "look at AWS_ENDPOINT_URL" in self.refusal(f"{bucket}/runs").hint

    def test_address_that_does_not_answer(self, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(roots, "LOOK", {"connect_timeout": 1, "read_timeout": 1})
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"http://127.0.0.1:{silent.getsockname()[1]}"
            with environment(monkeypatch, {"AWS_ENDPOINT_URL": address}):
                assert "does not answer as it should" in self.refusal(f"{bucket}/runs").hint


class TestFailuresInARun:
    def test_rights_that_are_lost_are_one_message(
        self, s3: S3Server, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        reference = commit(store)
        with environment(monkeypatch, s3.make_user("s3:ListBucket")), s3.enforcing_rights():
            without = ArtifactStore(f"s3://{store.root}", "run")
            for attempt in (
                lambda: commit(without, "iteration_000002/rollouts"),
                lambda: without.find(FOLDER),
                lambda: without.local_files(reference, tmp_path / "none"),
                lambda: without.restore_artifact(reference),
                lambda: without.write_file("run.json", b"{}"),
                lambda: without.read_file("run.json"),
                lambda: without.set_aside(["iteration_000001"], reason="a test"),
            ):
                with pytest.raises(StorageError, match=r"storage\.root.*the bucket refuses.*start again") as caught:
                    attempt()
                assert retryable_kind(caught.value) is None
        assert store.find(FOLDER) == reference

    def test_stage_does_not_run_again_while_a_bucket_does_not_say_whether_it_has_run(
        self, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        use_store(store)
        value = encode_reference(commit(store))
        real, calls = store.filesystem.cat_file, []

        def unreachable(*arguments: Any, **options: Any) -> bytes:
            calls.append(arguments)
            raise ConnectionError("connection reset by peer")

        monkeypatch.setattr(store.filesystem, "cat_file", unreachable)
        for reading in (lambda: decode_reference(value), lambda: StageRecords().read_path("collect-rollouts-1")):
            with pytest.raises(UnreachableStorageError) as caught:
                reading()
            assert retryable_kind(caught.value) is Retryable.STORAGE
            with pytest.raises(UnreachableStorageError, match="not known whether this stage has been done"):
                commit(store, "iteration_000002/rollouts")
            monkeypatch.setattr(store.filesystem, "cat_file", real)
            with contextlib.suppress(StaleReferenceError):
                reading()
            assert store.unread == set()
            monkeypatch.setattr(store.filesystem, "cat_file", unreachable)
        assert len(calls) == 2

    def test_a_filesystem_without_conditional_writes_is_looked_at_twice(
        self, store: ArtifactStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        real = store.filesystem.pipe_file

        def unconditional(path: str, content: bytes, mode: str = "overwrite") -> None:
            if mode == "create":
                raise NotImplementedError
            real(path, content)

        monkeypatch.setattr(store.filesystem, "pipe_file", unconditional)
        first = commit(store)
        assert commit(store, seconds=2.0) == first
        assert read(store, tmp_path / "fetched", first) == FILES
