"""Functions of TRL give the numbers here that they give there."""

import math
import threading
from typing import Any

import accelerate
import pytest
import trl.rewards
from trl.rewards import accuracy_rewards
from trl.trainer import grpo_trainer

from grpo_core.errors import InputError
from grpo_core.rewards.functions import FunctionReward
from grpo_core.rewards.reward import ScoringBatch
from tests.grpo_core.rewards.functions.conftest import COLUMNS, texts


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
            [[{"role": "user", "content": batch.prompts[i]}] for i in rows],
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

    batch = texts(columns=COLUMNS)
    reward = FunctionReward(function=f"trl.rewards:{name}", arguments=arguments)
    assert reward.preflight() == []
    expected = as_trl_calls(function, batch)
    assert len(set(expected)) > 1
    got = [score.value for score in reward.score(batch)]
    # TRL keeps them in single precision.
    assert got == pytest.approx(expected, abs=1e-7)


def test_every_reward_of_trl_is_tried() -> None:
    tried = {"think_format_reward", "get_repetition_penalty_reward", "get_soft_overlong_punishment"}
    tried |= {"accuracy_reward", "reasoning_accuracy_reward", "get_cosine_scaled_reward"}
    assert {name for name in dir(trl.rewards) if "reward" in name or "punish" in name} >= tried
    public = set(trl.rewards._import_structure["other_rewards"]) | set(trl.rewards._import_structure["format_rewards"])
    assert public | set(trl.rewards._import_structure["accuracy_rewards"]) == tried


def test_a_function_that_lacks_its_package_says_so_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy_rewards, "is_math_verify_available", lambda: False)
    reward = FunctionReward(function="trl.rewards:accuracy_reward")
    with pytest.raises(
        InputError, match=r"accuracy_rewards\.py:\d+: got 'ImportError: Please install the `math_verify`"
    ):
        reward.score(texts(columns=COLUMNS))
