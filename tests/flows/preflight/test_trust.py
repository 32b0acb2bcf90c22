"""A run folder that comes from elsewhere runs no code and sends no token without consent."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from configs.loader import read_config
from configs.scoring import RewardSection
from flows.deploy import evaluation
from flows.evaluation import plan_evaluate
from flows.preflight.files import refuse_missing_files
from flows.preflight.trust import require_trust
from flows.replaying import plan_replay
from flows.requests import EvaluateRequest, ReplayRequest
from flows.rewards.analyse import analyse_rewards
from grpo_core.errors import InputError
from grpo_core.uses import Uses
from tasks.runs.lookup import find_run
from tasks.runs.stored import stored_config
from tasks.runs.trust import Use, remember, uses_of
from tests.flows.conftest import EVALUATED, TINY, Runs, refused
from tests.flows.test_stranger import change_config

SOURCE = """
import pathlib
pathlib.Path({trace!r}).touch()


def evil(completions, **rest):
    return [0.0] * len(completions)


def loss(inputs, settings):
    return inputs.logprobs
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """A file that is there once the stranger's code has run."""
    return tmp_path / "trace"


GUARDRAIL = "guardrails.rewards.0.settings.function"


def hostile(runs: Runs, trace: Path, place: str) -> str:
    """Have the run name a function of a file in its own folder; return what it names."""
    file = runs.path("evil.py")
    file.write_text(SOURCE.format(trace=str(trace)))
    function = f"{file}:{'loss' if place == 'update.loss' else 'evil'}"
    evaluated = {key.removeprefix("evaluate__"): each for key, each in EVALUATED.items()}
    change_config(runs.path(), lambda values: values["evaluate"].update(evaluated))
    # The person knows the shipped prompts.
    remember(uses_of(stored_config(find_run("run", str(runs.root))), within=("evaluate",)))

    def change(values: dict[str, Any]) -> None:
        if place == "update.loss":
            values["update"]["loss"] = function
        else:
            values["guardrails"]["rewards"] = [{"reward": "function", "settings": {"function": function}}]

    change_config(runs.path(), change)
    return function


def test_a_file_is_known_however_its_path_is_written(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("def loss(): ...")
    for key in ("function", "loss"):
        uses = [
            Use(key, Uses.CODE, f"{path}:loss", json.dumps({key: f"{path}:loss"}))
            for path in (tmp_path / "own.py", os.path.relpath(tmp_path / "own.py"))
        ]
        other = Use(key, Uses.CODE, uses[0].value, json.dumps({key: "own.py:other"}))
        assert uses[0].digest == uses[1].digest != other.digest


def test_a_loss_is_not_run_where_nothing_is_trained(finished: Runs, trace: Path) -> None:
    hostile(finished, trace, "update.loss")
    plan_evaluate(EvaluateRequest(run="run", root=str(finished.root)))
    analyse_rewards("run", root=str(finished.root), repeats=2)
    assert not trace.exists()


def test_a_rescoring_that_a_run_brings_along(finished: Runs, trace: Path) -> None:
    function, folder = hostile(finished, trace, GUARDRAIL), finished.path("rescored", "theirs")
    shutil.copytree(finished.path("iteration_000001"), folder / "iteration_000001")
    shutil.copytree(finished.path("iteration_000002"), folder / "iteration_000002")
    section = {"reward": "function", "name": "ssim", "settings": {"function": function}}
    (folder / "rewards.yaml").write_text(json.dumps({"rewards": [section]}))
    with pytest.raises(InputError, match="evil"):
        analyse_rewards("run", root=str(finished.root), rescored="theirs", repeats=0)
    assert not trace.exists()


def test_consent_is_remembered_for_exactly_this_code(finished: Runs, trace: Path) -> None:
    hostile(finished, trace, GUARDRAIL)
    ask, agree = (EvaluateRequest(run="run", root=str(finished.root), trust_code=trust) for trust in (False, True))
    plan_evaluate(agree)
    assert trace.exists()
    plan_evaluate(ask.model_copy())
    finished.path("evil.py").write_text(finished.path("evil.py").read_text() + "# changed\n")
    (error,) = refused(lambda: plan_evaluate(ask.model_copy()))
    assert error.place == f"run/config.yaml, {GUARDRAIL}"


def test_what_a_person_types_is_their_own(finished: Runs, trace: Path) -> None:
    root, function = str(finished.root), hostile(finished, trace, GUARDRAIL)
    typed = json.dumps([{"reward": "function", "settings": {"function": function}}])
    # It would be loaded to compare its scores with the stored ones.
    (error,) = refused(
        lambda: plan_evaluate(EvaluateRequest(run="run", root=root, overrides=("guardrails.rewards=[]",)))
    )
    assert error.place == f"run/config.yaml, {GUARDRAIL}"
    assert not trace.exists()
    change_config(finished.path(), lambda values: values["guardrails"].update(rewards=[]))
    plan_evaluate(EvaluateRequest(run="run", root=root, overrides=(f"guardrails.rewards={typed}",)))
    assert trace.exists()


def test_training_from_a_configuration_of_ones_own_is_consent(empty: Runs, trace: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(SOURCE.format(trace=str(trace)))
    rewards = [{"reward": "function", "settings": {"function": f"{file}:evil"}}]
    empty.start(run__iterations=1, rewards=rewards, **{**EVALUATED, "evaluate__every": 0})
    plan_evaluate(EvaluateRequest(run="run", root=str(empty.root)))
    plan_replay(ReplayRequest(source="run", root=str(empty.root)))
    moved = Runs(tmp_path / "elsewhere")
    shutil.copytree(empty.root, moved.root)
    plan_evaluate(EvaluateRequest(run="run", root=str(moved.root)))


def test_deployed_evaluations_of_ones_own_configuration_do_not_ask() -> None:
    parameters = evaluation(read_config(TINY), "tiny").record
    assert isinstance(parameters, EvaluateRequest)
    assert parameters.trust_code


def uses(**settings: object) -> list[Use]:
    section = RewardSection(reward="judge" if "url" in settings else "function", settings=settings)
    return uses_of(section, "rewards.0")


def is_refused(found: list[Use]) -> bool:
    try:
        require_trust(found, "run/config.yaml", trust=False)
    except InputError:
        return True
    return False


def test_what_else_the_run_would_do_with_a_known_function_is_not_known(tmp_path: Path) -> None:
    """A function of an installed package runs anything with the right arguments: subprocess.run is one."""
    known = uses(function="subprocess:run", arguments={"args": ["true"]}, factory=True)
    remember(known)
    assert not is_refused(known)
    assert is_refused(uses(function="subprocess:run", arguments={"args": ["rm", "-rf", "/"]}, factory=True))
    assert is_refused(uses(function="subprocess:run", factory=True))
    assert is_refused(uses(function="subprocess:call", arguments={"args": ["true"]}, factory=True))
    # Its neighbours, which it imports, are others.
    for folder in ("mine", "theirs"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "reward.py").write_text("import helpers\n")
    remember(uses(function=f"{tmp_path}/mine/reward.py:score"))
    assert not is_refused(uses(function=f"{tmp_path}/mine/reward.py:score"))
    assert is_refused(uses(function=f"{tmp_path}/theirs/reward.py:score"))


def test_a_token_goes_where_this_person_has_sent_it() -> None:
    remember(uses(url="http://127.0.0.1:8000/v1", token_env="JUDGE_TOKEN"))
    assert not is_refused(uses(url="http://127.0.0.1:8000/v1", token_env="JUDGE_TOKEN"))
    assert is_refused(uses(url="http://127.0.0.1:8000/v1", token_env="AWS_SECRET_ACCESS_KEY"))
    elsewhere = uses(url="http://elsewhere.example/v1", token_env="JUDGE_TOKEN")
    address, token = refused(lambda: require_trust(elsewhere, "x/config.yaml", trust=False))
    assert (address.place, address.value) == ("x/config.yaml, rewards.0.settings.url", "http://elsewhere.example/v1")
    assert (token.place, token.value) == ("x/config.yaml, rewards.0.settings.token_env", "JUDGE_TOKEN")
    assert "would be sent to http://elsewhere.example/v1," in token.hint
    assert not is_refused(uses(url="http://127.0.0.1:8000/v1"))


def test_nothing_that_is_remembered_makes_something_else_known() -> None:
    (secret,) = uses(function="os:abort")
    remember([Use("rewards.0.settings.function", Uses.CODE, f"a:b\n{secret.digest} c", "{}")])
    assert is_refused([secret])


def test_without_a_place_to_remember_it_asks_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    found = uses(function="os:abort")
    require_trust(found, "run/config.yaml", trust=True)
    assert is_refused(found)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    require_trust(found, "run/config.yaml", trust=True)
    assert not is_refused(found)
    assert os.stat(tmp_path / "state" / "grpo" / "trusted_code").st_mode & 0o777 == 0o600


def test_a_function_without_its_file_is_refused_at_once() -> None:
    overrides = ["update.loss=absent.py:f", 'guardrails.rewards=[{reward: function, settings: {function: "no.py:f"}}]']
    config = read_config(TINY, overrides)
    assert [use.is_missing for use in uses_of(config) if use.use is Uses.CODE] == [True, True]
    found = refused(lambda: refuse_missing_files(config))
    assert {error.place: error.value for error in found} == {
        "guardrails.rewards.0.settings.function": "no.py:f",
        "update.loss": "absent.py:f",
    }
