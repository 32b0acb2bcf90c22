"""Values worked out by hand; each differs from its neighbour in one edit or one character of length."""

from collections.abc import Mapping

import pytest

from grpo_core.errors import InputError
from grpo_core.rewards.reward import NOT_APPLICABLE, Score, ScoringBatch
from grpo_core.rewards.text.answer import AnswerReward
from tests.grpo_core.rewards.conftest import make_texts


def answered(answers: Mapping[str, object]) -> ScoringBatch:
    """Completions and the answers in their column."""
    return make_texts(*answers, columns={"answer": list(answers.values())})


@pytest.mark.parametrize(
    ("completion", "answer", "value", "edits"),
    [
        ("1234", "1234", 1.0, 0),
        (" 1234\n", "1234", 1.0, 0),
        ("1243", "1234", 0.5, 2),  # two substitutions of four
        ("123", "1234", 0.75, 1),  # one insertion, the longer has four
        ("1234 1234", "1234", 1 - 5 / 9, 5),  # repetition costs its length
        ("", "1234", 0.0, 4),
        ("", "", 1.0, 0),
    ],
)
def test_similarity(completion: str, answer: str, value: float, edits: int) -> None:
    assert AnswerReward().score(answered({completion: answer})) == [Score(pytest.approx(value), float(edits))]


def test_exact_gives_all_or_nothing() -> None:
    scores = AnswerReward(mode="exact").score(answered({"12": "12", "21": "12"}))
    assert [score.value for score in scores] == [1.0, 0.0]


def test_without_an_answer_there_is_no_score() -> None:
    assert AnswerReward().score(answered({"11": None, "12": "12"})) == [NOT_APPLICABLE, Score(1.0, 0.0)]
    assert AnswerReward(column="other").score(answered({"12": "12"})) == [NOT_APPLICABLE]


def test_an_answer_that_is_a_number_names_the_sample_and_column() -> None:
    with pytest.raises(InputError, match=r"sample s1, column answer: got 12\."):
        AnswerReward().score(answered({"11": "12", "12": 12}))
