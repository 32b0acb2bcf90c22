"""A user's function as a reward: its version, what it needs, and the numbers of TRL's functions."""

import math
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import accelerate
import pytest
import trl.rewards
from trl.rewards import accuracy_rewards
from trl.trainer import grpo_trainer

from grpo_core.rewards.functions.reward import FunctionReward
from grpo_core.rewards.reward import provenance_of
from grpo_core.rewards.scoring_batch import Score, ScoringBatch
from grpo_core.rollouts.messages import read_messages, write_messages
from tests.grpo_core.rewards.conftest import refusal
from tests.grpo_core.rewards.functions.conftest import COLUMNS, texts


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


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("trl.rewards:think_fromat_reward", r"has no think_fromat_reward\. Did you mean think_format_reward"),
        ("no_such_module.x:score", r"There is no module no_such_module\. .*no_such_module\.x\.py:NAME"),
        ("no/such/file.py:score", r"There is no file .*no/such/file\.py"),
        ("{file}:total", r"It is int, not a function"),
        ("{file}:BUILT_IN", r"no Python source"),
        ("{file}:make", r"Calling it raised ValueError: no size at .*mine\.py:4"),
        ("{file}:make_nothing", r"gave int instead of a reward function"),
        ("{broken}:score", r"Importing it raised ZeroDivisionError: division by zero at .*broken\.py:2"),
        ("{misspelt}:score", r"Importing it raised SyntaxError.*misspelt\.py:1"),
        ("{lacking}:score", r"Importing it raised ModuleNotFoundError.*no_such_package.* at .*lacking\.py:1"),
    ],
)
def test_preflight_tells_what_is_missing(write: Callable[..., str], reference: str, message: str) -> None:
    file = write(
        "total = 3\nBUILT_IN = len\n"
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
    assert FunctionReward(function=f"{path}:score").load_needs().column == "solution"
    assert FunctionReward(function=f"{path}:score", arguments={"solution": ["x"]}).load_needs().column is None
    assert FunctionReward(function="trl.rewards:think_format_reward").load_needs().column is None
    assert FunctionReward(function="no.such:thing").load_needs().column is None


def test_token_ids_that_are_needed_and_not_known(write: Callable[[str], str]) -> None:
    reward = FunctionReward(function="trl.rewards:get_repetition_penalty_reward")
    optional = write("def score(completions, completion_ids=None, **kwargs): return [1.0]\n")
    assert reward.load_needs().tokens != FunctionReward(function=f"{optional}:score").load_needs().tokens
    batch = ScoringBatch(sample_ids=["s"], prompts=["p"], completions=["c"])
    place, value = refusal(reward.score, batch)
    assert re.search(r"other_rewards\.py:\d+$", place)
    assert value is None


def as_trl_calls(function: Any, batch: ScoringBatch) -> list[float | None]:
    """TRL's own trainer code on a stand-in for the trainer's state."""
    # Its logger asks for that of accelerate.
    accelerate.PartialState(cpu=True)

    class Accelerator:
        device = "cpu"

    class Trainer(grpo_trainer.GRPOTrainer):
        def __init__(self) -> None:
            self.accelerator, self.state, self.environments = Accelerator(), None, None
            self.reward_funcs, self.reward_processing_classes = [function], [None]
            self.reward_func_names, self.current_gradient_accumulation_steps = ["mine"], 1
            self._log_completion_extra = self._log_metric = lambda *given: None

    trainer = Trainer()
    rows = range(len(batch))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpo_trainer, "gather", lambda rewards: rewards)
        patch.setattr(grpo_trainer, "profiling_context", lambda *given: threading.Lock())
        rewards = trainer._calculate_rewards.__wrapped__(
            trainer,
            [{"prompt": batch.prompts[i], **{key: batch.columns[key][i] for key in batch.columns}} for i in rows],
            [read_messages(batch.prompts[i]) for i in rows],
            [[{"role": "assistant", "content": batch.completions[i]}] for i in rows],
            [list(ids) for ids in batch.token_ids],
        )
    return [None if math.isnan(value) else value for value in rewards[:, 0].tolist()]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("think_format_reward", None),
        ("get_repetition_penalty_reward", {"ngram_size": 2, "max_penalty": -0.5}),
        ("get_repetition_penalty_reward", None),
        ("get_soft_overlong_punishment", {"max_completion_len": 20, "soft_punish_cache": 10}),
        ("accuracy_reward", None),
        ("reasoning_accuracy_reward", None),
        ("reasoning_accuracy_reward", {"reasoning_delimiters": ["</think>", "sum"]}),
        ("get_cosine_scaled_reward", {"max_len": 20}),
    ],
)
def test_every_function_of_trl_gives_its_own_numbers(name: str, arguments: dict[str, Any] | None) -> None:
    function = getattr(trl.rewards, name)
    if name.startswith("get_"):
        function = function(**(arguments or {}))
    elif arguments:
        arguments_given = dict(arguments)
        inner = function

        def function(**keywords: Any) -> Any:
            return inner(**keywords, **arguments_given)

    asked = [write_messages([{"role": "user", "content": f"prompt {number}"}]) for number in range(4)]
    batch = replace(texts(columns=COLUMNS), prompts=asked)
    reward = FunctionReward(function=f"trl.rewards:{name}", arguments=arguments)
    assert reward.preflight() == []
    expected = as_trl_calls(function, batch)
    assert len(set(expected)) > 1
    got = [score.value for score in reward.score(batch)]
    # TRL keeps them in single precision.
    assert got == pytest.approx(expected, abs=1e-7)


def test_a_function_that_lacks_its_package_says_so_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy_rewards, "is_math_verify_available", lambda: False)
    reward = FunctionReward(function="trl.rewards:accuracy_reward")
    place, value = refusal(reward.score, texts(columns=COLUMNS))
    assert re.search(r"accuracy_rewards\.py:\d+$", place)
    assert str(value).startswith("ImportError: ")
