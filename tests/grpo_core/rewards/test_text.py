"""Values worked out by hand; each differs from its neighbour in one edit or one character of length."""

import re
from collections.abc import Mapping

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from grpo_core.errors import InputError
from grpo_core.rewards.scoring_batch import NOT_APPLICABLE, Score, ScoringBatch
from grpo_core.rewards.text.rules import AnswerReward, FormatReward, has_elements
from grpo_core.rollouts.messages import write_messages
from tests.grpo_core.rewards.conftest import make_texts, refusal


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


@pytest.mark.parametrize("answer", [1.0, True, ["12"], {"value": "12"}])
def test_an_answer_without_a_text_is_refused_before_anything_is_sampled(answer: object) -> None:
    """Neither of a float nor of a truth value is the text known that it was written with."""
    batch = answered({"11": "12", "12": answer})
    assert refusal(AnswerReward().score, batch) == ("rewards.answer, sample s1, column answer", answer)
    with pytest.raises(InputError) as refused:
        AnswerReward().check_prompt({"answer": answer}, ())
    assert (refused.value.place, refused.value.value) == ("column answer", answer)


def test_a_whole_number_is_its_digits() -> None:
    reward = AnswerReward(mode="exact")
    assert [score.value for score in reward.score(answered({"12": 12, "7": 12, "-3": -3}))] == [1.0, 0.0, 1.0]
    reward.check_prompt({"answer": 12}, ())


BEGINS = write_messages([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "<think>I a"}])
BEGUN = {
    "the template's tag": ("I add.</think><answer>4</answer>", "<think>\n", "2+2?", 1.0),
    "the tag twice": ("<think>I add.</think><answer>4</answer>", "<think>\n", "2+2?", 0.0),
    "nothing begun": ("I add.</think><answer>4</answer>", "", "2+2?", 0.0),
    "the prompt's last message": ("dd.</think><answer>4</answer>", "", BEGINS, 1.0),
    "the message before the tag": ("dd.</think><answer>4</answer>", "<think>\n", BEGINS, 1.0),
}


@pytest.mark.parametrize("case", BEGUN)
def test_the_form_is_that_of_the_complete_answer(case: str) -> None:
    completion, start, prompt, value = BEGUN[case]
    batch = ScoringBatch(["s"], [prompt], completions=[completion], starts=[start] if start else ())
    assert [score.value for score in FormatReward().score(batch)] == [value]
    pattern = FormatReward(pattern="<think>.*</think><answer>.*</answer>")
    assert [score.value for score in pattern.score(batch)] == [float(start != "" or prompt == BEGINS)]


UNSEEN = (
    *"\u200b\u2060\ufeff\u00ad\x00\u3164\u2800\u0378\uffff\ue000",
    "<!-- so -->",
    "<!---->\n<!-- -",
    "<!--" * 90_000,
)
GOOD = "<think>2 + 2</think><answer>4</answer>"


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        f"\n {GOOD}\n",
        "<think>\nfirst\n\nthen\n</think>\n\n<answer>\n[1, 2, 3, 4]\n</answer>",
        "<think>a < b and b > c, so <b>yes</b></think><answer>{}</answer>",
        "<think><!-- a --> so <!-- b --></think><answer>4</answer>",
    ],
)
def test_in_form(text: str) -> None:
    assert FormatReward().score(make_texts(text)) == [Score(1.0, 5.0)]
    assert FormatReward(mode="partial").score(make_texts(text)) == [Score(1.0, 5.0)]


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("", 0),
        ("4", 0),
        ("<answer>4</answer>", 2),
        ("<think>2 + 2</think>", 2),
        ("<think>2 + 2</think><answer>4", 3),
        ("2 + 2</think><answer>4</answer>", 3),
        ("<answer>4</answer><think>2 + 2</think>", 4),
        ("<think>2 + 2<answer>4</answer></think>", 4),
        ("</think>2 + 2<think><answer>4</answer>", 4),
        ("<think></think><answer>4</answer>", 4),
        ("<think>2 + 2</think><answer> \n</answer>", 4),
        # Zero width, soft hyphen, control, Hangul filler, Braille blank: nothing that a reader would see.
        *((f"<think>{unseen}</think><answer>4</answer>", 4) for unseen in UNSEEN),
        ("Sure! <think>2 + 2</think><answer>4</answer>", 4),
        ("<think>2 + 2</think> so <answer>4</answer>", 4),
        (GOOD + "!", 4),
        (GOOD + GOOD, 0),
        (GOOD + "<answer>5</answer>", 2),
        ("<think><think>2 + 2</think><answer>4</answer>", 3),
        (GOOD.upper(), 0),
        (GOOD.replace("<think>", "< think>"), 3),
        ("<think>" * 500 + "</answer>" * 500, 0),
    ],
)
def test_out_of_form(text: str, right: int) -> None:
    assert FormatReward().score(make_texts(text)) == [Score(0.0, float(right))]
    assert FormatReward(mode="partial").score(make_texts(text)) == [Score(right / 5, float(right))]


@given(parts=st.lists(st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "x", " ", "\n"]), max_size=9))
def test_agrees_with_a_regular_expression(parts: list[str]) -> None:
    text = "".join(parts)
    inside = r"(?:(?!</?think>|</?answer>).)*"
    oracle = rf"\s*<think>(?=\s*[^\s<]){inside}</think>\s*<answer>(?=\s*[^\s<]){inside}</answer>\s*"
    assert has_elements(text, ("think", "answer")) == bool(re.fullmatch(oracle, text, re.DOTALL))


def test_a_pattern_matches_from_end_to_end_and_across_lines() -> None:
    reward = FormatReward(pattern=r"<answer>.+</answer>")
    assert reward.score(make_texts("<answer>4\n5</answer>", " <answer>4</answer>", "<answer></answer>")) == [
        Score(1.0, 1.0),
        Score(0.0, 0.0),
        Score(0.0, 0.0),
    ]
    # An alternative that matches a part must not end the search for one that matches all.
    assert FormatReward(pattern="a|ab").score(make_texts("ab")) == [Score(1.0, 1.0)]


def test_a_pattern_that_never_ends_is_a_failure_of_that_sample() -> None:
    # Sixty letters can be cut into ones and twos in more than 10^12 ways.
    good, endless, other = FormatReward(pattern=r"(a|aa)+(b|c)").score(make_texts("aab", "a" * 60 + "d", "aad"))
    assert endless == Score.failed("the pattern took more than 1 s over 61 characters")
    assert (good, other) == (Score(1.0, 1.0), Score(0.0, 0.0))


def test_settings_name_the_form_that_counts() -> None:
    assert FormatReward().settings() == FormatReward(format="think_answer").settings()
    assert FormatReward(pattern="a").settings() == {"format": None, "pattern": "a", "mode": "strict"}
    assert FormatReward(**FormatReward().settings()).settings() == FormatReward().settings()  # type: ignore[arg-type]


BOXED = '<think>left of it</think>\n<answer>{"bbox_2d": [1, 2, 3, 4]}</answer>'


@pytest.mark.parametrize(
    ("text", "right"),
    [
        (BOXED, 6),
        ('<think>a</think><answer>```json\n[{"bbox_2d": [1,2,3,4], "label": "b"}]\n```</answer>', 6),
        ("<think>a</think><answer>{ [1,2,3,4] }</answer>", 6),
        ("<think>a</think><answer>[1, 2, 3, 4]</answer>", 5),
        ('<think>a</think><answer>{"bbox_2d": [1, 2, 3]}</answer>', 5),
        ('<think>a</think><answer>{"bbox_2d": [1.5, 2, 3, 4]}</answer>', 5),
        ('<think>a</think><answer>{"bbox_2d": [-1, 2, 3, 4]}</answer>', 5),
        ("<think>a</think><answer>} [1, 2, 3, 4] {</answer>", 5),
        ("<think>{ [1, 2, 3, 4] }</think><answer>there</answer>", 5),
        ("<think>a</think><answer>there</answer>{ [1, 2, 3, 4] }", 4),
        ("<answer>{ [1, 2, 3, 4] }</answer>", 3),
        ("{ [1, 2, 3, 4] }", 0),
        ("", 0),
    ],
)
def test_form_with_a_box(text: str, right: int) -> None:
    reward = FormatReward(format="think_answer_box")
    assert reward.score(make_texts(text)) == [Score(float(right == 6), float(right))]
    assert FormatReward(format="think_answer_box", mode="partial").score(make_texts(text)) == [
        Score(right / 6, float(right))
    ]


@given(
    parts=st.lists(
        st.sampled_from(["<think>", "</think>", "<answer>", "</answer>", "{", "}", "[1, 2,3,4]", "[1,2]", "a"]),
        max_size=11,
    )
)
@example(parts=["<think>", "a", "</think>", "<answer>", "{", "[1, 2,3,4]", "}", "</answer>"])
def test_what_has_the_form_with_a_box_has_medground_r1s(parts: list[str]) -> None:
    published = r"<think>.*?</think>\s*<answer>.*?\{.*\[\d+,\s*\d+,\s*\d+,\s*\d+\].*\}.*?</answer>"
    text = "".join(parts)
    (score,) = FormatReward(format="think_answer_box").score(make_texts(text))
    # Theirs counts tags more than once as well, and elements without anything to see.
    assert score.value == float(
        bool(re.fullmatch(published, text, re.DOTALL)) and has_elements(text, ("think", "answer"))
    )
