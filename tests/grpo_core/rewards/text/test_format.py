"""Completions in and out of form, each out of form in one way; values counted by hand."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.rewards.reward import Score
from grpo_core.rewards.text.format import FormatReward, has_elements
from tests.grpo_core.rewards.conftest import make_texts

GOOD = "<think>2 + 2</think><answer>4</answer>"


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        f"\n {GOOD}\n",
        "<think>\nfirst\n\nthen\n</think>\n\n<answer>\n[1, 2, 3, 4]\n</answer>",
        "<think>a < b and b > c, so <b>yes</b></think><answer>{}</answer>",
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
        *((f"<think>{unseen}</think><answer>4</answer>", 4) for unseen in "\u200b\u2060\ufeff\u00ad\x00\u3164\u2800"),
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
