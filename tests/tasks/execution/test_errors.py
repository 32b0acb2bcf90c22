"""Which errors may pass when a stage is retried, and how they come back from another process."""

import errno
import subprocess
import sys

import httpx
import pytest
import torch
from botocore.exceptions import ClientError, ConnectTimeoutError, EndpointConnectionError

from grpo_core.errors import FailedSamplesError, InputError, NonFiniteError, joined
from grpo_core.parity import ParityError, ParityReport, ParityTolerance
from grpo_core.policies.engines.vllm import EngineError
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
from tasks.storage.roots import StorageError

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
        (InputError("a", 1, "hint"), None),
        (joined([InputError("a", 1, "hint"), InputError("b", 2, "hint")]), None),
        (NonFiniteError("loss", ["s0"], "hint"), None),
        (FailedSamplesError("ocr", ["s0: no answer"], 4, 0.1), None),
        (StorageError("storage.root", "/full", "the disk is full"), None),
        (StaleReferenceError("gone"), None),
        (FileNotFoundError(errno.ENOENT, "no"), None),
        (PermissionError(errno.EACCES, "no"), None),
        (OSError(errno.ENOSPC, "full"), None),
        (ClientError({"Error": {"Code": "AccessDenied"}}, "PutObject"), None),
        (EngineError("vLLM at http://localhost:1: 2 of 8 rows have no answer"), Retryable.SERVICE),
        (answered(401), None),
        (answered(422), None),
        (RuntimeError("a bug"), None),
        (RemoteStageError("KeyError: a bug there", "", None), None),
        (StageCancelledError("cancelled"), None),
        (RetriesExhaustedError("ConnectionResetError: peer"), None),
    ],
)
def test_which_errors_may_pass(error: Exception, kind: Retryable | None) -> None:
    assert retryable_kind(error) is kind


REPORT = ParityReport(0.5, 0.1, 0.6, 1.6, 40, 4, 1, ("s1", "s2"), "tokens", (0.5, 0.25), 3, "vllm 0.32.0 in float32")


@pytest.mark.parametrize(
    "error",
    [
        InputError("policy.model", "nowhere", "Give a folder."),
        joined([InputError("a", 1, "hint"), InputError("b", [2], "other hint")]),
        FailedSamplesError("ocr", ["s0: no answer"], 4, 0.1),
        NonFiniteError("loss", ["s1", "s2"], "Lower the learning rate."),
        ParityError(REPORT, ParityTolerance(1e-3, 1e-4, 0.01)),
        StaleReferenceError("run/rollouts: part is missing"),
        StorageError("storage.root", "/full", "the disk is full"),
        ValueError("all rows are too stale"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_for_people_come_back_with_class_and_arguments(error: Exception) -> None:
    message = record_of(error).state_message()
    assert str(error) in message
    record = ErrorRecord.from_state_message(message)
    assert record is not None
    again = record.error()
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
    program = f"import sys, tasks.rewards.rows; sys.exit({heavy})"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
