"""A call says all that a stage needs, and names it; errors come back from another process as they were raised."""

import errno
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from botocore.exceptions import ClientError, ConnectTimeoutError, EndpointConnectionError
from pydantic import ValidationError

from configs.placement import PlacementSection
from configs.scoring import AdvantagesSection, RewardSection
from grpo_core.errors import FailedSamplesError, InputError, NonFiniteError, joined
from grpo_core.parity import ParityError, ParityReport, ParityTolerance
from grpo_core.policies.engines.vllm import EngineError
from grpo_core.user_code.files import follow_code
from tasks.execution.call import StageCall, arguments_of, call_of, carry_out, naming_timeout, read_call, write_call
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
from tasks.execution.stage import stage_named
from tasks.runs.layout import SamplingRound
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef, StaleReferenceError
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.prefect_results import recorded_stage
from tasks.storage.roots import StorageError
from tests.tasks.execution.test_dispatch import reward_arguments, rollout_arguments
from tests.tasks.update.update_jobs import TEXTS, UPDATE

LOCAL_PLACEMENT = PlacementSection(devices="cpu")
TABLE = ArtifactRef(
    uri="run/iteration_000001/rollouts",
    sha256="0" * 64,
    digest="1" * 64,
    schema_version=3,
    rows=4,
    seconds=0.1 + 0.2,
    metrics={"num_tokens": 1e-17},
)
SECTION = RewardSection(reward="jpeg", clamp=(0.1, 1.0), where={"n": (1, "two", True)}, settings={"quality": 30})
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("collect rollouts", rollout_arguments("iteration_000001", LOCAL_PLACEMENT)),
    ("collect rollouts", {**rollout_arguments("iteration_000001", LOCAL_PLACEMENT), "rollout": TEXTS.rollout}),
    ("score reward", {**reward_arguments(TABLE, SECTION), "earlier": (TABLE,), "part": (1, 3)}),
    (
        "compute advantages",
        {
            "rounds": (SamplingRound(TABLE, {"jpeg": TABLE}),),
            "mix": (SECTION,),
            "advantages": AdvantagesSection(clip=2.0),
            "folder": "iteration_000001",
            "title": "an iteration",
            "earlier": None,
            "placement": LOCAL_PLACEMENT,
        },
    ),
    (
        "update policy",
        {
            "policy": PolicyRef(version=1, digest="2" * 64, checkpoint=TABLE),
            "rollouts": (TABLE, TABLE),
            "advantages": TABLE,
            "model": TEXTS.spec(),
            "updates": {"tokens": UPDATE},
            "seed": 3,
            "max_staleness": 2,
            "title": "iteration 2",
            "placement": LOCAL_PLACEMENT,
        },
    ),
]


@pytest.mark.parametrize(("name", "arguments"), CALLS, ids=[name for name, _ in CALLS])
def test_arguments_come_back_as_they_were(store: ArtifactStore, name: str, arguments: dict[str, Any]) -> None:
    stage = stage_named(name)
    call = call_of(stage, arguments, store)
    received = StageCall.model_validate_json(call.model_dump_json())
    assert arguments_of(received, stage) == arguments
    assert received.digest == call.digest
    again = call_of(stage, {**arguments, "placement": PlacementSection(devices="cpu", torch_threads=2)}, store)
    assert again.digest != call.digest


def test_neither_another_argument_nor_another_function_is_taken(store: ArtifactStore) -> None:
    name, arguments = CALLS[2]
    call = call_of(stage_named(name), arguments, store)
    bad = {**call.arguments, "section": {**call.arguments["section"], "wieght": 1.0}}
    with pytest.raises(ValidationError, match="wieght"):
        arguments_of(call.model_copy(update={"arguments": bad}), stage_named(name))
    with pytest.raises(ValueError, match=r"no stage 'os\.system'; there are collect rollouts, score reward"):
        stage_named("os.system")


@pytest.mark.parametrize(
    ("index", "title", "setting"),
    [(0, "collect rollouts", "placement.rollouts.timeout"), (2, "score reward jpeg", "placement.rewards.timeout")],
)
def test_a_timeout_names_the_stage_and_the_setting(store: ArtifactStore, index: int, title: str, setting: str) -> None:
    name, arguments = CALLS[index]
    call = call_of(stage_named(name), arguments, store)
    with (
        pytest.raises(StageTimeoutError, match=rf"^{title}: late; raise {setting}"),
        naming_timeout(call.stage, call.arguments),
    ):
        raise StageTimeoutError("late")


def test_other_code_is_refused(store: ArtifactStore) -> None:
    name, arguments = CALLS[2]
    call = call_of(stage_named(name), arguments, store).model_copy(update={"code": "another"})
    with pytest.raises(InputError, match=r"worker: .* runs other code or other versions"):
        carry_out(call).reference()


@pytest.mark.parametrize("index", [2, 4], ids=["a reward", "a loss"])
def test_other_code_of_a_function_is_refused(store: ArtifactStore, tmp_path: Path, index: int) -> None:
    """What the function imports has changed between the call and the stage, or is another file on another machine."""
    (tmp_path / "mine.py").write_text("from helper import f\ndef score(**_):\n    return f\n")
    (tmp_path / "helper.py").write_text("f = 1\n")
    name, arguments = CALLS[index]
    function = f"{tmp_path}/mine.py:score"
    if index == 2:
        arguments = {**arguments, "section": RewardSection(reward="function", settings={"function": function})}
    else:
        arguments = {**arguments, "updates": {"tokens": UPDATE.model_copy(update={"loss": function})}}
    call = call_of(stage_named(name), arguments, store)
    assert call.functions == {function: follow_code(function).digest}
    (tmp_path / "helper.py").write_text("f = 2\n")
    with pytest.raises(InputError, match=r"mine\.py:score.* Its code here .* is not the run's") as caught:
        carry_out(call).reference()
    assert caught.value.value == function


def test_another_model_under_the_same_name_is_refused(store: ArtifactStore) -> None:
    arguments = rollout_arguments("iteration_000001", LOCAL_PLACEMENT)
    other = arguments["model"].model_copy(update={"digest": "another"})
    call = call_of(stage_named("collect rollouts"), {**arguments, "model": other}, store)
    with pytest.raises(InputError, match=r"policy\.model"):
        carry_out(call).reference()
    assert store.find("iteration_000001/rollouts") is None


def test_a_call_is_recorded_and_removed_and_a_withdrawn_one_makes_nothing(store: ArtifactStore) -> None:
    arguments = rollout_arguments("iteration_000001", LOCAL_PLACEMENT)
    call = call_of(stage_named("collect rollouts"), arguments, store, "key")
    with pytest.raises(StaleReferenceError, match="run/iteration_000001/rollouts"):
        carry_out(call).reference()
    assert store.find("iteration_000001/rollouts") is None
    assert recorded_stage(store, "key") is None
    write_call(store, call)
    assert carry_out(call).reference() == store.find("iteration_000001/rollouts") == recorded_stage(store, "key")
    with pytest.raises(ValueError, match="answered or withdrawn"):
        read_call(store, call.digest)


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
    program = f"import sys, tasks.rewards.score_rows; sys.exit({heavy})"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
