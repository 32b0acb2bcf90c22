import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from grpo_core.rewards.ocr import engines as tesseract_engine
from grpo_core.rewards.ocr.engines import TesseractEngine
from grpo_core.rewards.ocr.lines import Line, in_reading_order, unread
from grpo_core.rewards.scoring_batch import ScoringError
from tests.grpo_core.rewards.conftest import flat, refusal
from tests.grpo_core.rewards.ocr.lettering import CHINESE, draw

ENGLISH = TesseractEngine("eng")
installed = pytest.mark.skipif(shutil.which("tesseract") is None, reason="no Tesseract: apt-get install tesseract-ocr")


@pytest.fixture(autouse=True)
def _ask_again() -> Iterator[None]:
    asked = (tesseract_engine._ask_version, tesseract_engine._ask_languages)
    for ask in asked:
        ask.cache_clear()
    yield
    for ask in asked:
        ask.cache_clear()


@pytest.fixture
def fake_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program that stands before Tesseract on the path; to be filled in."""
    program = tmp_path / "tesseract"
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return program


def test_words_of_low_confidence_are_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    pytesseract = pytest.importorskip("pytesseract")
    # A row of the layout, and two words of a line.
    places = {name: [0, 1, 1] for name in ("block_num", "par_num", "line_num")}
    boxes = {"left": [0, 4, 40], "top": [0, 4, 4], "height": [64, 9, 9]}
    table = {"text": ["", "SALE", "d1vs"], "conf": [-1, 50.0, 49.9], **places, **boxes}
    monkeypatch.setattr(pytesseract, "image_to_data", lambda *_, **__: table)
    assert ENGLISH.read(flat(255)) == (f"SALE {unread('d1vs')}",)


@installed
def test_lines_come_from_above() -> None:
    assert ENGLISH.read(draw("Grand", "Opening Today")) == ("Grand", "Opening Today")


@installed
def test_nothing_is_read_off_a_blank_image() -> None:
    assert ENGLISH.read(flat(255, 64, 64)) == ()
    assert ENGLISH.read(flat(0, 1, 1)) == ()


@installed
def test_chinese_is_read_where_it_is_installed() -> None:
    engine = TesseractEngine("chi_sim")
    if engine.find_problems():
        pytest.skip("no Chinese for Tesseract: apt-get install tesseract-ocr-chi-sim")
    (text,) = engine.read(draw("开业大吉", font=CHINESE))
    assert text.replace(" ", "") == "开业大吉"


@installed
def test_the_format_of_the_file_does_not_matter(tmp_path: Path) -> None:
    image = draw("Library", size=128)
    image.save(tmp_path / "image.gif")
    with Image.open(tmp_path / "image.gif") as opened:
        again = opened.convert("RGB")
        again.format = "JPEG"
        assert ENGLISH.read(again) == ENGLISH.read(image) == ("Library",)


@installed
def test_version_and_digests_name_program_and_languages() -> None:
    assert ENGLISH.version.split("-")[0] == "tesseract"
    assert ENGLISH.version.split("-")[1][0].isdigit()
    assert set(ENGLISH.model_digests()) == {"eng"}
    assert ENGLISH.find_problems() == []


@installed
def test_a_language_that_is_not_installed_is_named_with_its_package() -> None:
    (problem,) = TesseractEngine("eng+xyz_abc").find_problems()
    assert "'xyz_abc'" in problem
    assert "tesseract-ocr-xyz-abc" in problem
    refused = refusal(TesseractEngine("xyz_abc").read, draw("Exit", size=64))
    assert refused == ("rewards.text_accuracy.languages", "xyz_abc")


def test_a_missing_program_is_named_with_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    (problem,) = ENGLISH.find_problems()
    assert "apt-get install tesseract-ocr" in problem
    for use in (lambda: ENGLISH.read(flat(255)), lambda: ENGLISH.version):
        assert refusal(use) == ("rewards.text_accuracy.engine", "tesseract")


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tesseract_engine, "find_spec", lambda name: None)
    assert any("grpo-staged[tesseract]" in problem for problem in ENGLISH.find_problems())
    monkeypatch.setitem(sys.modules, "pytesseract", None)
    assert refusal(ENGLISH.read, flat(255)) == ("rewards.text_accuracy.engine", "tesseract")


@installed
def test_a_breakdown_and_a_delay_are_named(fake_program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = shutil.which("tesseract", path="/usr/bin:/usr/local/bin")
    answer = f'#!/bin/sh\ncase "$1" in --*) exec {real} "$@";; esac\n'
    fake_program.write_text(answer + "echo no memory >&2\nexit 1\n")
    with pytest.raises(ScoringError, match=r"tesseract broke down over it.*no memory"):
        ENGLISH.read(flat(255))
    monkeypatch.setattr(tesseract_engine, "TIMEOUT_SECONDS", 0.2)
    fake_program.write_text(answer + "exec sleep 5\n")
    with pytest.raises(ScoringError, match="timeout"):
        ENGLISH.read(flat(255))


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
