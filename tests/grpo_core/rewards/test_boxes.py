"""Values worked out by hand, and transformers, torchvision and fractions as oracles."""

import itertools
import math
from dataclasses import replace
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch
import torchvision
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor, smart_resize

from grpo_core.rewards.scoring_batch import Score, ScoringBatch
from grpo_core.rewards.text.boxes import (
    BoxIouReward,
    Coordinates,
    box_iou,
    matched_iou,
    read_boxes,
    resized_size,
    wanted_boxes,
)
from tests.grpo_core.rewards.conftest import make_texts, refusal, refused


def batch(completion: str, box: object, **columns: object) -> ScoringBatch:
    return make_texts(completion, columns={"box": [box]} | {name: [value] for name, value in columns.items()})


def value(completion: str, box: object, reward: BoxIouReward | None = None, **columns: object) -> float | None:
    (score,) = (reward or BoxIouReward()).score(batch(completion, box, **columns))
    assert score.failure is None
    return score.value


def seen(
    completion: str, box: object, size: tuple[int, int], reward: BoxIouReward | None = None, **columns: object
) -> float:
    """The value where the prompt has an image of this size."""
    row = replace(batch(completion, box, **columns), source_images=[[Image.new("RGB", size)]])
    (score,) = (reward or BoxIouReward()).score(row)
    assert score.value is not None
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
        # Four numbers are a box where the answer is nothing else.
        *((text, [(1, 2.5, 3, 4)]) for text in ("1 2.5 3 4", " 1, 2.5,3 4\n", "<answer>1 2.5 3 4</answer> 5")),
        *((text, []) for text in ("1 2 3", "1 2 3 4 5", "1 2 3 4 px", "it is 1 2 3 4", "(1 2 3 4)", "1 2 3 4 " * 2)),
        *((text, [None]) for text in ("3 4 1 2", "nan 1 2 3", "0 0 1e999 1")),
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
    ("coordinates", "answer"),
    [("pixels", "[40,30,80,90]"), ("unit", "[.2,.1,.4,.3]"), ("thousand", "[200,100,400,300]")],
)
def test_coordinates_by_hand(coordinates: Coordinates, answer: str) -> None:
    reward = BoxIouReward(coordinates=coordinates)
    assert value(answer, [40, 30, 80, 90], reward, width=200, height=300) == pytest.approx(1.0)
    assert seen(answer, [40, 30, 80, 90], (200, 300), reward) == pytest.approx(1.0)
    # The prompt's own image is the one that the boxes are in, whatever the columns say.
    assert seen(answer, [40, 30, 80, 90], (200, 300), reward, width=7, height=8) == pytest.approx(1.0)
    if coordinates != "pixels":
        # The sides are not interchangeable.
        assert value(answer, [40, 30, 80, 90], reward, width=300, height=200) != pytest.approx(1.0)


def test_pixels_of_the_resized_image_by_hand() -> None:
    # 100 x 61 is resized to 112 x 56, the nearest multiples of 28.
    reward = BoxIouReward(coordinates="input_pixels")
    assert seen("[56,14,84,28]", [50, 15.25, 75, 30.5], (100, 61), reward) == pytest.approx(1.0)
    assert seen("[50,15,75,30]", [50, 15.25, 75, 30.5], (100, 61), reward) < 0.8
    # Enlarged to at least 4 * 28 * 28 pixels: twice 28 for each side of 28.
    larger = replace(reward, min_pixels=4 * 28 * 28)
    assert seen("[28,28,56,56]", [14, 14, 28, 28], (28, 28), larger) == pytest.approx(1.0)
    # Shrunk below 28 * 28 pixels.
    smaller = replace(reward, min_pixels=28, max_pixels=28 * 28)
    assert seen("[14,14,28,28]", [100, 100, 200, 200], (200, 200), smaller) == pytest.approx(1.0)


@settings(max_examples=300, deadline=None)
@given(
    size=st.tuples(st.integers(1, 3000), st.integers(1, 3000)).filter(lambda size: max(size) <= 200 * min(size)),
    factor=st.sampled_from([14, 28, 32]),
    least=st.integers(1, 1_000_000),
    most=st.integers(0, 12_000_000),
)
def test_the_resize_is_that_of_transformers(size: tuple[int, int], factor: int, least: int, most: int) -> None:
    theirs = smart_resize(size[1], size[0], factor=factor, min_pixels=least, max_pixels=least + most)
    assert resized_size(size, factor, least, least + most) == theirs[::-1]


@pytest.mark.parametrize("size", [(100, 61), (20, 30), (640, 480), (3000, 2000)])
def test_the_defaults_are_those_of_qwen_2_5_vl(size: tuple[int, int]) -> None:
    reward = BoxIouReward()
    bounds = {"min_pixels": reward.min_pixels, "max_pixels": reward.max_pixels}
    processor = Qwen2VLImageProcessor(patch_size=14, merge_size=2, **bounds)
    _, rows, columns = processor(Image.new("RGB", size), return_tensors="pt")["image_grid_thw"][0].tolist()
    assert resized_size(size, reward.factor, **bounds) == (columns * 14, rows * 14)


def test_an_image_that_the_processor_refuses() -> None:
    reward = BoxIouReward(coordinates="input_pixels")
    assert refusal(seen, "[0,0,1,1]", [0, 0, 4, 4], (2010, 10), reward) == (
        "rewards.box_iou, sample s0, image",
        "2010x10 pixels",
    )
    assert seen("[0,0,1,1]", [0, 0, 4, 4], (2000, 10), reward) < 1


def test_settings_are_those_that_count() -> None:
    assert BoxIouReward().settings() == {"column": "box", "threshold": None, "coordinates": "pixels", "image": 0}
    sides = {"width_column": "width", "height_column": "height"}
    assert BoxIouReward(coordinates="unit").settings().items() >= sides.items()
    resized = BoxIouReward(coordinates="input_pixels", factor=32).settings()
    assert resized.items() >= {**sides, "factor": 32, "min_pixels": 3136, "max_pixels": 12845056}.items()


@pytest.mark.parametrize(
    ("coordinates", "answer"),
    [
        ("pixels", "[0,0,41,40]"),
        ("pixels", "[-1,0,40,40]"),
        ("pixels", "[0,-.01,40,40]"),
        ("thousand", "[0,0,1000,1001]"),
        ("unit", "[0,0,1.001,1]"),
        # The image of 40 x 40 is resized to 56 x 56.
        ("input_pixels", "[0,0,57,56]"),
        ("pixels", "[100,100,120,120]"),
    ],
)
def test_a_box_beyond_the_image_covers_nothing_and_counts(coordinates: Coordinates, answer: str) -> None:
    reward = BoxIouReward(coordinates=coordinates)
    assert seen(answer, [0, 0, 40, 40], (40, 40), reward) == 0.0
    whole = {"pixels": 40, "thousand": 1000, "unit": 1, "input_pixels": 56}[coordinates]
    assert seen(f"[0,0,{whole},{whole}]", [0, 0, 40, 40], (40, 40), reward) == 1.0
    assert seen(f"[0,0,{whole},{whole}] {answer}", [0, 0, 40, 40], (40, 40), reward) == 0.5


def test_a_wanted_box_beyond_the_image_names_the_sample_and_the_column() -> None:
    for box in ([0, 0, 41, 40], [-1, 0, 4, 4], [[0, 0, 4, 4], [0, 0, 4, 40.5]]):
        assert refusal(seen, "[0,0,1,1]", box, (40, 40)) == ("rewards.box_iou, sample s0, column box", box)


def test_a_prompt_is_refused_before_anything_is_sampled() -> None:
    reward = BoxIouReward(coordinates="thousand")
    reward.check_prompt({"box": [0, 0, 40, 40]}, [(40, 40)])
    reward.check_prompt({"box": [0, 0, 40, 40], "width": 40, "height": 40}, [])
    reward.check_prompt({"box": None}, [])
    reward.check_prompt({}, [])
    assert refusal(reward.check_prompt, {"box": [0, 0, 41, 40]}, [(40, 40)]) == ("column box", [0, 0, 41, 40])
    assert refusal(reward.check_prompt, {"box": "4"}, [(40, 40)]) == ("column box", "4")
    assert refusal(reward.check_prompt, {"box": [0, 0, 4, 4]}, []) == ("column width", None)


def test_boxes_are_in_the_image_that_is_chosen() -> None:
    two = [Image.new("RGB", size) for size in ((10, 20), (200, 100))]
    row = replace(batch("[500,500,1000,1000]", [100, 50, 200, 100]), source_images=[two])
    assert BoxIouReward(coordinates="thousand", image=1).score(row) == [Score(1.0, 1.0)]
    assert refusal(BoxIouReward(image=2).score, row) == ("rewards.box_iou, sample s0, image", 2)
    # In the first image this box would reach beyond the edge.
    assert refused(BoxIouReward(coordinates="thousand").score, row).place == "rewards.box_iou, sample s0, column box"


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
