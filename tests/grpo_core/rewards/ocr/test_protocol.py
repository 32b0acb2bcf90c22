import pytest

from grpo_core.rewards.ocr.protocol import Line, in_reading_order


def line(text: str, left: float, top: float, height: float = 10) -> Line:
    return Line(text, left, top, top + height)


@pytest.mark.parametrize(
    ("lines", "texts"),
    [
        ([], ()),
        ([line("below", 0, 50), line("above", 90, 0)], ("above", "below")),
        ([line("right", 60, 0), line("left", 0, 0)], ("left", "right")),
        # A row that falls by four of ten pixels from word to word.
        ([line("three", 60, 8), line("one", 0, 0), line("two", 30, 4)], ("one", "two", "three")),
        # Rows of small print eight pixels apart.
        ([line("below", 0, 8, 6), line("above", 40, 0, 6)], ("above", "below")),
        # A price in large digits beside a small name.
        ([line("9.99", 60, 0, 40), line("Tea", 0, 15, 10)], ("Tea", "9.99")),
        # Half of the height is not enough.
        ([line("below", 0, 5), line("above", 40, 0)], ("above", "below")),
        ([line("left", 0, 4), line("right", 40, 0)], ("left", "right")),
    ],
)
def test_rows_from_above_and_words_from_the_left(lines: list[Line], texts: tuple[str, ...]) -> None:
    assert in_reading_order(lines) == texts
    assert in_reading_order(lines[::-1]) == texts


def test_falling_lines_are_read_from_the_right() -> None:
    columns = [Line(text, left, 0, 90, falls=True) for text, left in (("last", 0), ("first", 60))]
    assert in_reading_order(columns) == ("first", "last")
    assert in_reading_order([*columns, Line("rising", 30, 0, 90)]) == ("last", "rising", "first")
