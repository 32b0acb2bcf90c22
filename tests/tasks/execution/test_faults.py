"""What is tried again, and what never is."""

import errno
import subprocess
import sys

import httpx
import pytest
from botocore.exceptions import ClientError, ConnectTimeoutError, EndpointConnectionError
from prefect import task

from configs.placement_sections import PlacementSection, RetrySection
from grpo_core.errors import FailedSamplesError, InputError, InputErrors, NonFiniteError
from tasks.execution.faults import (
    Fault,
    LostStageError,
    RemoteStageError,
    StageCancelledError,
    StageTimeoutError,
    TriesUsedUpError,
    fault_of,
    retry_options,
)
from tasks.storage.artifacts.reference import StaleReferenceError
from tasks.storage.filesystem.failures import StorageError

REQUEST = httpx.Request("GET", "http://127.0.0.1/")


def answered(status: int) -> httpx.HTTPStatusError:
    return httpx.HTTPStatusError("", request=REQUEST, response=httpx.Response(status, request=REQUEST))


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (ConnectionResetError("peer"), Fault.STORAGE),
        (TimeoutError("slow"), Fault.STORAGE),
        (TimeoutError(), Fault.STORAGE),
        (OSError(errno.ESTALE, "a network disk came back"), Fault.STORAGE),
        (OSError(errno.EBUSY, "slow down"), Fault.STORAGE),
        (EndpointConnectionError(endpoint_url="http://127.0.0.1:1"), Fault.STORAGE),
        (ConnectTimeoutError(endpoint_url="http://127.0.0.1:1"), Fault.STORAGE),
        (httpx.ConnectError("refused"), Fault.SERVICE),
        (httpx.ReadTimeout("slow"), Fault.SERVICE),
        (answered(503), Fault.SERVICE),
        (answered(429), Fault.SERVICE),
        (LostStageError("killed"), Fault.LOST),
        (StageTimeoutError("late"), Fault.TIMEOUT),
        (RemoteStageError("ConnectionError: there", "", Fault.STORAGE), Fault.STORAGE),
    ],
)
def test_may_pass_by_itself(error: Exception, fault: Fault) -> None:
    assert fault_of(error) is fault


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
        TriesUsedUpError("ConnectionResetError: peer"),
    ],
)
def test_would_come_again(error: Exception) -> None:
    assert fault_of(error) is None


def test_delays_double_up_to_the_longest_for_any_number_of_tries() -> None:
    placement = PlacementSection(
        retries=RetrySection(storage=5000, service=0, lost=2, timeout=1, delay=4, max_delay=60)
    )
    # Prefect refuses a task with more than 50 delays.
    stage = task(lambda: None).with_options(**retry_options(placement))
    assert stage.retries == 5003
    assert isinstance(stage.retry_delay_seconds, list)
    assert stage.retry_delay_seconds[:5] == [4.0, 8.0, 16.0, 32.0, 60.0]
    assert stage.retry_delay_seconds[-1] == 60.0


def test_the_module_of_faults_needs_no_bucket_client() -> None:
    program = "import sys, tasks.execution.faults; sys.exit('botocore' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
