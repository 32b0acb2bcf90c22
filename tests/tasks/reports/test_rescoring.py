import json
import math
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from PIL import Image

from tasks.reports.rescoring import (
    Outputs,
    advantage_facts,
    compare,
    moved_most,
    moved_table,
    read_rescored,
    render_rescoring_page,
    reward_rows,
)
from tasks.reports.text import visible
from tasks.runs.stored import read_iterations
from tests.tasks.reports.made_frames import made_samples
from tests.tasks.reports.made_runs import RunMaker
from tests.tasks.reports.test_run_page import EVIL, Page, check_offline, images


def test_means_spread_and_order_by_hand() -> None:
    found = compare(made_samples("aabb", [0.0, 1.0, 0.5, 0.5], [1.0, 0.0, 0.2, 0.4]))["combined"]
    before, after = found["before"], found["after"]
    assert (before["mean"], after["mean"]) == (pytest.approx(0.5), pytest.approx(0.4))
    assert before["within_groups"] == pytest.approx(math.sqrt(0.5) / 2)
    assert after["within_groups"] == pytest.approx((math.sqrt(0.5) + math.sqrt(0.02)) / 2)
    assert (before["groups_without_spread"], after["groups_without_spread"]) == (0.5, 0.0)
    # Ranks 1, 4, 2.5, 2.5 and 4, 1, 2, 3; in group a reversed, in group b not defined.
    assert found["own"]["overall"] == pytest.approx(np.corrcoef([1, 4, 2.5, 2.5], [4, 1, 2, 3])[0, 1])
    assert (found["own"]["within_groups"], found["own"]["groups_undefined"]) == (pytest.approx(-1.0), 1)


def test_advantages_by_hand() -> None:
    before = [1.0, -1.0, 2.0, -2.0, 0.0, 0.0, 3.0, None, 1.0, None]
    after = [-1.0, 1.0, 1.0, -1.0, 0.0, 5.0, 0.0, 1.0, None, None]
    found = compare(made_samples("a" * 10, [0.5] * 10, [0.5] * 10, advantages=(before, after)))["advantages"]
    assert found == {
        "compared": 7,
        "gained": 1,
        "lost": 1,
        "non_zero_before": pytest.approx(5 / 7),
        "non_zero_after": pytest.approx(5 / 7),
        "both_non_zero": 4,
        "turned": 0.5,
        "zero_before": 2,
        "from_zero": 0.5,
        "to_zero": pytest.approx(1 / 5),
    }
    shares = " ".join(value for _, value in advantage_facts(found))
    for share in ("50.0% of 4 ", "50.0% of 2 ", "20.0% of 5 ", "71.4% → 71.4%", "1 before, 1 after"):
        assert share in shares


def test_rewards_of_one_side_are_added_or_removed() -> None:
    rewards = {"before:old": [0.1, 0.2], "before:kept": [0.1, 0.2], "after:new": [0.9, 0.3], "after:kept": [0.2, 0.1]}
    kept, new, old = compare(made_samples("aa", [0.1, 0.2], [0.3, 0.4], rewards=rewards))["rewards"]
    assert (kept["label"], new["label"], old["label"]) == ("kept", "new", "old")
    assert kept["own"]["overall"] == pytest.approx(-1.0)
    assert (new["before"], new["own"], old["after"], old["own"]) == (None, None, None, None)
    # Against the previous combined reward, which rises: the new one falls, the removed one rose with it.
    assert new["with_previous"]["overall"] == pytest.approx(-1.0)
    assert old["with_previous"]["overall"] == pytest.approx(1.0)


def test_nulls_and_what_is_not_finite() -> None:
    rewards = {"before:x": [None], "after:x": [math.nan]}
    found = compare(made_samples("a", [0.5], [0.6], advantages=([None], [math.nan]), rewards=rewards))
    (change,) = found["rewards"]
    assert (change["after"]["mean"], change["after"]["null_share"]) == (None, 1.0)
    assert found["combined"]["own"]["overall"] is None
    assert (found["advantages"]["turned"], found["advantages"]["non_zero_before"]) == (None, None)
    rewards = {"before:x": [None, math.inf, 0.5], "after:x": [0.5, 0.5, 0.5]}
    found = compare(made_samples("abb", [0.5, 0.4, None], [0.5, 0.4, 0.3], rewards=rewards))
    assert json.loads(json.dumps(found, allow_nan=False)) == found


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        (made_samples("aa", [0.5, math.nan], [None, 0.5]), "2 samples .*1 have a reward before, 1 have a reward after"),
        (made_samples("", [], []), "0 samples"),
    ],
)
def test_nothing_in_common_is_refused(samples: pl.DataFrame, reason: str) -> None:
    for function in (compare, moved_most):
        with pytest.raises(ValueError, match=f"none of {reason}"):
            function(samples)


def test_the_same_names_in_two_runs_are_two_groups() -> None:
    samples = made_samples("aabb", [0, 1, 0, 1], [0, 1, 1, 0], runs=["x", "x", "y", "y"])
    both = compare(samples.with_columns(group_id=pl.lit("g"), sample_id=pl.Series(["s0", "s1", "s0", "s1"])))
    assert (both["groups"], both["runs"]) == (2, ["x", "y"])
    assert both["combined"]["own"]["within_groups"] == pytest.approx(0.0)


def test_ranks_by_hand() -> None:
    # Ranks in group a: 1, 2, 3 -> 3, 1, 2; in group b, where two are equal: 1.5, 1.5 -> 2, 1.
    moved = moved_most(made_samples("aaabb", [0.9, 0.8, 0.7, 0.5, 0.5], [0.1, 0.9, 0.8, 0.2, 0.3]))
    assert moved["sample_id"].to_list()[0] == "s0"
    ranks = ("rank_before", "rank_after", "places", "siblings")
    assert moved.sort("sample_id").select(ranks).rows() == [
        (1, 3, -2, 3),
        (2, 1, 1, 3),
        (3, 2, 1, 3),
        (1.5, 2, -0.5, 2),
        (1.5, 1, 0.5, 2),
    ]
    # Of all five: s0 from the top to the bottom.
    percentiles = moved.sort("sample_id").select("percentile_before", "percentile_after").rows()
    assert (percentiles[0], percentiles[3]) == ((100.0, 0.0), (12.5, 25.0))
    # Each group swaps its two: one place each; those of group b travel further among all samples.
    moved = moved_most(made_samples("aabb", [0.4, 0.5, 0.1, 0.9], [0.5, 0.4, 0.9, 0.1]))
    assert moved["places"].abs().to_list() == [1.0] * 4
    assert moved["sample_id"].to_list() == ["s2", "s3", "s0", "s1"]
    assert moved["points"].to_list() == pytest.approx([100, -100, 100 / 3, -100 / 3])


@pytest.mark.parametrize(
    ("groups", "before", "after", "rows"),
    [
        ("aaa", [0.1, 0.2, None], [0.1, 0.3, 0.2], []),
        # The sibling without a previous reward does not make room for others to move.
        ("aaa", [0.1, 0.2, None], [0.3, 0.1, 0.2], [("s0", 1.0, 100.0), ("s1", -1.0, -100.0)]),
        # Groups of one move only among all samples.
        ("abc", [0.1, 0.2, 0.3], [0.3, 0.2, 0.1], [("s0", 0.0, 100.0), ("s2", 0.0, -100.0)]),
        ("a", [0.1], [0.3], []),
    ],
)
def test_those_that_did_not_move_and_those_without_both_are_left_out(
    groups: str, before: list[float | None], after: list[float | None], rows: list[tuple[str, float, float]]
) -> None:
    assert moved_most(made_samples(groups, before, after)).select("sample_id", "places", "points").rows() == rows


def test_no_more_than_requested() -> None:
    samples = made_samples("a" * 50, [float(i) for i in range(50)], [float(-i) for i in range(50)])
    assert moved_most(samples).height == 20
    assert moved_most(samples, 3)["sample_id"].to_list() == ["s0", "s49", "s1"]


def test_a_row_a_reward_with_both_sides() -> None:
    rewards = {"before:old": [0.1, 0.3], "after:new": [0.5, None]}
    rows = reward_rows(compare(made_samples("aa", [0.1, 0.2], [0.4, 0.3], rewards=rewards)))
    turned = "-1.000 / -1.000"
    assert [tuple(row.values()) for row in rows] == [
        ("combined", "0.150 → 0.350", "0.071 → 0.071", "0.0% → 0.0%", "0.0% → 0.0%", turned, turned),
        ("new (added)", "0.500", "none", "100.0%", "50.0%", "", "none / none"),
        ("old (removed)", "0.200", "0.141", "0.0%", "0.0%", "", "1.000 / 1.000"),
    ]


def test_moved_samples_of_two_runs_are_told_apart() -> None:
    turned = ([-1.0, 0.0, 1.0], [1.0, 0.0, -1.0])
    alone = made_samples("aaa", [0.1, 0.2, 0.3], [0.3, 0.2, 0.1], advantages=turned)
    assert tuple(moved_table(moved_most(alone)).rows[0].values()) == (
        "3 → 1 of 3",
        "0.100 → 0.300",
        "s0",
        "prompt of a",
    )
    facts = dict(advantage_facts(compare(alone)["advantages"]))
    assert facts["sign turned"].startswith("100.0% of 2 ")
    both = made_samples("abab", [0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1], runs=["one", "two"] * 2)
    assert {row["sample"] for row in moved_table(moved_most(both)).rows} == {"one s0", "two s1", "one s2", "two s3"}
    assert not moved_table(moved_most(made_samples("aa", [0.1, 0.2], [0.1, 0.2]))).rows


def page(outputs: Outputs, text: str = "a sign", title: str = "scored again") -> str:
    """Write a page of three samples whose prompt and reward have this text for a name; their order is reversed."""
    rewards = {f"before:{text}": [0.5, 0.25, 0.125], f"after:{text}": [0.5, 0.25, None]}
    samples = made_samples("aaa", [0.1, 0.2, 0.3], [0.3, 0.2, 0.1], rewards=rewards, prompts=[text] * 3)
    return render_rescoring_page(compare(samples), samples, moved_most(samples), outputs, title)


def test_every_image_is_there_and_becomes_small_in_a_page_that_opens_offline() -> None:
    outputs: Outputs = {
        ("run", "s0"): Image.new("RGB", (8, 8), (10, 20, 30)),
        ("run", "s2"): Image.new("CMYK", (900, 300)),
    }
    first, last = images(check_offline(page(outputs)))
    assert first.convert("RGB").getpixel((0, 0)) == (10, 20, 30)
    assert last.size == (256, 85)


def test_titles_prompts_labels_and_texts_are_data() -> None:
    text = "".join(check_offline(page({("run", "s0"): EVIL, ("run", "s2"): ""}, EVIL, title=EVIL)).text)
    # Title and heading, the reward's row, and of each of two samples the prompt and the reward; of one the text.
    assert text.count(visible(EVIL)) == 2 + 1 + 2 * 2 + 1
    assert "ranranran" not in text
    assert "output not read" not in text


def test_ranks_rewards_and_what_is_not_there() -> None:
    text = " ".join(" ".join(Page(page({})).text).split())
    assert text.count("output not read") == 2
    assert "rank 1 → 3 of 3 -2 , percentile 100 → 0" in text
    assert "rank 3 → 1 of 3 +2 , percentile 0 → 100" in text
    assert "reward 0.300 0.100 advantage +0.00 +0.00 a sign 0.125 –" in text
    assert "reward 0.100 0.300 advantage +0.00 +0.00 a sign 0.500 0.500" in text


def test_images_are_ranked_within_their_token_sample(tmp_path: Path) -> None:
    """Samples 0 and 3 are images of one token sample; by the first stream sample 0 stands among the token samples."""
    maker = RunMaker(tmp_path, prompts=("one",), streams=("tokens", "denoising"))
    maker.iteration(1)
    stored = read_iterations(maker.store, None, "stored")
    samples = read_rescored(maker.store, stored, stored).sort("sample_id")
    assert samples["group_id"].to_list() == [*["i000001.p0000"] * 3, "i000001.p0000, token sample 0"]
    assert samples["reward_before"].to_list() == [0.4, 0.1, 0.9, 0.8]
    assert samples["advantage_after"].to_list() == pytest.approx([-0.2, -0.8, 0.8, 0.6])
    assert "token_sample" not in samples.columns
    assert compare(samples)["groups"] == 2
