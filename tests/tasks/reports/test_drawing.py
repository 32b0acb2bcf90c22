import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tasks.reports.curves import FAINTEST, MAX_POINTS, Curve, bar_plot, iteration_ticks, joint_plot, line_plot
from tasks.reports.fonts import DEJAVU, Fonts, fonts_for
from tests.grpo_core.rewards.ocr.lettering import CHINESE, CHINESE_TEXTS
from tests.tasks.reports.test_run_page import Page


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0.61, 0.76], [0.6, 0.65, 0.7, 0.75, 0.8]),
        ([5e-6, 2.95e-5, 1e-5], [0.0, 1e-5, 2e-5, 3e-5]),
        ([-1.0, 1e9, 1.0], [-5e8, 0.0, 5e8, 1e9]),
        ([0.0], [0.0, 0.5, 1.0]),
        ([7.0, 7.0], [6.0, 6.5, 7.0, 7.5, 8.0]),
        # Means that differ by the order of their sums.
        ([7.0, 7.000000000000001], [6.0, 6.5, 7.0, 7.5, 8.0]),
    ],
)
def test_points_lie_between_round_ticks_and_say_their_values(values: list[float], ticks: list[float]) -> None:
    plot = line_plot(Curve("t", "m", {"a <b>": list(enumerate(values, start=1)), "none": []}))
    assert plot["lines"] == [("a <b>", f"{values[-1]:.4g}", 0)]
    page = Page(str(plot["svg"]))
    titles = [text for text in page.text if "iteration" in text]
    assert titles == [f"a <b>, iteration {at}: {value:.4g}" for at, value in enumerate(values, start=1)]
    places = [(float(each["cx"] or ""), float(each["cy"] or "")) for each in page.named("circle")]
    assert all(0 <= x <= 360 and 0 <= y <= 170 for x, y in places)
    assert [x for x, _ in places] == sorted(x for x, _ in places)
    # Higher values lie further up, so they have a smaller distance from the top.
    by_height = sorted(range(len(values)), key=lambda index: -places[index][1])
    assert [values[index] for index in by_height] == sorted(values)
    numbers = [float(text) for text in page.text if re.fullmatch(r"-?[\d.]+(e[+-]\d+)?", text)]
    assert numbers[: len(ticks)] == pytest.approx(ticks)
    # The script finds the points again at the places that the data state.
    across, up, ((_, _, xs, ys, _),) = json.loads(page.named("svg")[0]["data-curve"] or "")
    for (low, start, high, end), found, side in ((across, xs, 0), (up, ys, 1)):
        placed = [start + (each - low) / (high - low) * (end - start) for each in found]
        assert placed == pytest.approx([place[side] for place in places], abs=0.06)


def test_long_lines_have_one_marker_and_few_points_and_ticks_are_integers() -> None:
    plot = line_plot(Curve("t", "m", {"a": [(x, float(x)) for x in range(200)], "b": [(0, 1.0)]}))
    page = Page(str(plot["svg"]))
    assert [each["class"] for each in page.named("circle")] == ["s0", "s1"]
    assert line_plot(Curve("t", "m", {"a": []})) is None
    long = line_plot(Curve("t", "m", {"a": [(x, float(x)) for x in range(5 * MAX_POINTS)]}))
    xs = json.loads(Page(str(long["svg"])).named("svg")[0]["data-curve"] or "")[2][0][2]
    assert len(xs) <= MAX_POINTS + 1
    assert (xs[0], xs[-1]) == (0, 5 * MAX_POINTS - 1)
    assert iteration_ticks(1, 3, 6) == [1, 2, 3]
    assert iteration_ticks(0, 500, 6) == [0, 100, 200, 300, 400, 500]
    assert iteration_ticks(7, 16, 6) == [8, 10, 12, 14, 16]


def test_bands_enclose_their_line_and_widen_the_axis() -> None:
    band = [(1.0, -4.0, 0.5), (2.0, 0.25, 9.0)]
    plot = line_plot(Curve("t", "m", {"none": [], "a": [(1.0, 0.0), (2.0, 1.0)]}, bands={"a": [band]}))
    page = Page(str(plot["svg"]))
    (area,) = [each["d"] or "" for each in page.named("path") if each["class"] == "band s1"]
    heights = [float(place.split()[1]) for place in re.findall(r"[\d.]+ [\d.]+", area)]
    first, second, *_ = [float(each["cy"] or "") for each in page.named("circle")]
    there, back = heights[:2], heights[:1:-1]
    assert there[0] < first < back[0]
    assert there[1] < second < back[1]
    _, up, ((*_, ranges),) = json.loads(page.named("svg")[0]["data-curve"] or "")
    assert (up[0], up[2]) == (-5, 10)
    assert ranges == [[[-4, 0.25], [0.5, 9]]]


def test_bars_and_squares_count_as_numpy_does_and_stand_where_they_say() -> None:
    before, after = np.random.default_rng(1).normal(size=(2, 300))
    joint, rows, columns = np.histogram2d(before, after, bins=40)
    alone = [np.histogram(side, 40) for side in (before, after)]
    plots = [joint_plot(joint, rows, columns), bar_plot(alone[0], "a"), bar_plot(alone[1], "b", series=1)]
    pages = [Page(str(plot)) for plot in plots]
    said = [text for page in pages for text in page.text if "sample" in text and " to " in text]
    counts = [joint, alone[0][0], alone[1][0]]
    assert [int(text.split()[0]) for text in said] == [int(count) for side in counts for count in side.ravel() if count]
    i, j = np.argwhere(joint)[0]
    assert said[0].endswith(
        f"previous {rows[i]:.3f} to {rows[i + 1]:.3f}, later {columns[j]:.3f} to {columns[j + 1]:.3f}"
    )
    assert [{each["class"] for each in page.named("rect")} for page in pages] == [{"s0"}, {"s0"}, {"s1"}]
    squares, bars, _ = ([{key: each[key] for key in each} for each in page.named("rect")] for page in pages)
    # The highest bar has the largest count, and every one stands on the axis.
    heights = [float(each["height"] or "") for each in bars]
    known = [count for count in alone[0][0] if count]
    assert np.allclose(np.array(heights) / max(heights), np.array(known) / max(known), atol=0.01)
    assert {round(float(each["y"] or "") + float(each["height"] or ""), 1) for each in bars} == {173.0}
    opacities = [float(each["fill-opacity"] or "") for each in squares]
    assert max(opacities) == 1
    assert min(opacities) > FAINTEST
    places = [float(each["x"] or "") for each in squares]
    assert places == sorted(places)


WIDTH, SIZE = 120, 11
NONE = fonts_for([], system=[])


def pixels(fonts: Fonts, line: str) -> np.ndarray:
    """What a line draws on white paper: 1 for ink."""
    image = Image.new("L", (400, 40), "white")
    fonts.draw(image, (4, 28), line, SIZE, "black")
    return np.asarray(image) < 128


def test_a_font_of_the_system_is_used_for_letters_that_are_not_in_the_own_one() -> None:
    text = CHINESE_TEXTS[0]
    plain = fonts_for(["a café, кот, قطة, Ω 😀"], system=[str(CHINESE)])
    assert (plain.paths, plain.missing) == ((str(DEJAVU),), frozenset())
    mixed = fonts_for([f"red {text}"], system=["/nowhere.ttf", __file__, str(CHINESE)])
    assert (mixed.paths, mixed.missing) == ((str(DEJAVU), str(CHINESE)), frozenset())
    assert mixed.shown(text) == text
    # A font has one glyph for all letters that it lacks.
    drawn = [pixels(mixed, letter) for letter in text]
    assert all((drawn[0] != each).any() for each in drawn[1:])


def test_a_letter_without_a_glyph_is_written_as_its_code_point() -> None:
    fonts = fonts_for(["red 开业, नम", "\x1b[2J\u202ex \n\t"], system=[])
    assert fonts.shown("red 开业, नम") == "red [U+5F00 U+4E1A], [U+0928 U+092E]"
    # A control that would turn the order of the letters, or that a terminal would obey.
    assert fonts.shown("\x1b[2J\u202ex") == "[U+001B][2J[U+202E]x"
    assert fonts.missing_scripts == "CJK, Devanagari"
    assert fonts_for(["\x1b"], system=[]).missing_scripts == ""


def test_letters_of_right_to_left_scripts_stand_in_their_order() -> None:
    """The first letter of the text is the rightmost; in Hebrew no letter joins its neighbour."""
    alef, bet = "א", "ב"
    word = np.flatnonzero(pixels(NONE, alef + bet).any(axis=0))
    for letter, at_the_right in ((alef, True), (bet, False)):
        alone = pixels(NONE, letter)
        columns = alone[:, alone.any(axis=0)]
        ends = slice(word[-1] + 1 - columns.shape[1], word[-1] + 1) if at_the_right else slice(word[0], None)
        part = pixels(NONE, alef + bet)[:, ends][:, : columns.shape[1]]
        assert (part == columns).mean() > 0.98
    # Between Latin words too.
    mixed, turned = pixels(NONE, f"x {alef}{bet} x"), pixels(NONE, f"x {bet}{alef} x")
    assert (mixed != turned).any()


WORDS = st.text(st.sampled_from("ab äöкошкаقطة-"), max_size=60)


@given(WORDS)
def test_lines_hold_the_text_and_are_no_wider_than_they_may_be(text: str) -> None:
    lines = NONE.lines(text, SIZE, WIDTH, 99)
    assert "".join("".join(lines).split()) == "".join(text.split())
    assert all(np.flatnonzero(pixels(NONE, line).any(axis=0)).max(initial=0) <= WIDTH + 5 for line in lines)


@pytest.mark.parametrize(
    ("text", "count", "expected"),
    [
        ("one two", 2, ["one two"]),
        ("", 2, [""]),
        ("a longer line of words that folds", 9, ["a longer line of", "words that folds"]),
        ("a longer line of words that folds", 1, ["a longer line of …"]),
        ("x" * 40, 1, ["xxxxxxxxxxxxxxx …"]),
    ],
)
def test_lines_end_at_spaces_and_a_text_that_is_too_long_is_cut(text: str, count: int, expected: list[str]) -> None:
    assert NONE.lines(text, SIZE, WIDTH, count) == expected


def test_wide_letters_fill_their_lines() -> None:
    text = f"red {''.join(CHINESE_TEXTS)}"
    first, *rest = fonts_for([text], system=[str(CHINESE)]).lines(text, SIZE, WIDTH, 9)
    # A Chinese letter is as wide as the size.
    assert first.startswith("red 开业大吉")
    assert all(len(line) == WIDTH // SIZE for line in rest[:-1])


def test_fonts_are_chosen_in_one_order_whatever_the_system_lists_first(tmp_path: Path) -> None:
    names = ["ZBold.ttf", "NotoSans-Italic.ttf", "A.ttf", "NotoSans-Regular.ttf"]
    for name in names:
        (tmp_path / name).write_bytes(CHINESE.read_bytes())
    for order in (names, names[::-1]):
        chosen = fonts_for(CHINESE_TEXTS, system=[str(tmp_path / name) for name in order])
        assert [Path(path).name for path in chosen.paths[1:]] == ["NotoSans-Regular.ttf"]


@pytest.mark.slow
def test_matplotlib_is_imported_only_where_letters_are_drawn() -> None:
    modules = "flows.command_line.main, flows.training.train, flows.inspect_run, flows.rescoring.rescore"
    command = f"import sys, {modules}; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", command], check=False).returncode == 0
