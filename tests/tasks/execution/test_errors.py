"""Which errors may pass when a stage is retried, and how they come back from another process."""

import errno
import subprocess
import sys

import httpx
import pytest
from botocore.exceptions import ClientError, ConnectTimeoutError, EndpointConnectionError

from grpo_core.errors import FailedSamplesError, InputError, InputErrors, NonFiniteError
from grpo_core.parity import ParityError, ParityReport, ParityTolerance
from tasks.execution.errors import (
    ErrorRecord,
    LostStageError,
    RemoteStageError,
    RetriesExhaustedError,
    Retryable,
    StageCancelledError,
    StageTimeoutError,
    record_of,
    retryable_kind,
)
from tasks.storage.artifacts.reference import StaleReferenceError
from tasks.storage.filesystem.failures import StorageError

REQUEST = httpx.Request("GET", "http://127.0.0.1/")


def answered(status: int) -> httpx.HTTPStatusError:
    return httpx.HTTPStatusError("", request=REQUEST, response=httpx.Response(status, request=REQUEST))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ConnectionResetError("peer"), Retryable.STORAGE),
        (TimeoutError("slow"), Retryable.STORAGE),
        (TimeoutError(), Retryable.STORAGE),
        (OSError(errno.ESTALE, "a network disk came back"), Retryable.STORAGE),
        (OSError(errno.EBUSY, "slow down"), Retryable.STORAGE),
        (EndpointConnectionError(endpoint_url="http://127.0.0.1:1"), Retryable.STORAGE),
        (ConnectTimeoutError(endpoint_url="http://127.0.0.1:1"), Retryable.STORAGE),
        (httpx.ConnectError("refused"), Retryable.SERVICE),
        (httpx.ReadTimeout("slow"), Retryable.SERVICE),
        (answered(503), Retryable.SERVICE),
        (answered(429), Retryable.SERVICE),
        (LostStageError("killed"), Retryable.LOST),
        (StageTimeoutError("late"), Retryable.TIMEOUT),
        (RemoteStageError("ConnectionError: there", "", Retryable.STORAGE), Retryable.STORAGE),
    ],
)
def test_may_pass(error: Exception, kind: Retryable) -> None:
    assert retryable_kind(error) is kind


@pytest.mark.parametrize(
    "error",
    [
        InputError("a", 1, "hint"),
        InputErrors([InputError("a", 1, "hint")]),
        NonFiniteError("loss", ["s0"], "hint"),
        FailedSamplesError("ocr", ["s0: no answer"], 4, 0.1),
        StorageError("storage.root", "/full", "the disk is full"),
        StaleReferenceError("gone"),
        FileNotFoundError(errno.ENOENT, "no"),
        PermissionError(errno.EACCES, "no"),
        OSError(errno.ENOSPC, "full"),
        ClientError({"Error": {"Code": "AccessDenied"}}, "PutObject"),
        answered(401),
        answered(422),
        RuntimeError("a bug"),
        RemoteStageError("KeyError: a bug there", "", None),
        StageCancelledError("cancelled"),
        RetriesExhaustedError("ConnectionResetError: peer"),
    ],
)
def test_would_be_raised_again(error: Exception) -> None:
    assert retryable_kind(error) is None


REPORT = ParityReport(0.5, 0.1, 0.6, 1.6, 40, 4, 1, ("s1", "s2"))


@pytest.mark.parametrize(
    "error",
    [
        InputError("policy.model", "nowhere", "Give a folder."),
        FailedSamplesError("ocr", ["s0: no answer"], 4, 0.1),
        NonFiniteError("loss", ["s1", "s2"], "Lower the learning rate."),
        ParityError(REPORT, ParityTolerance(1e-3, 1e-4)),
        StaleReferenceError("run/rollouts: part is missing"),
        StorageError("storage.root", "/full", "the disk is full"),
        ValueError("all rows are too stale"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_for_people_come_back_with_class_and_arguments(error: Exception) -> None:
    again = ErrorRecord.model_validate_json(record_of(error).model_dump_json()).error()
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert again.__reduce__()[1] == error.__reduce__()[1]


@pytest.mark.parametrize(
    ("error", "kind"), [(RuntimeError("a bug"), None), (ConnectionResetError("closed"), Retryable.STORAGE)]
)
def test_other_errors_come_back_by_name_with_their_kind(error: Exception, kind: Retryable | None) -> None:
    record = ErrorRecord.model_validate_json(record_of(error).model_dump_json())
    again = record.error()
    assert isinstance(again, RemoteStageError)
    assert str(again) == f"{type(error).__name__}: {error}"
    assert retryable_kind(again) is kind
    assert record.is_foreseen is (kind is not None)


@pytest.mark.slow
def test_scoring_processes_need_neither_prefect_nor_a_bucket_client() -> None:
    heavy = "any(each in sys.modules for each in ('botocore', 'prefect'))"
    program = f"import sys, tasks.rewards.process_pool; sys.exit({heavy})"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
