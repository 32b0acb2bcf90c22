"""Lines of any script: which font has a letter, what is written where none has, and what pixels that makes."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tasks.reports.fonts import DEJAVU, Fonts, fonts_for
from tests.grpo_core.rewards.ocr.lettering import CHINESE, CHINESE_TEXTS

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


def test_a_picture_is_always_the_same() -> None:
    fonts = fonts_for([*CHINESE_TEXTS], system=[str(CHINESE)])
    assert (pixels(fonts, CHINESE_TEXTS[1]) == pixels(fonts, CHINESE_TEXTS[1])).all()


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
