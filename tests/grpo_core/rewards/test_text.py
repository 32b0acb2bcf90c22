"""Values worked out by hand; each differs from its neighbour in one edit or one character of length."""

import itertools
import math
import re
from collections.abc import Mapping
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_core.rewards.reward import NOT_APPLICABLE, Score, ScoringBatch
from grpo_core.rewards.text import (
    AnswerReward,
    BoxIouReward,
    FormatReward,
    box_iou,
    has_elements,
    matched_iou,
    read_boxes,
    wanted_boxes,
)
from tests.grpo_core.rewards.conftest import make_texts, refusal, refused


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
    batch = answered({"11": "12", "12": 12})
    assert refusal(AnswerReward().score, batch) == ("rewards.answer, sample s1, column answer", 12)


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


def batch(completion: str, box: object, **columns: object) -> ScoringBatch:
    return make_texts(completion, columns={"box": [box]} | {name: [value] for name, value in columns.items()})


def value(completion: str, box: object, reward: BoxIouReward | None = None, **columns: object) -> float | None:
    (score,) = (reward or BoxIouReward()).score(batch(completion, box, **columns))
    assert score.failure is None
    return score.value


@pytest.mark.parametrize(
    ("text", "boxes"),
    [
        ("<answer>[1,2,3,4]</answer>", [(1, 2, 3, 4)]),
        ("[ 1.5 , -2 , 3e1 , .4e1 ]", [(1.5, -2, 30, 4)]),
        ('<answer>```json\n[{"bbox_2d": [1, 2, 3, 4], "label": "mass"}]\n```</answer>', [(1, 2, 3, 4)]),
        ('{"bbox_2d": [[1, 2, 3, 4], [5, 6, 7, 8]]}', [(1, 2, 3, 4), (5, 6, 7, 8)]),
        # What the reasoning considers is not the answer; several answers all count.
        ("<think>[9,9,10,10]?</think><answer>[1,2,3,4]</answer>", [(1, 2, 3, 4)]),
        ("<answer>[1,2,3,4]</answer><answer>[5,6,7,8]</answer>", [(5, 6, 7, 8)]),
        ("<think>it is <answer>[9,9,10,10]</answer></think><answer>[1,2,3,4]</answer>", [(1, 2, 3, 4)]),
        ("<think>a</think>[9,9,10,10]</think>[1,2,3,4]", [(1, 2, 3, 4)]),
        ("<think>[9,9,10,10]", []),
        ("[1,2,3,4]<think>[9,9,10,10]", [(1, 2, 3, 4)]),
        ("[\uff11,2,3,4]", []),
        ("<answer>none</answer> [1,2,3,4]", []),
        ("<answer>[1,2,3,4]</answer> or <answer>[5,6,7,8]", [(1, 2, 3, 4)]),
        ("<answer>[1,2,3,4]", [(1, 2, 3, 4)]),
        # No boxes: two corners, five numbers, words, round brackets.
        ("[1, 2], [3, 4] [1,2,3,4,5] [a, b, c, d] (1, 2, 3, 4) 1, 2, 3, 4", []),
        # No area: corners out of order, a line, a point; not finite; beyond any image.
        ("[3,4,1,2] [1,2,1,4] [1,2,3,2] [1,1,1,1]", [None] * 4),
        ("[NaN, 1, 2, 3] [0, 0, Infinity, 1] [0, 0, inf, 1] [0, 0, null, 1] [0, 0, 1e999, 1]", [None] * 5),
        ("[0, 0, 1e300, 1e300] [0, 0, " + "9" * 5000 + ", 1]", [None] * 2),
        ("", []),
        # Spam, which would take minutes where the time grew with the square of the length.
        *((spam * 40_000, []) for spam in ("<answer>", "[1,2,3,", "[1e")),
        *(("[" + spam * 40_000, []) for spam in "1 "),
    ],
)
def test_boxes_of_a_text(text: str, boxes: list[tuple[float, ...] | None]) -> None:
    assert read_boxes(text) == boxes


@pytest.mark.parametrize(
    ("answer", "iou"),
    [
        ("[0,0,4,4]", 1.0),
        ("[0,0,4,2]", 0.5),
        ("[2,2,6,6]", 4 / 28),
        ("[1,1,3,3]", 4 / 16),
        ("[4,0,8,4]", 0.0),
        ("[0,0,1e6,1e6]", 16e-12),
        ("[4,4,0,0]", 0.0),
        ("I see nothing", 0.0),
        ("", 0.0),
    ],
)
def test_one_box_by_hand(answer: str, iou: float) -> None:
    (score,) = BoxIouReward().score(batch(f"<answer>{answer}</answer>", [0, 0, 4, 4]))
    assert score == Score(pytest.approx(iou, rel=1e-12), pytest.approx(iou, rel=1e-12))


TWO = [[0, 0, 4, 4], [10, 10, 14, 14]]


@pytest.mark.parametrize(
    ("answer", "mean"),
    [
        ("[[10,10,14,14],[0,0,4,4]]", 1.0),
        ("[0,0,4,4]", 0.5),  # one of two
        ("[0,0,4,4] [0,0,4,4]", 0.5),  # the same twice finds one
        ("[0,0,4,4] [10,10,14,14] [0,0,4,4]", 2 / 3),  # one too many
        ("[0,0,4,4] [10,10,14,14] [4,4,0,0]", 2 / 3),  # so is one that is no box
        ("[0,0,4,2] [10,10,14,12]", 0.5),
        ("[0,0,14,14] [0,0,4,2]", 0.5 * (16 / 196 + 0.5)),  # each box serves once
        ("[0,0,4,4] " * 50, 1 / 50),  # spam does not pay
    ],
)
def test_several_boxes_by_hand(answer: str, mean: float) -> None:
    assert value(answer, TWO) == pytest.approx(mean, rel=1e-12)


def test_the_matching_is_the_best_one_and_not_the_nearest_first() -> None:
    # Nearest first takes 3/4 and is left with 0; the best matching has 1/2 and 1/3.
    wanted = [(0.0, 0.0, 4.0, 3.0), (0.0, 0.0, 4.0, 2.0)]
    given_boxes = [(0.0, 0.0, 4.0, 4.0), (0.0, 2.0, 4.0, 3.0)]
    overlaps = [[0.75, 0.5], [1 / 3, 0.0]]
    for row, column in itertools.product(range(2), range(2)):
        assert matched_iou([given_boxes[row]], [wanted[column]]) == pytest.approx(overlaps[row][column])
    assert matched_iou(given_boxes, wanted) == pytest.approx((0.5 + 1 / 3) / 2)


def test_nothing_wanted_and_no_column() -> None:
    assert value("there is none", []) == 1.0
    assert value("[0,0,4,4]", []) == 0.0
    assert BoxIouReward().score(batch("[0,0,4,4]", None)) == [Score(None, None)]
    assert BoxIouReward(column="other").score(batch("[0,0,4,4]", [0, 0, 4, 4])) == [Score(None, None)]


def test_threshold_counts_boxes_and_raw_stays_the_mean() -> None:
    half = BoxIouReward(threshold=0.5)
    assert half.score(batch("[0,0,4,2]", [0, 0, 4, 4])) == [Score(1.0, 0.5)]
    assert BoxIouReward(threshold=0.51).score(batch("[0,0,4,2]", [0, 0, 4, 4])) == [Score(0.0, 0.5)]
    assert half.score(batch("[0,0,4,2] [10,10,14,11]", TWO)) == [Score(0.5, 0.375)]


def test_threshold_matches_as_many_as_it_can() -> None:
    # The largest sum of IoU is 9/10 + 0; two pairs of 30/90 and 35/100 are worth more here.
    answer, wanted = "[0,0,10,9] [0,6.5,10,10]", [[0, 0, 10, 10], [0, 0, 10, 3]]
    assert BoxIouReward(threshold=0.3).score(batch(answer, wanted)) == [Score(1.0, 0.45)]


@pytest.mark.parametrize(
    ("coordinates", "answer"), [("same", "[40,30,80,90]"), ("unit", "[.2,.1,.4,.3]"), ("thousand", "[200,100,400,300]")]
)
def test_coordinates_by_hand(coordinates: str, answer: str) -> None:
    reward = BoxIouReward(coordinates=coordinates)
    assert value(answer, [40, 30, 80, 90], reward, width=200, height=300) == pytest.approx(1.0)
    if coordinates != "same":
        # The sides are not interchangeable.
        assert value(answer, [40, 30, 80, 90], reward, width=300, height=200) != pytest.approx(1.0)


@pytest.mark.parametrize("side", [None, "200", 0, -3, math.nan, True])
def test_scaled_coordinates_need_the_images_sides(side: object) -> None:
    score = partial(value, "[0,0,1,1]", [0, 0, 4, 4], BoxIouReward(coordinates="unit"))
    assert refused(score, width=8, height=side).place == "rewards.box_iou, sample s0, column height"
    assert refusal(score) == ("rewards.box_iou, sample s0, column width", None)


@pytest.mark.parametrize("box", ["[0, 0, 4, 4]", (0, 0, 4, 4), [[0, 0, 4, 4]], "[[0, 0, 4, 4]]", [0.0, 0.0, 4.0, 4.0]])
def test_a_column_has_json_or_lists(box: object) -> None:
    assert value("[0,0,4,4]", box) == 1.0


@pytest.mark.parametrize(
    "box",
    [
        *([0, 0, 4], [4, 0, 0, 4], [0, 0, 0, 4], [0, 0, math.nan, 4], [0, 0, True, 4], ["0", "0", "4", "4"]),
        *([0, 0, 10**400, 4], [[0, 0, 4, 4], [1]], [[0, 0, 4, 4], 5], {"box": [0, 0, 4, 4]}, 7),
        *("0 0 4 4", "", "{}"),
        # Deeper than Python's parser of JSON goes, and a number that it does not take.
        *(100_000 * "[", f"[{5000 * '1'}, 0, 4, 4]"),
    ],
)
def test_a_column_without_a_box_names_the_sample_and_the_column(box: object) -> None:
    assert refused(value, "[0,0,4,4]", box).place == "rewards.box_iou, sample s0, column box"


coordinate = st.integers(0, 12)
boxes_of_integers = st.lists(
    st.tuples(coordinate, coordinate, coordinate, coordinate).map(
        lambda box: (box[0], box[1], box[0] + box[2] + 1, box[1] + box[3] + 1)
    ),
    max_size=4,
)


def fraction_iou(first: tuple[int, ...], second: tuple[int, ...]) -> Fraction:
    wide = max(0, min(first[2], second[2]) - max(first[0], second[0]))
    high = max(0, min(first[3], second[3]) - max(first[1], second[1]))
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (first, second)]
    return Fraction(wide * high, sum(areas) - wide * high)


@settings(max_examples=100, deadline=None)
@given(first=boxes_of_integers, second=boxes_of_integers)
def test_agrees_with_every_matching_tried_in_fractions(
    first: list[tuple[int, ...]], second: list[tuple[int, ...]]
) -> None:
    fewer, more = sorted((first, second), key=len)
    sums = [
        sum((fraction_iou(a, b) for a, b in zip(fewer, chosen, strict=True)), Fraction(0))
        for chosen in itertools.permutations(more, len(fewer))
    ]
    expected = float(max(sums) / len(more)) if more else 1.0
    assert matched_iou(read_boxes(str([list(box) for box in first])), wanted_boxes(second, "here")) == pytest.approx(
        expected, abs=1e-12
    )


@settings(max_examples=50, deadline=None)
@given(first=boxes_of_integers.filter(bool), second=boxes_of_integers.filter(bool))
def test_overlaps_agree_with_torchvision(first: list[tuple[int, ...]], second: list[tuple[int, ...]]) -> None:
    arrays = [np.array(boxes, dtype=np.float64) / 7 for boxes in (first, second)]
    theirs = torchvision.ops.box_iou(*(torch.from_numpy(array) for array in arrays)).numpy()
    np.testing.assert_allclose(box_iou(*arrays), theirs, atol=1e-12)
