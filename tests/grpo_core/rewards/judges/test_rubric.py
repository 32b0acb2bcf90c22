import time

import pytest

from grpo_core.errors import InputError
from grpo_core.rewards.judges.rubric import fill_rubric, read_score, rubric_fields


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ('{"score": 7}', 7.0),
        ('  {"score": 6.5, "reason": "a {small} flaw"}\n', 6.5),
        ('{"score": "8"}', 8.0),
        ('```json\n{"score": 3, "why": {"a": 1}}\n```', 3.0),
        ('It has 4 legs, {"score": 9} at first, but then: {"score": 2}.', 2.0),
        ('<think>{"score": 9}? No.</think>{"score": 1}', 1.0),
        ('{"score": 5} {"verdict": "good"}', 5.0),
        ("7", None),
        ("The score is 7.", None),
        ("[7]", None),
        ('{"Score": 7}', None),
        ('{"score": true}', None),
        ('{"score": null}', None),
        ('{"score": "7/10"}', None),
        ('{"score": NaN}', None),
        ('{"score": "inf"}', None),
        ('{"score": 1e999}', None),
        ('{"score": 7', None),
        ("", None),
    ],
)
def test_score_of_an_answer(answer: str, score: float | None) -> None:
    assert read_score(answer) == score


def test_rubric_is_filled_in_and_the_form_of_the_answer_added() -> None:
    rubric = 'Is "{prompt}" {style}? Say {{why}}. {prompt}'
    assert rubric_fields("here", rubric) == ("prompt", "style")
    filled = fill_rubric(rubric, {"prompt": "a {style} {cat}", "style": 3}, 1, 5)
    assert filled.startswith('Is "a {style} {cat}" 3? Say {why}. a {style} {cat}\n\n')
    assert filled.endswith('{"score": n}, where n is a number from 1 (worst) to 5 (best).')


@pytest.mark.parametrize(
    "rubric", ["", " ", None, "{", "{}", "{0}", "{prompt.x}", "{prompt[0]}", "{prompt!r}", "{p:>9}"]
)
def test_rubrics_that_will_not_do(rubric: object) -> None:
    with pytest.raises(InputError, match="here: got"):
        rubric_fields("here", rubric)


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ('It holds ```json\n{"score": 10}\n``` and I say {"score": 2}', 2.0),
        ('Because: {"score": 3, "why": {"text": 1}}', 3.0),
        ('Because: {"score": 3, "why": "it reads {x}"}', 3.0),
        ('{"score": 1' + "0" * 400 + "}", None),
        ("[" * 100_000, None),
        ('{"score":' * 20_000, None),
        ("```" + " " * 100_000, None),
    ],
)
def test_answers_that_would_mislead_or_hang_the_reader(answer: str, score: float | None) -> None:
    start = time.monotonic()
    assert read_score(answer) == score
    assert time.monotonic() - start < 5.0
