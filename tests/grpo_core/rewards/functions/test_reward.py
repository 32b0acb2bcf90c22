"""A function of a user's own as a reward: its settings, its version, and what it needs."""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from grpo_core.errors import InputError
from grpo_core.rewards.functions import FunctionReward
from grpo_core.rewards.reward import Score, ScoringBatch, provenance_of
from tests.grpo_core.rewards.functions.conftest import texts


def test_version_follows_the_file_and_settings_leave_out_the_folder(
    write: Callable[[str], str], tmp_path: Path
) -> None:
    path = write("def score(completions, **kwargs):\n    return [1.0] * len(completions)\n")
    reward = FunctionReward(function=f"{path}:score")
    before = reward.version
    assert reward.score(texts(1)) == [Score(1.0, 1.0)]
    write("def score(completions, **kwargs):\n    return [2.00] * len(completions)\n")
    assert reward.score(texts(1)) == [Score(2.0, 2.0)]
    assert reward.version != before
    other = tmp_path / "elsewhere"
    other.mkdir()
    (other / "mine.py").write_text(Path(path).read_text())
    assert provenance_of(FunctionReward(function=f"{other}/mine.py:score")) == provenance_of(reward)
    assert str(tmp_path) not in str(provenance_of(reward))


def test_version_of_a_module_is_that_of_the_code_that_runs(
    write: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    source = "def score(completions, **kwargs):\n    return [1.0] * len(completions)\n"
    path = write(source, "module_of_rewards.py")
    importing = write("from module_of_rewards import score\n", "importing_rewards.py")
    for reward in (
        FunctionReward(function="module_of_rewards:score"),
        FunctionReward(function="module_of_rewards:score", arguments={"more": 1}),
        FunctionReward(function=f"{importing}:score"),
    ):
        write(source, "module_of_rewards.py")
        before = reward.version
        assert before == f"1+{hashlib.sha256(source.encode()).hexdigest()[:16]}"
        Path(path).write_text(source.replace("1.0", "2.00"))
        assert reward.score(texts(1)) == [Score(1.0, 1.0)]
        assert reward.version == before


def test_a_file_imports_its_neighbour(write: Callable[..., str]) -> None:
    write("FULL = 7.0\n", "neighbour_of_mine.py")
    path = write("import neighbour_of_mine\ndef score(completions, **kwargs):\n    return [neighbour_of_mine.FULL]\n")
    assert FunctionReward(function=f"{path}:score").score(texts(1)) == [Score(7.0, 7.0)]


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("trl.rewards:think_fromat_reward", r"has no think_fromat_reward\. Did you mean think_format_reward"),
        ("no_such_module.x:score", r"There is no module no_such_module\. .*no_such_module\.x\.py:NAME"),
        ("no/such/file.py:score", r"There is no file .*no/such/file\.py"),
        ("{file}:total", r"It is int, not a function"),
        ("{file}:narrow", r"does not take the keyword\(s\) prompts, completion_ids, trainer_state.*\*\*kwargs"),
        ("{file}:BUILT_IN", r"no Python source"),
        ("{file}:make", r"Calling it raised ValueError: no size at .*mine\.py:5"),
        ("{file}:make_nothing", r"gave int instead of a reward function"),
        ("{broken}:score", r"Importing it raised ZeroDivisionError: division by zero at .*broken\.py:2"),
        ("{misspelt}:score", r"Importing it raised SyntaxError.*misspelt\.py:1"),
        ("{lacking}:score", r"Importing it raised ModuleNotFoundError.*no_such_package.* at .*lacking\.py:1"),
    ],
)
def test_preflight_tells_what_is_missing(write: Callable[..., str], reference: str, message: str) -> None:
    file = write(
        "total = 3\nBUILT_IN = len\ndef narrow(completions): return []\n"
        "def make(size=None):\n    raise ValueError('no size')\ndef make_nothing(): return 3\n"
    )
    broken = write("x = 1\n1 / 0\n", "broken.py")
    misspelt = write("def (:\n", "misspelt.py")
    lacking = write("import no_such_package\n", "lacking.py")
    named = reference.format(file=file, broken=broken, misspelt=misspelt, lacking=lacking)
    (problem,) = FunctionReward(function=named).preflight()
    assert re.search(message, problem), problem
    assert problem.startswith("rewards.function.function")


def test_needs_the_column_that_the_function_cannot_do_without(write: Callable[[str], str]) -> None:
    path = write("def score(completions, solution, hint=None, **kwargs): return [1.0]\n")
    assert FunctionReward(function=f"{path}:score").needs_column == "solution"
    assert FunctionReward(function=f"{path}:score", arguments={"solution": ["x"]}).needs_column is None
    assert FunctionReward(function="trl.rewards:think_format_reward").needs_column is None
    assert FunctionReward(function="no.such:thing").needs_column is None


def test_token_ids_that_are_needed_and_not_known(write: Callable[[str], str]) -> None:
    reward = FunctionReward(function="trl.rewards:get_repetition_penalty_reward")
    optional = write("def score(completions, completion_ids=None, **kwargs): return [1.0]\n")
    assert reward.requires_tokens is not FunctionReward(function=f"{optional}:score").requires_tokens
    batch = ScoringBatch(sample_ids=["s"], prompts=["p"], completions=["c"])
    with pytest.raises(InputError, match=r"other_rewards\.py:\d+: .*needs completion_ids"):
        reward.score(batch)
