"""What a function of a user's own may answer, and what is told of one that answers wrongly or raises."""

import logging
from collections.abc import Callable

import pytest

from grpo_core.errors import InputError
from grpo_core.rewards.functions import FunctionReward
from grpo_core.rewards.reward import NOT_APPLICABLE, Score, score_samples
from tests.grpo_core.rewards.functions.conftest import TEXTS, texts


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("[1.0, 2.0]", r"mine\.py:2: got '2 rewards'\. It got 4 samples"),
        ("[]", r"mine\.py:2: got '0 rewards'\. It got 4 samples"),
        ("0.5", r"mine\.py:2: got 'float 0\.5'\. Return a list"),
        ("None", r"mine\.py:2: got 'NoneType None'\. Return a list"),
        ("'good'", r"mine\.py:2: got .*good.*Return a list"),
        ("{'a': 1, 'b': 2, 'c': 3, 'd': 4}", r"mine\.py:2: got .*Return a list"),
        ("[1, 'good', 2, 3]", r"mine\.py:2, sample s1: got 'good'\. Return a number"),
        ("[1, 2, 3, [4]]", r"mine\.py:2, sample s3: got \[4\]\. Return a number"),
        ("[1, 2, 3, 1j]", r"mine\.py:2, sample s3: got 1j\. Return a number"),
    ],
)
@pytest.mark.parametrize("on_error", ["raise", None])
def test_wrong_answers_are_named_with_file_and_line(
    write: Callable[[str], str], body: str, message: str, on_error: str | None
) -> None:
    path = write(f"\ndef score(completions, **kwargs):\n    return {body}\n")
    with pytest.raises(InputError, match=message):
        FunctionReward(function=f"{path}:score", on_error=on_error).score(texts())


def test_not_finite_is_a_failure_and_none_is_not_applicable(write: Callable[[str], str]) -> None:
    path = write("def score(completions, **kwargs):\n    return [float('nan'), None, float('-inf'), True]\n")
    nan, none, infinite, yes = FunctionReward(function=f"{path}:score").score(texts())
    assert nan == Score.failed("the reward is nan, not a finite number (the function at mine.py:1)")
    assert none == NOT_APPLICABLE
    assert "-inf" in str(infinite.failure)
    assert yes == Score(1.0, 1.0)


@pytest.mark.parametrize(
    "body",
    ["np.arange(4) / 4", "torch.arange(4) / 4", "[np.float32(i / 4) for i in range(4)]", "(i / 4 for i in range(4))"],
)
def test_numbers_of_numpy_and_torch_and_iterators(write: Callable[[str], str], body: str) -> None:
    path = write(f"import numpy as np, torch\ndef score(completions, **kwargs):\n    return {body}\n")
    scores = FunctionReward(function=f"{path}:score").score(texts())
    assert scores == [Score(i / 4, i / 4) for i in range(4)]


RAISES = """
def score(completions, **kwargs):
    return [check(text) for text in completions]

def check(text):
    if not text:
        raise ZeroDivisionError("nothing in it")
    return float(len(text))
"""


def test_a_function_that_raises_is_an_error_with_its_line(write: Callable[[str], str]) -> None:
    path = write(RAISES)
    with pytest.raises(InputError, match=r"mine\.py:7: got 'ZeroDivisionError: nothing in it'.*on_error: null"):
        FunctionReward(function=f"{path}:score").score(texts())


@pytest.mark.parametrize("on_error", [None, "null"])
def test_on_opt_in_only_the_guilty_sample_fails(write: Callable[[str], str], on_error: str | None) -> None:
    reward = FunctionReward(function=f"{write(RAISES)}:score", on_error=on_error)
    *well, guilty = reward.score(texts())
    assert [score.value for score in well] == [float(len(text)) for text in TEXTS[:3]]
    assert guilty == Score.failed("the function raised ZeroDivisionError: nothing in it (mine.py:7)")


def test_an_error_inside_a_coroutine_has_its_line(write: Callable[[str], str]) -> None:
    path = write(
        "import asyncio\nasync def score(completions, **kwargs):\n    await asyncio.sleep(0)\n    return 1 / 0\n"
    )
    with pytest.raises(InputError, match=r"mine\.py:4: got 'ZeroDivisionError"):
        FunctionReward(function=f"{path}:score").score(texts())


def test_what_the_function_reports_goes_to_the_log(
    write: Callable[[str], str], caplog: pytest.LogCaptureFixture
) -> None:
    path = write(
        "def score(completions, log_metric, log_extra, **kwargs):\n"
        "    log_metric('share', 0.25)\n    log_extra('why', completions)\n    return [float('nan')]\n"
    )
    with caplog.at_level(logging.DEBUG):
        score_samples(FunctionReward(function=f"{path}:score"), texts(1))
    assert "share: 0.25" in caplog.text
    assert "why" in caplog.text
    assert "sample s0" in caplog.text
    assert "mine.py:1" in caplog.text
