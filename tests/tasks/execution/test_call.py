"""A call says all that a stage needs, and names it: the same stage on the same inputs has the same digest."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from configs.placement import PlacementSection
from configs.scoring import AdvantagesSection, RewardSection
from grpo_core.errors import InputError
from grpo_core.user_code import follow_code
from tasks.execution.call import StageCall, arguments_of, call_of, carry_out, naming_timeout, read_call, write_call
from tasks.execution.errors import StageTimeoutError
from tasks.execution.stage import stage_named
from tasks.runs.layout import SamplingRound
from tasks.storage.artifacts.reference import ArtifactRef, PolicyRef, StaleReferenceError
from tasks.storage.artifacts.store import ArtifactStore
from tasks.storage.prefect_results import recorded_stage
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


def test_an_argument_that_the_stage_does_not_take_is_refused(store: ArtifactStore) -> None:
    name, arguments = CALLS[2]
    call = call_of(stage_named(name), arguments, store)
    bad = {**call.arguments, "section": {**call.arguments["section"], "wieght": 1.0}}
    with pytest.raises(ValidationError, match="wieght"):
        arguments_of(call.model_copy(update={"arguments": bad}), stage_named(name))


def test_no_other_function_can_be_called() -> None:
    with pytest.raises(ValueError, match=r"no stage 'os\.system'; there are collect rollouts, score reward"):
        stage_named("os.system")


@pytest.mark.parametrize(
    ("index", "title", "setting"),
    [(0, "collect rollouts", "placement.rollouts.timeout"), (2, "score reward jpeg", "placement.rewards.timeout")],
)
def test_a_timeout_names_the_stage_its_reward_and_the_setting(
    store: ArtifactStore, index: int, title: str, setting: str
) -> None:
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
